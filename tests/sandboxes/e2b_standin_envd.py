"""The daemon inside a stand-in sandbox, as E2B's SDK 2.63 speaks to it: Connect RPC in JSON, and files over HTTP.

Formats: https://connectrpc.com/docs/protocol (streams are frames of flags (1 byte), length (4 bytes), JSON; flag 2
ends the stream) and E2B's `process.proto`. As the real one does, a command's stream ends only when nobody holds its
output any more, and leaving the stream leaves the command running. Used by `e2b_standin`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import struct
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.sandboxes.e2b_standin_box import USERS, Box

_STATUS = {"not_found": 404, "invalid_argument": 400, "unauthenticated": 401, "unavailable": 503, "internal": 500}


class RpcError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.body = {"code": code, "message": message}
        self.status = _STATUS[code]


def frame(message: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


async def read_frame(request: web.Request) -> dict[str, Any] | None:
    try:
        head = await request.content.readexactly(5)
        message: dict[str, Any] = json.loads(await request.content.readexactly(struct.unpack(">BI", head)[1]))
        return message
    except asyncio.IncompleteReadError:
        return None


class Running:
    """One command and whoever listens to it."""

    def __init__(self, process: asyncio.subprocess.Process, config: dict[str, Any]) -> None:
        self.process = process
        self.config = config
        self.listeners: list[asyncio.Queue[dict[str, Any] | None]] = []
        self.task = asyncio.create_task(self._pump())

    async def _pump(self) -> None:
        async def pass_on(stream: asyncio.StreamReader, name: str) -> None:
            while data := await stream.read(32768):
                self._send({"data": {name: base64.b64encode(data).decode()}})

        assert self.process.stdout is not None and self.process.stderr is not None
        await asyncio.gather(pass_on(self.process.stdout, "stdout"), pass_on(self.process.stderr, "stderr"))
        code = await self.process.wait()
        if code < 0:  # as Go says it
            names = {9: "killed", 15: "terminated", 11: "segmentation fault", 6: "aborted", 2: "interrupt"}
            status = f"signal: {names.get(-code, f'signal {-code}')}"
            self._send({"end": {"exitCode": -1, "exited": False, "status": status, "error": status}})
        else:
            error = {"error": f"exit status {code}"} if code else {}
            self._send({"end": {"exitCode": code, "exited": True, "status": f"exit status {code}", **error}})
        for queue in self.listeners:
            queue.put_nowait(None)

    def _send(self, event: dict[str, Any]) -> None:
        for queue in self.listeners:
            queue.put_nowait({"event": event})


class Envd:
    """Serves one box. `cut` is asked before each event whether to drop the connection there."""

    def __init__(self, box: Box, env: dict[str, str], user: str, workdir: str, cut: Callable[[], bool]) -> None:
        self.box = box
        self._env = env
        self._user = user
        self._workdir = workdir
        self._cut = cut
        self._running: dict[int, Running] = {}
        self.over = False  # the sandbox ended, and this daemon with it: streams break off

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.path == "/health":
                return web.Response(status=204)
            if request.path == "/files":
                return await (self._write(request) if request.method == "POST" else self._read(request))
            service, _, method = request.path.removeprefix("/").rpartition("/")
            if service != "process.Process":
                raise RpcError("not_found", f"no service {service}")
            if method in ("Start", "Connect"):
                return await self._stream(request, method)
            if method == "StreamInput":
                return await self._stream_input(request)
            return web.json_response(await self._unary(method, await request.json()))
        except RpcError as e:
            if request.headers["Content-Type"].startswith("application/connect+"):
                body = frame({"error": e.body}, 2)
                return web.Response(body=body, content_type="application/connect+json")
            return web.json_response(e.body, status=e.status)

    def _who(self, request: web.Request) -> str:
        user = self._user
        if "Authorization" in request.headers:
            user = base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode().rstrip(":")
        if user not in USERS:
            raise RpcError("unauthenticated", f"invalid username: '{user}'")
        return user

    async def _stream(self, request: web.Request, method: str) -> web.StreamResponse:
        message = await read_frame(request)
        assert message is not None
        running = await self._start(request, message) if method == "Start" else self._find(message)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        running.listeners.append(queue)
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        assert request.transport is not None
        limit = request.headers.get("Connect-Timeout-Ms")
        try:
            await response.prepare(request)
            async with asyncio.timeout(int(limit) / 1000 if limit else None):
                await response.write(frame({"event": {"start": {"pid": running.process.pid}}}))
                while (event := await queue.get()) is not None:
                    if self.over or self._cut():
                        request.transport.abort()
                        return response
                    await response.write(frame(event))
            await response.write(frame({}, 2))
        except TimeoutError:
            self.box.signal(running.process.pid, 9)
            await response.write(
                frame({"error": {"code": "deadline_exceeded", "message": "context deadline exceeded"}}, 2)
            )
        except (ConnectionError, asyncio.CancelledError):
            pass  # nobody listens any more; the command goes on
        finally:
            running.listeners.remove(queue)
        return response

    async def _start(self, request: web.Request, message: dict[str, Any]) -> Running:
        config = message["process"]
        user = self._who(request)
        cwd = config.get("cwd") or self._workdir or USERS[user][2]
        if not self.box.where(cwd).is_dir():
            raise RpcError("invalid_argument", f"cwd '{cwd}' does not exist")
        process = await self.box.run(
            [config["cmd"], *config.get("args", [])],
            user=user,
            cwd=cwd,
            env={**self._env, **config.get("envs", {})},
            stdin=message.get("stdin", True),
        )
        running = self._running[process.pid] = Running(process, config)
        running.task.add_done_callback(lambda _: self._running.pop(process.pid, None))
        return running

    def _find(self, message: dict[str, Any]) -> Running:
        pid = message["process"].get("pid")
        if pid not in self._running:
            raise RpcError("not_found", f"process with pid {pid} not found")
        return self._running[pid]

    async def _unary(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        if method == "List":
            return {"processes": [{"pid": pid, "config": r.config} for pid, r in self._running.items()]}
        running = self._find(message)
        if method == "SendSignal":
            number = {"SIGNAL_SIGKILL": 9, "SIGNAL_SIGTERM": 15}[message["signal"]]
            self.box.signal(running.process.pid, number)
        elif method == "SendInput":
            await self._feed(running, message["input"])
        elif method == "CloseStdin":
            assert running.process.stdin is not None
            running.process.stdin.close()
        else:
            raise RpcError("not_found", method)
        return {}

    async def _stream_input(self, request: web.Request) -> web.StreamResponse:
        first = await read_frame(request)
        assert first is not None
        running = self._find(first["start"])
        while (message := await read_frame(request)) is not None:
            if "data" in message:
                await self._feed(running, message["data"]["input"])
        return web.Response(body=frame({}) + frame({}, 2), content_type="application/connect+json")

    async def _feed(self, running: Running, data: dict[str, str]) -> None:
        stdin = running.process.stdin
        if stdin is None:
            raise RpcError("internal", "stdin not enabled or closed")
        try:
            stdin.write(base64.b64decode(data["stdin"]))
            await stdin.drain()
        except ConnectionError as e:
            raise RpcError("internal", f"error writing to stdin: {e}") from e

    # --- files ---

    async def _write(self, request: web.Request) -> web.StreamResponse:
        path = self.box.where(request.query["path"])
        user = request.query.get("username", self._user)
        assert request.content_type == "application/octet-stream", "only streamed uploads are spoken here"
        missing = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            async for chunk in request.content.iter_chunked(65536):
                file.write(chunk)
        for made in (path, *missing):
            os.chown(made, USERS[user][0], USERS[user][1])
        return web.json_response([{"name": path.name, "type": "file", "path": request.query["path"]}])

    async def _read(self, request: web.Request) -> web.StreamResponse:
        path = self.box.where(request.query["path"])
        if not path.is_file():
            return web.json_response({"code": 404, "message": f"path '{path}' does not exist"}, status=404)
        response = web.StreamResponse()
        response.content_length = path.stat().st_size
        await response.prepare(request)
        assert request.transport is not None
        with path.open("rb") as file, contextlib.suppress(ConnectionError):
            while chunk := file.read(65536):
                if self._cut():
                    request.transport.abort()
                    break
                await response.write(chunk)
        return response

"""An ORS server that goes wrong as it is told, for the tests of faults: real HTTP, written by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, "FakeOrs"], Awaitable[web.StreamResponse]]
RESULT = {"ok": True, "output": {"blocks": [{"type": "text", "text": "done"}], "metadata": None, "reward": 1.0}}


class FakeOrs:
    """One environment `fake` with one task and one tool `act`. `answers` replaces a route's answers, in order."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()  # requests by path
        self.headers: list[dict[str, str]] = []
        self.runs = 0  # of the tool
        self.open: set[str] = set()
        self.answers: dict[str, list[Answer | int]] = {}  # a number is a status
        self.result: Any = RESULT
        self.url = ""
        self._num_sessions = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/fake")
        self.asked[path] += 1
        self.headers.append(dict(request.headers))
        scripted = self.answers.get(path)
        if scripted:
            answer = scripted.pop(0) if len(scripted) > 1 else scripted[0]
            if isinstance(answer, int):
                return web.json_response({"detail": f"told to say {answer}"}, status=answer)
            return await answer(request, self)
        return await self.usual(request)

    async def usual(self, request: web.Request) -> web.StreamResponse:
        path, sid = request.path.removeprefix("/fake"), request.headers.get("X-Session-ID", "")
        if path == "/create_session":
            self._num_sessions += 1
            return await self.stream(request, ("task_id", f"s{self._num_sessions}"), ("end", ""))
        if path == "/create":
            self.open.add(sid)
        elif path == "/delete":
            self.open.discard(sid)
        elif path == "/call":
            return await self.call(request)
        said: dict[str, Any] = {
            "/list_environments": ["fake"],
            "/splits": [{"name": "train", "type": "train"}],
            "/num_tasks": {"num_tasks": 1},
            "/task_range": {"tasks": [{"n": 0}], "env_name": "fake"},
            "/task": {"task": {"n": 0}, "env_name": "fake"},
            "/messages": [{"role": "user", "blocks": [{"type": "text", "text": "Act."}]}],
            "/task_tools": {"tools": [{"name": "act", "description": "", "input_schema": None, "annotations": {}}]},
        }
        return web.json_response(said.get(path, {"status": "ok"}))

    async def call(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("task_id") is None:
            self.runs += 1
        run = body.get("task_id") or f"r{self.runs}"
        return await self.stream(request, ("task_id", run), ("end", json.dumps(self.result)))

    async def stream(self, request: web.Request, *events: tuple[str, str], cut: bool = False) -> web.StreamResponse:
        """These events; `cut` then ends the connection in the middle of the last one."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        text = "".join(f"event: {name}\ndata: {data}\n\n" for name, data in events)
        await response.write(text[: -len(text) // 8 or None].encode() if cut and events else text.encode())
        if cut:
            await asyncio.sleep(0.05)
            assert request.transport is not None
            request.transport.abort()
        return response


@contextlib.asynccontextmanager
async def faking() -> AsyncIterator[FakeOrs]:
    fake = FakeOrs()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    fake.url = f"http://127.0.0.1:{port}"
    try:
        yield fake
    finally:
        await runner.cleanup()

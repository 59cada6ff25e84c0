"""The talk with Harbor's worker (`harbor_worker`): requests and answers over a socket, and the worker's life.

Owns the process and its connection; what is asked is `harbor`'s and `harbor_sandbox`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any, Self

from sandboxes.base import SandboxError, SandboxGone, SetupFailed
from sandboxes.lifecycle import LifecycleError, OwnedProcess, start_process

_WORKER = Path(__file__).with_name("harbor_worker.py")
_HELLO_S = 120.0  # Harbor is a large program to import
_STOP_GRACE_S = 60.0  # for every environment to be removed
_MAX_LINE = 256_000_000  # bytes


class Worker:
    """The other half of the bridge, in a process of its own. Made by `Worker.start`."""

    def __init__(self, process: OwnedProcess, log: Path) -> None:
        self._process = process
        self._log = log
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, python: Path, *, registry: Path, run_id: str, log: Path) -> Self:
        """Raises SandboxError, with the last line of the log, when it does not come up."""
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [str(python), "-P", str(_WORKER), str(theirs.fileno())]
            try:
                process = await asyncio.to_thread(
                    lambda: start_process(
                        argv,
                        env=dict(os.environ),
                        cwd=log.parent,
                        log_path=log,
                        registry=registry,
                        kind="harbor_worker",
                        pass_fds=[theirs.fileno()],
                        run_id=run_id,
                        grace_s=_STOP_GRACE_S,
                    )
                )
            except LifecycleError as e:
                ours.close()
                raise SandboxError(str(e)) from e
        worker = cls(process, log)
        hello = worker._expect(0)
        try:
            reader, worker._writer = await asyncio.open_connection(sock=ours, limit=_MAX_LINE)
            worker._reading = asyncio.create_task(worker._read(reader), name="harbor worker")
            await asyncio.wait_for(hello, _HELLO_S)
        except TimeoutError as e:
            await worker.stop()
            raise SandboxError(f"Harbor's worker did not answer within {_HELLO_S:.0f} s; see {log}") from e
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Raises SandboxGone when the worker died, SetupFailed or SandboxError for what the environment says."""
        if self._writer is None or self._reading is None or self._reading.done():
            raise SandboxGone(self._death())
        self._num_calls += 1
        number = self._num_calls
        answer = self._expect(number)
        try:
            self._writer.write(json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n")
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _expect(self, number: int) -> asyncio.Future[dict[str, Any]]:
        self._waiting[number] = asyncio.get_running_loop().create_future()
        return self._waiting[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                future = self._waiting.get(message["id"])
                if future is None or future.done():
                    continue
                if "value" in message:
                    future.set_result(message["value"])
                else:
                    kind = SetupFailed if message["setup"] else SandboxError
                    future.set_exception(kind(f"Harbor's environment says: {message['error']}"))
        except OSError:
            pass  # the connection broke: the same as its end
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxGone(self._death()))

    def _death(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return f"Harbor's worker ended, and its sandboxes with it: {lines[-1] if lines else 'no message'}"
        return "Harbor's worker ended, and its sandboxes with it"

    async def stop(self) -> None:
        """It stops every environment before it ends."""
        if self._writer is not None:
            self._writer.close()  # it reads the end, and stops its environments
        await asyncio.shield(asyncio.to_thread(self._process.wait, _STOP_GRACE_S))
        await self._process.stop_async(_STOP_GRACE_S)
        if self._reading is not None:
            await asyncio.wait([self._reading])

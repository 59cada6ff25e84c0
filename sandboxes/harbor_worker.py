"""The half of the Harbor bridge that runs in Harbor's own Python (3.12): makes environments, runs commands in them.

Run as a script by `harbor`, never imported by us: `python -P harbor_worker.py FD`. FD is a socket on which requests and
answers are JSON, one per line: {"id": 1, "op": "exec", "box": "b1", ...} is answered by {"id": 1, "value": {...}} or
{"id": 1, "error": "one line", "setup": true} (`setup`: what was asked for cannot be had). The first line is ours:
{"id": 0, "value": {"version": "0.26.0"}}. Answers come in any order. When the socket closes, or at SIGTERM, every
environment is stopped. What programs and libraries print goes to the log.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, SandboxBuildFailedError
from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import EnvironmentConfig, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

_MAX_LINE = 256_000_000  # bytes; the largest are chunks of output
# A task or settings that no retry mends. Harbor has no common class for it: what its constructors raise.
_SETUP_ERRORS = (SandboxBuildFailedError, FileNotFoundError, ImportError, NotImplementedError, TypeError, ValueError)

Request = dict[str, Any]


class Worker:
    """Environments by the name that the other side gave each."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._boxes: dict[str, BaseEnvironment] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ops: dict[str, Callable[[Request], Awaitable[dict[str, Any]]]] = {
            "start": self._start,
            "exec": self._exec,
            "upload": self._upload,
            "download": self._download,
            "stop": self._stop,
        }

    def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the other side is gone."""
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(json.loads(line)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await asyncio.gather(*(self._stop({"box": box}) for box in list(self._boxes)), return_exceptions=True)

    async def _answer(self, request: Request) -> None:
        try:
            self.send({"id": request["id"], "value": await self._ops[request["op"]](request)})
        except Exception as error:  # whatever a provider's SDK raises is the other side's to judge
            lines = str(error).strip().splitlines() or [type(error).__name__]
            setup = request["op"] == "start" and isinstance(error, _SETUP_ERRORS)
            self.send({"id": request["id"], "error": " ".join(lines)[-2000:], "setup": setup})

    async def _start(self, request: Request) -> dict[str, Any]:
        box = request["box"]
        trial = TrialPaths(Path(request["folder"]))
        trial.mkdir()
        settings: dict[str, Any] = {
            "environment_dir": Path(request["environment_dir"]),
            "environment_name": request["name"],
            "session_id": request["session_id"],
            "trial_paths": trial,
            "task_env_config": EnvironmentConfig.model_validate(request["config"]),
            "network_policy": NetworkPolicy.model_validate(request["network"]),
            **request["options"],
        }
        kind = request["kind"]
        if ":" in kind:
            made = EnvironmentFactory.create_environment_from_import_path(kind, **settings)
        else:
            made = EnvironmentFactory.create_environment(EnvironmentType(kind), **settings)
        self._boxes[box] = made  # before it starts, so that a stop in the meantime finds it
        self._starting[box] = asyncio.create_task(self._begin(made, request["timeout_s"]))
        try:
            await self._starting[box]
        except asyncio.CancelledError as error:
            raise RuntimeError("it was stopped while it started") from error
        finally:
            del self._starting[box]
        return {}

    async def _begin(self, made: BaseEnvironment, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(made.start(force_build=False), timeout_s)
        except TimeoutError as error:
            raise SandboxBuildFailedError(f"it was not ready within {timeout_s:.0f} s") from error

    async def _exec(self, request: Request) -> dict[str, Any]:
        result = await self._boxes[request["box"]].exec(
            request["command"], cwd="/", env=request["env"], timeout_sec=request["timeout_s"], user=request["user"]
        )
        return {"out": result.stdout or "", "err": result.stderr or "", "code": result.return_code}

    async def _upload(self, request: Request) -> dict[str, Any]:
        await self._boxes[request["box"]].upload_file(Path(request["source"]), request["target"])
        return {}

    async def _download(self, request: Request) -> dict[str, Any]:
        await self._boxes[request["box"]].download_file(request["source"], Path(request["target"]))
        return {}

    async def _stop(self, request: Request) -> dict[str, Any]:
        box = request["box"]
        if (starting := self._starting.get(box)) is not None:
            starting.cancel()
            await asyncio.wait([starting])
        if (made := self._boxes.get(box)) is not None:
            await made.stop(delete=True)
            self._boxes.pop(box, None)
        return {}


async def main(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=_MAX_LINE)
    worker = Worker(writer)
    worker.send({"id": 0, "value": {"version": importlib.metadata.version("harbor")}})
    serving = asyncio.create_task(worker.serve(reader))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    await asyncio.wait([serving])
    await worker.close()


if __name__ == "__main__":
    # A signal to the group that we were started in would also end the commands with which environments are stopped.
    os.setpgid(0, 0)
    asyncio.run(main(int(sys.argv[1])))

"""E2B sandboxes in which every agent waits, by the thousand: the tests' stand-in for E2B without its processes.

    python -m benchmarks.waiting_boxes [AGENT_S]

A program of its own, so that its time is nobody else's. Prints its URL, then a line with what it holds for every line
that it is sent. The REST API, lifetimes and the daemon's protocol are `tests.sandboxes.e2b_standin`'s, the client is
E2B's own SDK; but a box is a name only. Of our scripts (`sandboxes.inside`) those that set a box up succeed at once,
and the one that waits for an agent's end answers "running" when its time is over, as it does where an agent waits for
a model; with AGENT_S agents end by themselves after so many seconds. So the work of a runner that holds such sandboxes
is real, and all of it is the runner's.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from sandboxes import inside
from tests.sandboxes.e2b_standin import Life, Standin
from tests.sandboxes.e2b_standin_box import Box
from tests.sandboxes.e2b_standin_envd import Envd, frame, read_frame
from tests.sandboxes.e2b_standin_templates import Template

_WHO = b"user\n/home/user\n/home/user\n"  # to `e2b_sandbox`, which asks each template once
_ACCOUNT = b"1000 1000 100\nuser\n/home/user\n"  # of `inside.SETUP`: ids, start of the box's time, name, home
_RUNNING = b"running - 0 0 - -\n"  # of `inside.JOB_STATUS`
_FRAMED = [inside.SETUP, inside.JOB_NEW, inside.JOB_START, inside.JOB_STATUS, inside.KILL, inside.WRITE, inside.OPEN]
_FRAMED += [inside.RESET, inside.ENSURE, inside.LOOK, inside.READ, inside.RUN]
_ENDED = b"ended 0 0 0 0 100\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command comes to."""

    out: bytes = b""
    err: bytes = b""
    wait_s: float = 0.0


def answer_to(argv: list[str], agent_s: float = math.inf) -> Answer:
    """`argv` as `e2b_envd` sends it: /bin/sh -c WRAPPER sh FOLDER LIMITS, then the command. Raises ValueError.

    `agent_s`: from now until the agent ends.
    """
    command = argv[6:]
    if command[:2] != [inside.SHELL, "-c"]:
        raise ValueError(f"no script of ours: {command[:3]}")
    script, arguments = command[2], command[4:]
    if script not in _FRAMED:  # what prepares a box, or unpacks into it
        return Answer(_WHO if script.startswith("id -un") else b"")
    trailer = f"{arguments[0]} 0 0\n".encode()
    if script == inside.SETUP:
        return Answer(_ACCOUNT + trailer, trailer)
    if script == inside.JOB_STATUS:
        wait_s = int(arguments[2]) / 100
        return Answer((_RUNNING if wait_s < agent_s else _ENDED) + trailer, trailer, max(0.0, min(wait_s, agent_s)))
    return Answer(trailer, trailer)


class WaitingBox(Box):
    """Runs nothing."""

    async def start(self) -> None:
        return

    @property
    def alive(self) -> bool:
        return True

    async def stop(self) -> None:
        return


class WaitingEnvd(Envd):
    """Serves a box in which nothing runs."""

    ends_at = math.inf  # of the agent, once it is started; monotonic seconds
    agent_s = math.inf

    async def _stream(self, request: web.Request, method: str) -> web.StreamResponse:
        message = await read_frame(request)
        assert message is not None and method == "Start"
        process = message["process"]
        argv = [process["cmd"], *process["args"]]
        if inside.JOB_START in argv:
            self.ends_at = time.monotonic() + self.agent_s
        answer = answer_to(argv, self.ends_at - time.monotonic())
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        await response.write(frame({"event": {"start": {"pid": 100}}}))
        await asyncio.sleep(answer.wait_s)
        with contextlib.suppress(ConnectionError):  # nobody listens any more: the runner has ended
            for stream, data in (("stdout", answer.out), ("stderr", answer.err)):
                if data:
                    await response.write(frame({"event": {"data": {stream: base64.b64encode(data).decode()}}}))
            await response.write(frame({"event": {"end": {"exitCode": 0, "exited": True, "status": "exit status 0"}}}))
            await response.write(frame({}, 2))
        return response

    async def _unary(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def _write(self, request: web.Request) -> web.StreamResponse:
        async for _ in request.content.iter_chunked(65536):
            pass
        return web.json_response([{"name": "file", "type": "file", "path": request.query["path"]}])


class WaitingBoxes(Standin):
    """See `Standin`."""

    agent_s = math.inf

    async def _bear(self, body: dict[str, Any], template: Template, timeout: int) -> Life:
        sandbox_id = "i" + secrets.token_hex(10)
        box = WaitingBox(self._folder / sandbox_id)
        envd = WaitingEnvd(box, {}, "user", "", self._cuts)
        envd.agent_s = self.agent_s
        now = time.time()
        life = Life(sandbox_id, body, box, envd, secrets.token_hex(16), now, now + timeout, timeouts=[timeout])
        self.lives[sandbox_id] = life
        self._arm(life)
        return life


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="waiting-boxes-") as folder:
        boxes = WaitingBoxes(Path(folder))
        boxes.agent_s = float(sys.argv[1]) if len(sys.argv) > 1 else math.inf
        boxes.start()
        print(boxes.url, flush=True)
        for _ in sys.stdin:
            print(json.dumps({"running": len(boxes.running), "requests": len(boxes.requests)}), flush=True)
        boxes.stop()


if __name__ == "__main__":
    main()

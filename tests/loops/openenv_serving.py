"""Real OpenEnv servers as processes, and what is in their way, for the tests of `loops.openenv`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.loops.base import ROW, Scores, Transcript
from harness_trainer.loops.openenv.environment import OpenEnvEnvironment
from harness_trainer.loops.openenv.serve import SESSIONS
from harness_trainer.loops.openenv.servers import serving
from harness_trainer.tasks import Task

ENVS = Path(__file__).parent / "envs"
ADDING, SINGLE, SPEAKING = (
    f"local:{ENVS / 'adding.py'}:app",
    f"local:{ENVS / 'adding.py'}:single",
    f"local:{ENVS / 'speaking.py'}:app",
)


def task(**columns: Any) -> Task:
    return Task("game", Path("rows.jsonl"), "Add.", metadata={ROW: {"prompt": "Add.", **columns}})


@contextlib.asynccontextmanager
async def served(folder: Path, target: str = ADDING, **settings: Any) -> AsyncIterator[str]:
    """The address of a server of its own, which is not the environment's to start again."""
    async with serving(OpenEnvConfig(target=target, **settings), folder / "registry") as server:
        yield server.url


def environment(folder: Path, target: str = ADDING, **settings: Any) -> OpenEnvEnvironment:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Add."}) + "\n")
    config = OpenEnvConfig(target=target, **{"capacity_patience_s": 5, **settings})
    return OpenEnvEnvironment(config, rows, folder / "registry")


async def called(episode: Any, name: str, **arguments: Any) -> Any:
    (tool,) = (tool for tool in episode.tools if tool.name == name)
    return await tool.call(arguments)


async def scores(episode: Any) -> Scores:
    return await episode.rewards(Transcript([]))


async def num_sessions(url: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as http:
        return int((await http.get(url + SESSIONS)).json()["active"])


async def none_left(url: str, within_s: float = 20) -> None:
    async with asyncio.timeout(within_s):
        while await num_sessions(url):
            await asyncio.sleep(0.02)


class DeafRelay:
    """A TCP relay on the loopback that swallows WebSocket pings and pongs, as some tunnels do."""

    def __init__(self, url: str) -> None:
        self.num_swallowed = 0
        self._to = httpx.URL(url)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for one in self._tasks:
            one.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._to.host, self._to.port)
        for source, sink in ((reader, back), (there, writer)):
            one = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(one)
            one.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """HTTP up to the upgrade's empty line as it is, then frame by frame."""
        try:
            head = await source.readuntil(b"\r\n\r\n")
            sink.write(head)
            if b"upgrade: websocket" not in head.lower():
                while data := await source.read(65536):
                    sink.write(data)
                return
            while True:
                frame, kind = await _frame(source)
                if kind in (9, 10):
                    self.num_swallowed += 1
                else:
                    sink.write(frame)
                    await sink.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass  # the end of either side is the end of the link
        finally:
            sink.close()


async def _frame(source: asyncio.StreamReader) -> tuple[bytes, int]:
    head = await source.readexactly(2)
    length = head[1] & 127
    more = await source.readexactly({126: 2, 127: 8}.get(length, 0))
    length = int.from_bytes(more, "big") if more else length
    rest = await source.readexactly(length + (4 if head[1] & 128 else 0))
    return head + more + rest, head[0] & 15

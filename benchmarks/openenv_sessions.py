"""OpenEnv sessions through our client: many at once without a lost step, and none that is left on the server.

One local server of the echo example, as a process of its own. First all sessions at once, step after step, each echo
compared; then episode after episode, of which every tenth breaks off without a close. The counts are the server's own.

    python -m benchmarks.openenv_sessions [--sessions 64] [--steps 50] [--episodes 10000] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.loops.base import ROW, EpisodeLost
from harness_trainer.loops.openenv.environment import OpenEnvEnvironment
from harness_trainer.loops.openenv.serve import SESSIONS
from harness_trainer.loops.openenv.servers import serving
from harness_trainer.tasks import Task

ECHO = Path(__file__).parents[1] / "examples" / "white_box" / "echo.py"
TASK = Task("echo", Path("rows.jsonl"), "Echo.", metadata={ROW: {"prompt": "Echo."}})
FREED_S = 30.0  # a session may outlast its client by the handshake of its end


@dataclass(frozen=True, slots=True)
class Sessions:
    """What was seen. Example: Sessions(num_steps=3200, num_lost=0, most_open=64, num_left=0, seconds=4.1)."""

    num_steps: int
    num_lost: int  # answered wrongly, or not at all
    most_open: int  # by the server's count
    num_left: int  # on the server, once all is over
    seconds: float


async def measure(*, sessions: int, steps: int, episodes: int) -> tuple[Sessions, Sessions]:
    """All at once; then one after the other, `sessions` side by side."""
    with tempfile.TemporaryDirectory() as folder:
        config = OpenEnvConfig(target=f"local:{ECHO}:app", max_episodes=sessions + 1)
        async with serving(config, Path(folder)) as server:
            settings = OpenEnvConfig(target=server.url, max_episodes=sessions, observation="echoed_message")
            async with OpenEnvEnvironment(settings, Path(folder) / "rows.jsonl") as environment:
                await _freed(server.url)
                at_once = await _at_once(environment, server.url, sessions, steps)
                in_turn = await _in_turn(environment, server.url, sessions, episodes)
    return at_once, in_turn


async def _at_once(environment: OpenEnvEnvironment, url: str, sessions: int, steps: int) -> Sessions:
    most_open, done = 0, asyncio.Event()

    async def watch() -> None:
        nonlocal most_open
        while not done.is_set():
            most_open = max(most_open, await _open_sessions(url))
            await asyncio.sleep(0.02)

    began = time.perf_counter()
    watching = asyncio.create_task(watch())
    lost = await asyncio.gather(*(_episode(environment, number, steps) for number in range(sessions)))
    seconds = time.perf_counter() - began
    done.set()
    await watching
    return Sessions(sessions * steps, sum(lost), most_open, await _freed(url), seconds)


async def _in_turn(environment: OpenEnvEnvironment, url: str, sessions: int, episodes: int) -> Sessions:
    numbers = iter(range(episodes))
    began = time.perf_counter()

    async def play() -> int:
        return sum([await _episode(environment, number, 1, cut=number % 10 == 9) for number in numbers])

    lost = await asyncio.gather(*(play() for _ in range(sessions)))
    seconds = time.perf_counter() - began
    return Sessions(episodes, sum(lost), sessions, await _freed(url), seconds)


async def _episode(environment: OpenEnvEnvironment, number: int, steps: int, *, cut: bool = False) -> int:
    """The steps that were lost. `cut`: the connection is broken off, as by a `kill -9`."""
    right = 0
    with contextlib.suppress(EpisodeLost):
        async with environment.episode(TASK, str(number)) as episode:
            await episode.start()
            (echo,) = episode.tools
            for step in range(steps):
                message = f"{number}.{step}"
                reply = await echo.call({"message": message})
                right += reply.content == message
            if cut:
                episode._session._client._ws.transport.abort()
    return steps - right


async def _open_sessions(url: str) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http:
        return int((await http.get(url + SESSIONS)).json()["active"])


async def _freed(url: str) -> int:
    """Sessions that the server still has when it had time to notice."""
    until = time.monotonic() + FREED_S
    while (num_left := await _open_sessions(url)) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    return num_left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="few of all, to see that it runs")
    args = parser.parse_args()
    sizes = (8, 4, 40) if args.quick else (args.sessions, args.steps, args.episodes)
    at_once, in_turn = asyncio.run(measure(sessions=sizes[0], steps=sizes[1], episodes=sizes[2]))
    lines, reached = report(at_once, in_turn, sessions=sizes[0])
    print(lines)
    return 0 if reached else 1


def report(at_once: Sessions, in_turn: Sessions, *, sessions: int) -> tuple[str, bool]:
    """Two lines with their goals, and whether all are reached."""
    together = at_once.num_lost == 0 and at_once.num_left == 0 and at_once.most_open == sessions
    each = in_turn.num_lost == 0 and in_turn.num_left == 0
    lines = [
        f"{at_once.most_open} of {sessions} sessions open at once: {at_once.num_lost} of {at_once.num_steps} steps"
        f" lost, {at_once.num_left} sessions left on the server, {at_once.num_steps / at_once.seconds:.0f} steps/s;"
        f" goal 0 lost, 0 left: {'yes' if together else 'no'}",
        f"{in_turn.num_steps} episodes with connects and disconnects, every tenth broken off: {in_turn.num_lost} lost,"
        f" {in_turn.num_left} sessions left on the server, {in_turn.num_steps / in_turn.seconds:.0f} episodes/s;"
        f" goal 0 lost, 0 left: {'yes' if each else 'no'}",
    ]
    return "\n".join(lines), together and each


if __name__ == "__main__":
    raise SystemExit(main())

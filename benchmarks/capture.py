"""What the capture proxy costs, beside OpenEnv's capture server, in one run on one scripted engine.

    python -m benchmarks.capture [--calls 200] [--long 400] [--parallel 32] [--total 1500]

Four ways for a call with a 2,000-token prompt and 100 sampled tokens: straight to the engine; through OpenEnv's server
(in memory, the engine's chat route); through ours with the same route ("chat"); through ours with token ids in and out
("generate", two requests to the engine). Ours keeps every turn in its durable store. Engine, proxies and load generator
are processes of their own. "Added" is a median less the direct median of the same kind; calls of the targets alternate
in blocks, so that a busy moment hits all of them. Streams are measured twice: all chunks sent at once, and 1 ms
apart, where the processors rest between chunks and every way includes what a virtual machine takes to wake them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import uvloop

from benchmarks.capture_load import Target, Timing, parallel, sequential

DIRECT, OPENENV, CHAT, GENERATE = "direct", "OpenEnv", "ours, chat", "ours, generate"
NAMES = (DIRECT, OPENENV, CHAT, GENERATE)
_KEY = "benchmark"
_BLOCK = 10


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, or calls per second for `rate`, of one way."""

    whole: float  # median of a call that does not stream
    whole_low: float  # its tenth percentile: what is left when nobody else wants the processors
    early: float  # of the first calls of a long session
    late: float  # of its last calls
    rate: float
    first_text: float  # median, of a stream that the engine sends all at once
    first_paced: float  # of one that it takes its time over
    stream: float  # median of such a stream as a whole
    behind: float  # median, of the first text's arrival after the engine sent it, of a stream sent at once
    behind_paced: float  # of one that the engine takes its time over


def body(number: int, *, stream: bool = False, paced: bool = False) -> bytes:
    """A request of about 2,000 tokens' length, like no other. `paced`: the engine takes its time over it."""
    text = "word " * 2000
    what = "paced" if paced else "call"
    messages = [{"role": "system", "content": text}, {"role": "user", "content": f"{what} {number}"}]
    return orjson.dumps({"model": "bench", "messages": messages, "stream": stream})


@contextlib.contextmanager
def program(*argv: str) -> Iterator[str]:
    """A Python module as a process; gives the URL that it prints first."""
    environment = {**os.environ, "CAPTURE_PROXY_ADMIN_KEY": _KEY}
    process = subprocess.Popen([sys.executable, "-m", *argv], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def ours(engine: str, transport: str, folder: Path) -> Iterator[Callable[[str], str]]:
    """Our gateway; gives what mints a session: id -> "URL KEY"."""
    ready = folder / f"{transport}.json"
    store = folder / f"{transport}.sqlite"
    argv = ["capture_proxy", "--engine-url", engine, "--transport", transport, "--store", str(store)]
    with program(*argv, "--ready-file", str(ready)):
        urls = orjson.loads(ready.read_bytes())

        def mint(session_id: str) -> str:
            headers = {"authorization": f"Bearer {_KEY}"}
            reply = httpx.post(f"{urls['admin_url']}/sessions", json={"session_id": session_id}, headers=headers)
            return f"{urls['agent_url']} {reply.raise_for_status().json()['token']}"

        yield mint


@contextlib.contextmanager
def openenv(engine: str) -> Iterator[Callable[[str], str]]:
    with program("benchmarks.capture_openenv", engine) as url:

        def mint(session_id: str) -> str:
            reply = httpx.post(f"{url}/sessions", json={"session_id": session_id})
            return f"{url} {reply.raise_for_status().json()['session_id']}"

        yield mint


class Ways:
    """The four ways to the engine. `new` gives a target with a session of its own."""

    def __init__(self, engine: str, mints: dict[str, Callable[[str], str]]) -> None:
        self._engine, self._mints = engine, mints
        self._number = 0

    def new(self, name: str) -> Target:
        if name == DIRECT:
            return Target(name, self._engine)
        self._number += 1
        return Target(name, *self._mints[name](f"bench-{self._number}").split())


async def alternate(
    ways: Ways, num_calls: int, *, stream: bool = False, paced: bool = False
) -> dict[str, list[Timing]]:
    """Calls one after the other, the four ways in turn by blocks."""
    targets = {name: ways.new(name) for name in NAMES}
    for name in NAMES:
        await sequential(targets[name], [body(-i, stream=stream, paced=paced) for i in range(1, 6)])  # warm
    taken: dict[str, list[Timing]] = {name: [] for name in NAMES}
    for start in range(0, num_calls, _BLOCK):
        for name in NAMES:
            block = [body(start + i, stream=stream, paced=paced) for i in range(_BLOCK)]
            taken[name] += await sequential(targets[name], block)
    for target in targets.values():
        target.close()
    return taken


async def measure(ways: Ways, options: argparse.Namespace) -> dict[str, Measured]:
    whole = await alternate(ways, options.calls)
    bursts = await alternate(ways, options.calls // 2, stream=True)
    streams = await alternate(ways, options.calls // 2, stream=True, paced=True)
    long = await alternate(ways, options.long)
    rates: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(options.rounds):
        for name in NAMES:
            targets = [ways.new(name) for _ in range(options.parallel)]
            await parallel(
                targets, [body(i) for i in range(2 * options.parallel)]
            )  # connections are open, code is warm
            rates[name].append(await parallel(targets, [body(i) for i in range(options.total)]))
            for target in targets:
                target.close()
    window = max(_BLOCK, options.long // 20)
    return {
        name: Measured(
            whole=_median(whole[name]),
            whole_low=sorted(t.total for t in whole[name])[len(whole[name]) // 10],
            early=_median(long[name][:window]),
            late=_median(long[name][-window:]),
            rate=statistics.median(rates[name]),
            first_text=statistics.median(t.first_text for t in bursts[name]),
            first_paced=statistics.median(t.first_text for t in streams[name]),
            stream=_median(streams[name]),
            behind=_behind(bursts[name]),
            behind_paced=_behind(streams[name]),
        )
        for name in NAMES
    }


def _median(timings: list[Timing]) -> float:
    return statistics.median(t.total for t in timings)


def _behind(timings: list[Timing]) -> float:
    return statistics.median(t.behind for t in timings if t.behind is not None)


def report(found: dict[str, Measured]) -> str:
    """The table; a ratio is OpenEnv's figure to ours, or ours to OpenEnv's for the rate."""
    direct, other = found[DIRECT], found[OPENENV]
    rows = [f"{'':<37}" + "".join(f"{name:>16}" for name in NAMES)]

    def row(title: str, value: Callable[[Measured], float], unit: str = "ms", *, added: bool = True) -> None:
        scale = 1000 if unit == "ms" else 1
        numbers = [value(found[name]) - (value(direct) if added and name != DIRECT else 0) for name in NAMES]
        rows.append(f"{title:<37}" + "".join(f"{scale * n:>13.2f} {unit}" for n in numbers))

    row("a call (added beyond direct)", lambda m: m.whole)
    row("  its tenth percentile", lambda m: m.whole_low)
    row("  first calls of a session", lambda m: m.early)
    row("  last calls of a session", lambda m: m.late)
    row("first streamed text, sent at once", lambda m: m.first_text)
    row("first streamed text, 100 ms stream", lambda m: m.first_paced)
    row("  the whole of that stream", lambda m: m.stream)
    row("first text after the engine sent it", lambda m: m.behind, added=False)
    row("  of the 100 ms stream", lambda m: m.behind_paced, added=False)
    row("calls a second in parallel", lambda m: m.rate, "/s", added=False)
    for name in (CHAT, GENERATE):
        mine = found[name]
        added, theirs = mine.whole - direct.whole, other.whole - direct.whole
        low = (mine.whole_low - direct.whole_low) / (other.whole_low - direct.whole_low)
        growth = (mine.late - direct.late) / (mine.early - direct.early)
        their_growth = (other.late - direct.late) / (other.early - direct.early)
        rows.append(
            f"{name}: added latency {added / theirs:.2f} of OpenEnv's (tenth percentile {low:.2f}); last call "
            f"{growth:.2f} times the first (OpenEnv {their_growth:.2f}); {mine.rate / other.rate:.1f} times its "
            f"throughput; first text {1000 * mine.behind:.2f} and {1000 * mine.behind_paced:.2f} ms after the engine's"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--long", type=int, default=400, help="calls of the long session")
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--total", type=int, default=1000, help="calls of one round in parallel")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="capture-bench-")))
        engine = stack.enter_context(program("benchmarks.capture_upstream"))
        mints = {
            OPENENV: stack.enter_context(openenv(engine)),
            CHAT: stack.enter_context(ours(engine, "chat", folder)),
            GENERATE: stack.enter_context(ours(engine, "generate", folder)),
        }
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(measure(Ways(engine, mints), options))
    print(report(found))
    print(f"{time.monotonic() - started:.0f} s, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

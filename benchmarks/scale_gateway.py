"""How many open streams and how many sessions one gateway process carries.

Engine, gateway and agents are processes of their own. Each agent reads one stream after another: a prompt of 2,000
tokens, then 100 pieces of text 100 ms apart. The same agents read from the engine alone as well, so that the delay
that is the gateway's can be told from that of engine, agents and machine: "added" is the difference of the two medians
(or 99th percentiles). Owns the levels; the agents are `stream_load`. Called by `scale`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.process_use import Use, table
from benchmarks.stream_load import Found, Order
from capture_proxy.admin_client import AdminClient
from capture_proxy.types import SessionPolicy

KEY = "benchmark"
FLAT = 0.05  # "flat": median and 99th percentile of the added delay grow by no more of the time between two pieces
_BODY_WORDS = 2000


@dataclass(frozen=True, slots=True)
class Streams:
    """What one level is made of. `in_step`: the engine sends to all streams at the same moments."""

    tokens: int = 100
    interval_ms: float = 100.0
    warm_s: float = 1.0
    measure_s: float = 20.0
    in_step: bool = False
    transport: str = "generate"

    @property
    def stream_s(self) -> float:
        return self.tokens * self.interval_ms / 1000


@dataclass(frozen=True, slots=True)
class Level:
    """One number of streams: read from the engine alone, and through the gateway, with what the gateway took then."""

    num_streams: int
    direct: Found
    through: Found
    before: Use  # of the gateway, when the sessions were minted and none had called
    use: Use
    cpu: float  # of the gateway, share of a core in the measured time

    @property
    def added_p50(self) -> float:
        return self.through.behind.p50 - self.direct.behind.p50

    @property
    def added_p99(self) -> float:
        return self.through.behind.p99 - self.direct.behind.p99


@dataclass(frozen=True, slots=True)
class Running:
    pid: int
    agent_url: str
    admin_url: str


@contextlib.contextmanager
def module(*argv: str) -> Iterator[tuple[int, str]]:
    """A Python module as a process: its id, and the line that it prints first."""
    environment = {**os.environ, "CAPTURE_PROXY_ADMIN_KEY": KEY}
    process = subprocess.Popen([sys.executable, "-m", *argv], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{argv[0]} ended before it was ready, with {process.wait()}")
        yield process.pid, line
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def gateway(folder: Path, engine_url: str, *options: str) -> Iterator[Running]:
    """As `train` starts it; `options` beside what it must have."""
    ready, store = folder / "gateway.json", folder / "store.sqlite"
    argv = ["capture_proxy", "--engine-url", engine_url, "--store", str(store), "--ready-file", str(ready), *options]
    with module(*argv) as (pid, _):
        urls = json.loads(ready.read_text())
        yield Running(pid, urls["agent_url"], urls["admin_url"])


async def mint(admin_url: str, ids: Sequence[str], *, at_once: int = 16) -> list[str]:
    """The sessions' tokens."""
    places = asyncio.Semaphore(at_once)
    async with AdminClient(admin_url, KEY, timeout_s=60) as admin:

        async def one(name: str) -> str:
            async with places:
                return (await admin.mint(name, SessionPolicy(), {})).token

        return list(await asyncio.gather(*map(one, ids)))


def level(folder: Path, num_streams: int, streams: Streams) -> Level:
    """Measured with an engine and a gateway of its own."""
    engine = ["benchmarks.capture_upstream", "--stamped", *(["--in-step"] if streams.in_step else [])]
    engine += ["--tokens", str(streams.tokens), "--interval-ms", str(streams.interval_ms)]
    with module(*engine) as (_, engine_url):
        direct, _ = _load(_order(engine_url, [""] * num_streams, streams), None)
        with gateway(folder, engine_url, "--transport", streams.transport, "--model", "bench") as running:
            keys = asyncio.run(mint(running.admin_url, [f"s{number}" for number in range(num_streams)]))
            before = Use.of(running.pid)
            through, cpu = _load(_order(running.agent_url, keys, streams), running.pid)
            return Level(num_streams, direct, through, before, Use.of(running.pid), cpu)


def _order(url: str, keys: Sequence[str], streams: Streams) -> Order:
    messages = [{"role": "system", "content": "word " * _BODY_WORDS}, {"role": "user", "content": "call %d"}]
    body = json.dumps({"model": "bench", "messages": messages, "stream": True})
    return Order(url, keys, body, streams.stream_s, streams.warm_s, streams.measure_s)


def _load(order: Order, watched: int | None) -> tuple[Found, float]:
    """What the agents found, and the watched process's share of a core in the middle of the measured time."""
    argv = [sys.executable, "-m", "benchmarks.stream_load"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(order)))
    process.stdin.close()
    process.stdin = None
    cpu = math.nan
    if watched is not None:
        time.sleep(order.ramp_s + order.warm_s + 0.1 * order.measure_s)
        first = Use.of(watched)
        time.sleep(0.8 * order.measure_s)
        cpu = Use.of(watched).share_since(first)
    out, _ = process.communicate(timeout=order.ramp_s + order.warm_s + order.measure_s + 120)
    if process.returncode != 0:
        raise RuntimeError("the agents' program failed; what it said is above")
    return Found.from_json(out), cpu


def report(levels: Sequence[Level], streams: Streams) -> str:
    head = ["open streams", "pieces/s", "delay, engine alone p50 / p99 ms", "through the gateway p50 / p99 ms"]
    head += ["added p50 / p99 ms", "first text after its sending p50 / p99 ms", "request to first text p50 ms"]
    head += ["gateway CPU, of a core", "RSS MB"]
    rows = []
    for one in levels:
        far, near = one.through, one.direct
        rows.append(
            [
                f"{one.num_streams}",
                f"{far.num_pieces / far.seconds:.0f}",
                f"{near.behind.p50:.1f} / {near.behind.p99:.1f}",
                f"{far.behind.p50:.1f} / {far.behind.p99:.1f}",
                f"{one.added_p50:.1f} / {one.added_p99:.1f}",
                f"{far.first_behind.p50:.1f} / {far.first_behind.p99:.1f}",
                f"{far.first_text.p50:.0f}",
                f"{100 * one.cpu:.0f} %",
                f"{one.use.rss:.0f}",
            ]
        )
    how = "all streams at the same moments" if streams.in_step else "each stream at moments of its own"
    return f"{how}, transport {streams.transport}\n\n{table(head, rows)}\n\n{_verdict(levels, streams)}"


def price(long: Level, short: Level) -> tuple[float, float]:
    """Seconds of the gateway's processor for a call and for a piece of text, from levels with streams of two lengths.

    Example: 10 calls and 1,000 pieces a second take 0.09 of a core, 50 calls and 1,000 pieces 0.13: 1 ms and 80 us.
    """
    (calls, pieces), (more_calls, other_pieces) = _rates(long), _rates(short)
    divisor = calls * other_pieces - more_calls * pieces
    call_s = (long.cpu * other_pieces - short.cpu * pieces) / divisor
    return call_s, (short.cpu * calls - long.cpu * more_calls) / divisor


def _rates(one: Level) -> tuple[float, float]:
    """Calls and pieces a second."""
    return one.through.num_streams / one.through.seconds, one.through.num_pieces / one.through.seconds


def _verdict(levels: Sequence[Level], streams: Streams) -> str:
    """Flat or not: the largest level of at most 500 streams against the smallest."""
    first, last = levels[0], max((one for one in levels if one.num_streams <= 500), key=lambda one: one.num_streams)
    grown = [last.added_p50 - first.added_p50, last.added_p99 - first.added_p99]
    most = FLAT * streams.interval_ms
    flat = "flat" if max(grown) <= most else "NOT flat"
    return (
        f"{last.num_streams} streams against {first.num_streams}: added delay grows by {grown[0]:.1f} ms (median) and "
        f"{grown[1]:.1f} ms (99th percentile): {flat} (at most {most:g} ms). Fewest open at any look: "
        f"{last.through.least_open} of {last.num_streams}"
    )


@dataclass(frozen=True, slots=True)
class Held:
    """A gateway that holds sessions and has nothing to do."""

    num_sessions: int
    empty: Use
    full: Use
    mints_s: float  # sessions minted in a second
    idle_cpu: float  # share of a core with all of them held


def held_sessions(folder: Path, num_sessions: int, *, idle_s: float = 10.0) -> Held:
    with module("benchmarks.capture_upstream") as (_, engine_url), gateway(folder, engine_url) as running:
        empty = Use.of(running.pid)
        began = time.monotonic()
        asyncio.run(mint(running.admin_url, [f"s{number}" for number in range(num_sessions)]))
        mints_s = num_sessions / (time.monotonic() - began)
        full = Use.of(running.pid)
        time.sleep(idle_s)
        return Held(num_sessions, empty, full, mints_s, Use.of(running.pid).share_since(full))


def report_held(held: Held) -> str:
    each_kb = 1000 * (held.full.rss - held.empty.rss) / held.num_sessions
    return (
        f"{held.num_sessions} sessions minted and idle: RSS {held.empty.rss:.0f} to {held.full.rss:.0f} MB "
        f"({each_kb:.1f} kB each), {held.mints_s:.0f} minted a second, {100 * held.idle_cpu:.1f} % of a core meanwhile"
    )


def with_tokenizer(folder: Path, tokenizer: Path) -> Use:
    """A gateway that has read Qwen3's tokenizer for its bridging, which a second call of a session makes it do."""
    with module("benchmarks.capture_upstream") as (_, engine_url):
        options = ["--transport", "generate", "--model", "bench", "--tokenizer", str(tokenizer), "--renderer", "qwen3"]
        with gateway(folder, engine_url, *options) as running:
            (key,) = asyncio.run(mint(running.admin_url, ["s"]))
            url, headers = f"{running.agent_url}/v1/chat/completions", {"authorization": f"Bearer {key}"}
            messages: list[object] = [{"role": "user", "content": "hi"}]
            for _ in range(2):
                reply = httpx.post(url, json={"model": "bench", "messages": messages}, headers=headers, timeout=60)
                said = reply.raise_for_status().json()["choices"][0]["message"]
                messages += [said, {"role": "user", "content": "go on"}]
            return settled(running.pid)


def settled(pid: int, quiet_s: float = 2.0) -> Use:
    """When it does next to nothing: it may look into a file several times a second."""
    seen = Use.of(pid)
    while True:
        time.sleep(quiet_s)
        now = Use.of(pid)
        if now.share_since(seen) < 0.1:
            return now
        seen = now


def more_files() -> None:
    """As many open files as this process may have: agents and gateway have two connections for each stream."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

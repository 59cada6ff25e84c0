"""Many agents that each read one stream after another, and how late every piece of text reaches them.

    python -m benchmarks.stream_load < order.json > found.json

A program of its own, so that its time is nobody else's. The engine writes the moment of sending into each piece
(`capture_upstream --stamped`); both clocks are this machine's monotonic one. Owns the reading and the percentiles;
which levels are compared is `scale_gateway`'s.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Self, cast
from urllib.parse import urlsplit

import uvloop

_SENT = re.compile(rb"sent (\d{10}\.\d{6})")
_END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Order:
    """`keys`: one for each agent, "" = the engine itself, which wants none. Agents begin spread over `ramp_s`."""

    url: str
    keys: Sequence[str]
    body: str  # of a request; %d in it is a number of its own
    ramp_s: float
    warm_s: float  # after the ramp, and before what is measured
    measure_s: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds."""

    p50: float
    p90: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Nearest rank. Not a number where there is nothing to rank."""
        if not seconds:
            return cls(*[math.nan] * 4)
        ranked = sorted(seconds)
        return cls(*(1000 * ranked[max(0, math.ceil(p * len(ranked)) - 1)] for p in (0.5, 0.9, 0.99, 1.0)))


@dataclass(slots=True)
class Seen:
    """What came within the measured time. Seconds."""

    behind: list[float] = field(default_factory=list)  # from sending to arrival, of every piece
    first_behind: list[float] = field(default_factory=list)  # of the first piece of each stream
    first_text: list[float] = field(default_factory=list)  # from a request to its first piece
    num_open: int = 0  # streams open now
    least_open: int | None = None
    measuring: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """`least_open`: of the streams, looked at ten times a second; `cpu`: this program's share of a core."""

    behind: Spread
    first_behind: Spread
    first_text: Spread
    num_pieces: int
    num_streams: int  # begun in the measured time
    least_open: int
    seconds: float
    cpu: float

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = json.loads(text)
        for name in ("behind", "first_behind", "first_text"):
            data[name] = Spread(**data[name])
        return cls(**data)


class Agent(asyncio.Protocol):
    """One connection; when a stream ends, the next call follows. `failed` gets what cannot be gone on from."""

    def __init__(self, seen: Seen, head: bytes, body: str, number: int, failed: asyncio.Future[None]) -> None:
        self._seen, self._head, self._body, self._failed = seen, head, body, failed
        self._number = number * 1_000_000
        self._transport: asyncio.Transport
        self._rest, self._began, self._open = b"", 0.0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.call()

    def call(self) -> None:
        self._number += 1
        body = (self._body % self._number).encode()
        self._rest, self._open, self._began = b"", False, time.monotonic()
        self._transport.write(self._head % len(body) + body)

    def data_received(self, data: bytes) -> None:
        now, seen = time.monotonic(), self._seen
        data = self._rest + data
        if not self._open:
            if b"\r\n\r\n" not in data:
                self._rest = data
                return
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(f"the call was refused: {data[:500]!r}")
                return
        found = _SENT.findall(data)
        if found and not self._open:
            self._open = True
            seen.num_open += 1
            if seen.measuring:
                seen.first_text.append(now - self._began)
                seen.first_behind.append(now - float(found[0]))
        if seen.measuring:
            seen.behind.extend(now - float(sent) for sent in found)
        self._rest = data[data.rfind(b"\n") + 1 :]
        if data.endswith(_END):
            if b"[DONE]" not in data or not self._open:
                self._fail(f"a stream ended without its end: {data[-300:]!r}")
                return
            seen.num_open -= 1
            self.call()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("a connection was closed")

    def _fail(self, why: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(RuntimeError(why))


async def load(order: Order) -> Found:
    """Raises RuntimeError when a stream fails: figures of a part of the agents would flatter."""
    loop = asyncio.get_running_loop()
    seen, failed = Seen(), loop.create_future()
    parts = urlsplit(order.url)
    host, port = parts.hostname or "", parts.port or 80
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    pause_s = order.ramp_s / len(order.keys)
    began = loop.time()
    for number, key in enumerate(order.keys):
        own = head + (f"authorization: Bearer {key}\r\n".encode() if key else b"") + b"content-length: %d\r\n\r\n"
        await _sleep(began + number * pause_s - loop.time(), failed)
        await loop.create_connection(partial(Agent, seen, own, order.body, number, failed), host, port)
    await _sleep(began + order.ramp_s + order.warm_s - loop.time(), failed)
    seen.measuring, cpu, at = True, time.process_time(), loop.time()
    while loop.time() - at < order.measure_s:
        await _sleep(0.1, failed)
        seen.least_open = min(seen.num_open, seen.num_open if seen.least_open is None else seen.least_open)
    seconds = loop.time() - at
    return Found(
        behind=Spread.of(seen.behind),
        first_behind=Spread.of(seen.first_behind),
        first_text=Spread.of(seen.first_text),
        num_pieces=len(seen.behind),
        num_streams=len(seen.first_text),
        least_open=seen.least_open or 0,
        seconds=seconds,
        cpu=(time.process_time() - cpu) / seconds,
    )


async def _sleep(seconds: float, failed: asyncio.Future[None]) -> None:
    """Raises what failed meanwhile."""
    await asyncio.wait({failed}, timeout=max(0.0, seconds))
    if failed.done():
        failed.result()


def main() -> None:
    order = Order(**json.load(sys.stdin))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(load(order))
    print(json.dumps(asdict(found)), flush=True)
    os._exit(0)  # the streams that are open are nobody's concern any more


if __name__ == "__main__":
    main()

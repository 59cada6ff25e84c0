"""A load generator that costs little: HTTP/1.1 by hand on kept connections, times taken around each call."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

CONTENT = b'"content":'  # begins the value in a streamed delta; JSON writers put a space after the colon or not


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the request's last byte to the first text of a reply, and to its end.

    `behind`: from the engine's sending of the first text to its arrival here; None = the reply did not stream.
    """

    first_text: float
    total: float
    behind: float | None = None


@dataclass
class Target:
    """Where calls go: a base URL, and the API key of a session (None = the engine itself, which wants none)."""

    name: str
    url: str
    key: str | None = None
    connections: list[Connection] = field(default_factory=list)

    async def call(self, body: bytes) -> Timing:
        """One chat call. Raises RuntimeError for anything but a whole reply with status 200."""
        connection = self.connections.pop() if self.connections else await Connection.open(self.url)
        timing = await connection.call(body, self.key)
        self.connections.append(connection)
        return timing

    def close(self) -> None:
        while self.connections:
            self.connections.pop().close()


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> Self:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=2**20))

    async def call(self, body: bytes, key: str | None) -> Timing:
        auth = f"authorization: Bearer {key}\r\n" if key else ""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{auth}"
        started = time.perf_counter()
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            rest = await self._reader.read(2000)
            raise RuntimeError(f"{answer.splitlines()[0]!r} {rest[:500]!r}")
        lowered = answer.lower()
        if b"chunked" in lowered:
            return await self._stream(started)
        length = int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
        await self._reader.readexactly(length)
        total = time.perf_counter() - started
        return Timing(total, total)

    async def _stream(self, started: float) -> Timing:
        first: float | None = None
        behind = 0.0
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            data = await self._reader.read(2**18)
            if not data:
                raise RuntimeError("the stream broke off")
            seen += data
            if first is None and b"word" in seen:
                first = time.perf_counter() - started
                behind = time.monotonic() - float(seen.split(b"sent ", 1)[1][:17])
        if b"[DONE]" not in seen or first is None:
            raise RuntimeError(f"the stream ended without its end: {seen[-200:]!r}")
        return Timing(first, time.perf_counter() - started, behind)

    def close(self) -> None:
        self._writer.close()


async def sequential(target: Target, bodies: list[bytes]) -> list[Timing]:
    return [await target.call(body) for body in bodies]


async def parallel(targets: list[Target], bodies: list[bytes]) -> float:
    """Calls per second with one caller a target, all taking from one list of work."""
    work = iter(bodies)

    async def caller(target: Target) -> None:
        for body in work:
            await target.call(body)

    started = time.perf_counter()
    await asyncio.gather(*(caller(target) for target in targets))
    return len(bodies) / (time.perf_counter() - started)

"""HTTP/1.1 to one server, for the hot path: kept connections, one write a request, bytes handed on as they come.

Owns connections and their time limits. The parser is httptools' (llhttp); this is what is left to do around it, see
"Dependencies" in ARCHITECTURE.md for why no client library does it. No redirects, proxies, cookies or decompression.
What a body means is `wire`'s, the only caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import httptools

_HIGH_WATER = 256 * 1024  # bytes that wait for a slow reader before the server is made to wait


class HttpFault(Exception):
    """The server could not be reached, broke off, was silent for too long, or does not speak HTTP."""


class _Stale(HttpFault):
    """A kept connection that the server closed before it answered anything."""


class Client:
    """Connections to the server at `url` (http or https). All of them are closed by `close`.

    `idle_s`: a connection that was unused for longer is not used again; it must be less than what the server allows.
    Raises ValueError for a URL or a header that cannot be one.
    """

    def __init__(self, url: str, headers: dict[str, str], *, connect_timeout_s: float, idle_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// address of a server")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/")
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", *(f"{name}: {value}" for name, value in headers.items())]
        if any(sign in line for line in lines for sign in "\r\n\0"):
            raise ValueError("a header's value must be one line")
        self._head = "".join(f"{line}\r\n" for line in lines).encode("latin-1")
        self._tls = parts.scheme == "https"
        self._tls_context: ssl.SSLContext | None = None  # made when it is needed: it reads files
        self._connect_timeout_s, self._idle_s = connect_timeout_s, idle_s
        self._idle: deque[_Connection] = deque()  # least recently used first
        self._open: set[_Connection] = set()
        self._closed = False

    async def request(
        self, method: str, path: str, body: bytes | None, *, silence_s: float | None, total_s: float | None = None
    ) -> Response:
        """The response once its head is there; it must be read to its end or closed.

        `silence_s` bounds the wait for each next byte, `total_s` all of it, reading included. Raises HttpFault.
        """
        begin = f"{method} {self._path}{path} HTTP/1.1\r\n".encode("latin-1")
        size = b"" if body is None else b"content-length: %d\r\n" % len(body)
        request = b"".join((begin, self._head, size, b"\r\n", body or b""))
        if (kept := self._kept()) is not None:
            with contextlib.suppress(_Stale):  # the server has not seen the request
                return await kept.ask(request, silence_s, total_s)
        connection = await self._connect()
        return await connection.ask(request, silence_s, total_s)

    def close(self) -> None:
        self._closed = True
        for connection in list(self._open):
            connection.abort("the connections were closed")

    def _kept(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[0].idle_since > self._idle_s:
            self._idle.popleft().abort("it was idle")
        return self._idle.pop() if self._idle else None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._tls and self._tls_context is None:
            self._tls_context = await asyncio.to_thread(ssl.create_default_context)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), self._host, self._port, ssl=self._tls_context
                )
        except TimeoutError as error:
            raise HttpFault(f"no connection within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise HttpFault(str(error)) from error
        if self._closed:
            connection.abort("the connections were closed")
        return connection

    def _opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def _lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def _free(self, connection: _Connection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)


class Response:
    """One response: its status at once, its body as it comes."""

    def __init__(self, connection: _Connection) -> None:
        self.status = 0  # until the head is there
        self._connection: _Connection | None = connection  # None = it has served this response
        self._parts: list[bytes] = []
        self._size = 0
        self._fault: HttpFault | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._begun = False  # any byte has come

    def at_eof(self) -> bool:
        """Whether the body was received and read whole."""
        return self._connection is None and not self._parts and self._fault is None

    async def read(self) -> bytes:
        """The rest of the body. Raises HttpFault."""
        while self._connection is not None and self._fault is None:
            if self._size > _HIGH_WATER:
                self._connection.flow(True)  # all of it is wanted at once
            await self._more()
        if self._fault is not None:
            raise self._fault
        return self._taken()

    async def readany(self) -> bytes:
        """What has come since the last call, at least one byte; b"" = the end. Raises HttpFault after the last byte."""
        while not self._parts:
            if self._fault is not None:
                raise self._fault
            if self._connection is None:
                return b""
            await self._more()
        return self._taken()

    def close(self) -> None:
        """Give the rest up. The connection is closed unless it has sent everything."""
        if self._connection is not None:
            self._connection.abort("its response was given up")

    async def _head(self) -> None:
        while not self.status and self._fault is None:
            await self._more()
        if self._fault is not None and not self.status:
            raise self._fault

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _taken(self) -> bytes:
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        if self._connection is not None:
            self._connection.flow(True)
        return data

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- what the connection tells ---

    def _put(self, data: bytes) -> bool:
        """Whether more may come at once."""
        self._parts.append(data)
        self._size += len(data)
        self._wake()
        return self._size <= _HIGH_WATER

    def _end(self, fault: HttpFault | None = None) -> None:
        self._connection = None
        self._fault = fault
        self._wake()


class _Connection(asyncio.Protocol):
    """One connection; it serves one response at a time."""

    def __init__(self, client: Client) -> None:
        self.idle_since = 0.0  # of the loop's clock
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._until_close = False  # the body's end is the connection's
        self._interim = False  # the head is that of a 1xx, which the real one follows
        self._heard = 0.0  # when the last byte came
        self._silence_s: float | None = None
        self._timers: list[asyncio.TimerHandle] = []

    async def ask(self, request: bytes, silence_s: float | None, total_s: float | None) -> Response:
        if self._transport is None:
            raise HttpFault("the connections were closed")
        response = self._response = Response(self)
        self._heard, self._silence_s = self._loop.time(), silence_s
        if silence_s is not None:
            self._timers.append(self._loop.call_later(silence_s, self._look_for_silence))
        if total_s is not None:
            self._timers.append(self._loop.call_later(total_s, self.abort, f"no whole answer within {total_s:g} s"))
        self._transport.write(request)
        try:
            await response._head()
        except BaseException:
            self.abort("the request was given up")
            raise
        return response

    def abort(self, why: str) -> None:
        """Close at once, and fail the response that is in progress."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._fail(HttpFault(why))
        self._client._lost(self)

    def flow(self, on: bool) -> None:
        if self._transport is not None and self._transport.is_reading() is not on:
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    def _look_for_silence(self) -> None:
        assert self._silence_s is not None
        left = self._heard + self._silence_s - self._loop.time()
        if self._transport is not None and not self._transport.is_reading():
            left = self._silence_s  # it is our reader that is slow
        if left <= 0:
            self.abort(f"it was silent for {self._silence_s:g} s")
        else:
            self._timers[0] = self._loop.call_later(left, self._look_for_silence)

    def _fail(self, fault: HttpFault) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        response, self._response = self._response, None
        if response is not None:
            response._end(fault)

    # --- the transport's ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._client._opened(self)

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            self.abort("it spoke without being asked")
            return
        self._heard = self._loop.time()
        self._response._begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(f"it does not speak HTTP: {error}")

    def eof_received(self) -> bool:
        return False  # the transport closes

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._client._lost(self)
        response = self._response
        if response is None:
            return
        if exc is None and self._until_close and response.status:
            self._done(response)
        elif not response._begun:
            self._fail(_Stale("it closed the connection before it answered"))
        else:
            self._fail(HttpFault(f"it closed the connection within an answer{f': {exc}' if exc else ''}"))

    def _done(self, response: Response) -> None:
        self._response = None
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        response._end()

    # --- the parser's ---

    def on_message_begin(self) -> None:
        self._until_close = True
        if self._response is None:
            self.abort("it answered twice")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if self._response is not None and not self._interim:
            self._response.status = status
            self._response._wake()

    def on_body(self, body: bytes) -> None:
        if self._response is not None and not self._response._put(body):
            self.flow(False)

    def on_message_complete(self) -> None:
        response = self._response
        if self._interim or response is None:
            return
        self._done(response)
        if self._transport is None:
            return
        if self._parser.should_keep_alive():
            self.flow(True)
            self._client._free(self)
        else:
            self.abort("the server wants it closed")

"""uvicorn's HTTP protocol with one difference: a response's head leaves together with what follows it.

Owns nothing else. A reply in two writes wakes its reader twice, which on a busy machine is a tenth of a millisecond a
call. Used by `__main__`.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class OneWriteProtocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._holder = _HeadHolder(transport)
        super().connection_made(cast(asyncio.Transport, self._holder))

    def on_response_complete(self) -> None:
        self._holder.let_go()  # the answer to a HEAD request is a head that nothing follows
        super().on_response_complete()


class _HeadHolder:
    """A transport whose `write` keeps a response's head until the next write. uvicorn writes a head as one piece."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1") and data.endswith(b"\r\n\r\n"):
            self._head = data
            return
        self._transport.write(data)

    def let_go(self) -> None:
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.let_go()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

"""How uvicorn serves the gateway: its settings, and its HTTP protocol with two differences.

A response's head leaves together with what follows it: a reply in two writes wakes its reader twice, which on a busy
machine is a tenth of a millisecond a call. And the app is told by a callback that its client hung up (`connection_of`):
waiting for it in `receive` takes a task for every call. Used by `__main__`
and by whoever runs a gateway in its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_CONNECTION = "capture_proxy.connection"


class Connection:
    """A client's connection, as long as requests on it are answered."""

    def __init__(self) -> None:
        self._lost = False
        self._told: set[Callable[[], None]] = set()

    def watch(self, hung_up: Callable[[], None]) -> None:
        """Have `hung_up` called when the connection is closed; at once if it is already."""
        if self._lost:
            hung_up()
        else:
            self._told.add(hung_up)

    def unwatch(self, hung_up: Callable[[], None]) -> None:
        self._told.discard(hung_up)

    def close(self) -> None:
        self._lost = True
        while self._told:
            self._told.pop()()


def connection_of(scope: Scope) -> Connection:
    """The connection that a request came on. Under another server than ours there is none that ever closes."""
    connection: Connection = scope.get("extensions", {}).get(_CONNECTION) or Connection()
    return connection


class _Protocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._holder = _HeadHolder(transport)
        self._connection = Connection()
        super().connection_made(cast(asyncio.Transport, self._holder))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_CONNECTION: self._connection}  # type: ignore[dict-item]

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


class Server(uvicorn.Server):
    """One app of the gateway, served. Signals are left to the caller, and start-up can be awaited."""

    def __init__(self, app: object) -> None:
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            lifespan="off",
            http=_Protocol,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            date_header=False,
            server_header=False,
            timeout_graceful_shutdown=1,  # calls that still run are aborted and recorded after this many seconds
            timeout_keep_alive=75,  # longer than clients keep an idle connection: none asks on one that just closed
            backlog=2048,
        )
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        finally:
            self.ready.set()


@contextlib.asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    """Serve on a free port of this machine; gives the address."""
    # asyncio turns Nagle's delays off only on sockets that say they are TCP.
    with socket.socket(proto=socket.IPPROTO_TCP) as sock:
        sock.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            await server.ready.wait()
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving

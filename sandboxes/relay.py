"""Byte for byte between two sockets: what leads a sealed sandbox to the one service it may reach.

Two ends of one path. *Inside*, `python3 relay.py 127.0.0.1:18101=/run/ht/gateway.sock` listens on a sandbox's loopback
and passes each connection on to a Unix socket whose folder is mounted. *On the host*, `SocketBridge` offers a service
known only by HOST:PORT as such a socket. Knows neither HTTP nor Docker; `docker_network` starts both ends.

This file is copied alone into the relay's image: standard library only, any Python from 3.8 on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union

MAX_CONNECTIONS = 8192  # at a time through one Relay; more are closed at once, so that its memory stays bounded
_CHUNK = 64 * 1024  # bytes: the most that is held for one direction of a connection whose reader is slow
# Of each socket, in bytes (the kernel doubles it). Left to itself the kernel would hold megabytes for a slow reader,
# which count as memory of the relay's container: a few hundred such connections would be the end of it.
_KERNEL_BUFFER = 64 * 1024
_BACKLOG = 4096
_BUSY_RETRY_S = 0.005
_BUSY_LIMIT_S = 10.0
_ANNOUNCE_AGAIN_S = 1.0
# On close the peer gets a reset, not an orderly end: a reply that broke off must not look like one that is whole.
_RESET = struct.pack("ii", 1, 0)

Target = Union[str, "tuple[str, int]"]  # the path of a Unix socket, or host and port


class Relay:
    """Accepts connections and pairs each with a new one to `target`.

    A target that is not there closes the accepted connection at once. Nothing is held back: what one side sent is
    written to the other before the next is read, and a slow reader stops the other side's sending.
    """

    def __init__(self, target: Target, max_connections: int = MAX_CONNECTIONS) -> None:
        self._target = target
        self._max_connections = max_connections
        self._ends: set[_End] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # to connect: when the target's queue is full, only the first in line asks again
        self._busy_since: float | None = None  # the loop's clock; None = the last try to connect did not find it full
        # The loop reads and hands on one piece at a time, so all connections can share the place it is read into.
        self.buffer = memoryview(bytearray(_CHUNK))

    def accept(self) -> asyncio.BufferedProtocol:
        """The protocol of an accepted connection, for `create_server`."""
        return _End(self, self._dial)

    async def close(self) -> None:
        """Cut every connection."""
        for task in list(self._dialling):
            task.cancel()
        for end in list(self._ends):
            end.abort()
        await asyncio.gather(*self._dialling, return_exceptions=True)

    def joined(self, end: _End) -> bool:
        self._ends.add(end)
        return len(self._ends) <= 2 * self._max_connections

    def left(self, end: _End) -> None:
        self._ends.discard(end)

    def _dial(self, near: _End) -> None:
        task = asyncio.get_running_loop().create_task(self._pair(near))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _pair(self, near: _End) -> None:
        far = _End(self, None)
        try:
            await self._connect(far)
        except OSError:
            near.close()
            return
        except BaseException:
            near.abort()
            raise
        near.pair(far)

    async def _connect(self, far: _End) -> None:
        """Raises OSError when nobody listens there."""
        loop = asyncio.get_running_loop()
        if not isinstance(self._target, str):
            await loop.create_connection(lambda: far, self._target[0], self._target[1])
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            async with self._turn:
                while not self._connected(sock, self._target):
                    await asyncio.sleep(_BUSY_RETRY_S)
            await loop.create_unix_connection(lambda: far, sock=sock)
        except BaseException:
            sock.close()
            raise

    def _connected(self, sock: socket.socket, path: str) -> bool:
        """Not `loop.sock_connect`: a Unix socket whose queue is full says "would block", and asyncio takes that for a
        connection under way."""
        now = asyncio.get_running_loop().time()
        try:
            sock.connect(path)
        except BlockingIOError:
            self._busy_since = self._busy_since or now
            if now - self._busy_since > _BUSY_LIMIT_S:
                raise
            return False
        self._busy_since = None
        return True


class _End(asyncio.BufferedProtocol):
    """One side of a connection. Reads nothing before it is paired."""

    def __init__(self, relay: Relay, dial: Callable[[_End], None] | None) -> None:
        self._relay = relay
        self._dial = dial
        self._transport: Any = None  # asyncio.Transport, which BaseProtocol's signature does not say
        self._peer: _End | None = None
        self._ended = False  # this side sends no more
        self._lost = False

    def pair(self, far: _End) -> None:
        self._peer, far._peer = far, self
        if self._lost or far._lost:
            self.abort()
            far.abort()
            return
        self._transport.resume_reading()
        far._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is None or self._lost:
            return
        sock = self._transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    # -- what the event loop calls -------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        # Not before the next step of the loop: until 3.10 it starts reading right after this call, paused or not.
        asyncio.get_running_loop().call_soon(transport.pause_reading)
        transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, _KERNEL_BUFFER)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._relay.joined(self):
            self.abort()
        elif self._dial is not None:
            self._dial(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._relay.buffer

    def buffer_updated(self, nbytes: int) -> None:
        assert self._peer is not None
        self._peer._transport.write(bytes(self._relay.buffer[:nbytes]))

    def pause_writing(self) -> None:
        if self._peer is not None:
            self._peer._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._peer is not None and not self._peer._ended:
            self._peer._transport.resume_reading()

    def eof_received(self) -> bool:
        assert self._peer is not None
        self._ended = True
        if self._peer._ended:
            self._peer.close()
            return False
        self._peer._transport.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._relay.left(self)
        if self._peer is None:
            return
        if error is None and self._ended:
            self._peer.close()
        else:
            self._peer.abort()


def raise_file_limit() -> None:
    """Let this process have as many sockets as it may: the usual 1024 files are 500 relayed connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- on the host -------------------------------------------------------------------------------------------------


class SocketBridge:
    """A service as a Unix socket at `path`, for as long as the context is open. Raises OSError when it cannot listen.

    Anyone who may enter the socket's folder may connect (mode 0666: the relay in a container is another user), so
    the folder is what keeps others out. Example: SocketBridge(folder / "gateway.sock", ("127.0.0.1", 8101)).
    """

    def __init__(self, path: Path, target: Target) -> None:
        self.path = path
        self._relay = Relay(target)
        self._server: asyncio.AbstractServer | None = None

    async def __aenter__(self) -> SocketBridge:
        self.path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._relay.accept, str(self.path), backlog=_BACKLOG)
        self.path.chmod(0o666)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()
        await self._relay.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


# --- inside ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Relay until SIGTERM or SIGINT. The exit code: 0 then, 1 when a port cannot be had."""
    args = _parser().parse_args(argv)
    raise_file_limit()
    try:
        asyncio.run(_serve(args.pairs, args.max_connections, args.announce))
    except OSError as error:
        print(f"relay: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(pairs: list[tuple[str, int, str]], max_connections: int, announce: tuple[str, str] | None) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    relays = [Relay(path, max_connections) for _, _, path in pairs]
    servers = [
        await loop.create_server(relay.accept, host, port, backlog=_BACKLOG)
        for relay, (host, port, _) in zip(relays, pairs)  # noqa: B905 - `strict` is younger than 3.8
    ]
    announcing = None if announce is None else loop.create_task(_announce(*announce))
    await stopped.wait()
    if announcing is not None:
        announcing.cancel()
    for server in servers:
        server.close()


async def _announce(path: str, name: str) -> None:
    """Say on the Unix socket `path` that everything listens, and keep that connection for as long as we live.

    Whoever listens there knows by its end that this relay has ended. When it is the listener that ends, the relay
    goes on for the sandbox's sake, and tells the next one.
    """
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(name.encode() + b"\n")
            await reader.read()
            writer.close()
        except OSError:
            pass  # nobody listens (any more): asked again below
        await asyncio.sleep(_ANNOUNCE_AGAIN_S)


def _pair(text: str) -> tuple[str, int, str]:
    address, _, path = text.partition("=")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not os.path.isabs(path):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT=/PATH, e.g. 127.0.0.1:18101=/run/ht/gateway.sock")
    return host.strip("[]"), int(port), path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relay", description="Pass TCP connections on to Unix sockets.")
    parser.add_argument("pairs", nargs="*", type=_pair, metavar="HOST:PORT=/SOCKET")
    parser.add_argument(
        "--max-connections", type=int, default=MAX_CONNECTIONS, metavar="N", help="of each pair, at once"
    )
    parser.add_argument("--announce", nargs=2, metavar=("/SOCKET", "NAME"), help="where to say that all of it listens")
    return parser


if __name__ == "__main__":
    sys.exit(main())

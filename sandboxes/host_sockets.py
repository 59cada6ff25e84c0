"""The folder of Unix sockets through which a run's sealed sandboxes reach this host.

Owns which socket leads to which service (the service's own where a relay may use it, else a bridge to it), and who is
there: each relay says so when it listens, and its silence is how its death is known. `docker_network` opens it,
`docker_relay` mounts it into relays, and nobody into sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from sandboxes.base import Endpoint, SandboxError
from sandboxes.relay import SocketBridge, Target, raise_file_limit

CONTROL = "control.sock"


@dataclass(slots=True)
class Presence:
    """What is known of one relay. `ended` is set when it was there and is not any more."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class HostSockets:
    """Open while relays may use them; an async context manager. Raises SandboxError when it cannot be opened.

    `folder` exists, and its parent is open to its owner alone: the sockets themselves are open to every user, since
    the relay in a container is another one. `own` = every socket lies in the folder, as relays that run already expect.
    """

    def __init__(self, folder: Path, services: Mapping[str, Endpoint], *, own: bool = False) -> None:
        self.folder = folder
        self._services = services
        self._own = own
        self._paths: dict[str, Path] = {}
        self._relays: dict[str, Presence] = {}
        self._attended: set[asyncio.StreamWriter] = set()
        self._stack = contextlib.AsyncExitStack()

    def path(self, service: str) -> Path:
        """The socket of a service; not always in `folder`. It may be gone for a while when the service restarts."""
        return self._paths[service]

    def relay(self, name: str) -> Presence:
        return self._relays.setdefault(name, Presence())

    def forget(self, name: str) -> None:
        self._relays.pop(name, None)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            try:
                self.folder.chmod(0o755)
                for name, endpoint in self._services.items():
                    self._paths[name] = await self._open(stack, name, endpoint)
                await self._listen(stack)
            except OSError as error:
                raise SandboxError(
                    f"cannot make a socket in {self.folder}: {error}; set TMPDIR to a short path on a local disk"
                ) from error
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()
        for writer in self._attended:
            writer.close()

    async def _open(self, stack: contextlib.AsyncExitStack, name: str, endpoint: Endpoint) -> Path:
        if not self._own and endpoint.socket is not None and _open_to_all(endpoint.socket):
            return endpoint.socket
        path = self.folder / f"{name}.sock"
        raise_file_limit()
        await stack.enter_async_context(SocketBridge(path, _target(name, endpoint)))
        return path

    async def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        path = self.folder / CONTROL
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._attend, path)
        path.chmod(0o666)
        stack.callback(path.unlink, missing_ok=True)
        stack.callback(server.close)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One relay, for as long as it lives."""
        self._attended.add(writer)
        try:
            name = (await reader.readline()).decode(errors="replace").strip()
            presence = self._relays.get(name)
            if presence is None:
                return  # of a sandbox that has ended meanwhile
            presence.ready.set()
            with contextlib.suppress(OSError):  # a reset is an end like any other
                await reader.read()
            presence.ended.set()
        except (OSError, ValueError):
            return  # it never said who it is
        finally:
            self._attended.discard(writer)
            writer.close()


def _target(name: str, endpoint: Endpoint) -> Target:
    if endpoint.socket is not None:
        return str(endpoint.socket)
    parts = urlsplit(endpoint.url or "")
    if parts.scheme != "http" or not parts.hostname:
        raise SandboxError(f"the {name}'s address {endpoint.url!r} is not http://HOST:PORT")
    return parts.hostname, parts.port or 80


def _open_to_all(socket: Path) -> bool:
    """Whether another user may connect to the socket once its folder is mounted, and the folder is its alone."""
    try:
        folder, mode = socket.parent.stat().st_mode, socket.stat().st_mode
    except OSError:
        return False
    return stat.S_ISSOCK(mode) and mode & 0o006 == 0o006 and folder & 0o003 == 0o001

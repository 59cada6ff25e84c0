"""One sandbox's place in the network: the relay container that holds its namespace, from creation to removal.

Owns what of this machine a sidecar sees, how it is started, how its readiness and its death are seen, and that it is
removed on every path. Which mode needs which sidecar is `docker_network`'s, its only maker; `docker` starts and removes
one with each sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import docker
from docker.types import Mount

from sandboxes.base import SandboxError
from sandboxes.docker_api import ENGINE_ERRORS, is_absent, reason
from sandboxes.docker_volumes import SocketVolume
from sandboxes.host_sockets import HostSockets
from sandboxes.netguard import CLOSED

READY_TIMEOUT_S = 20.0
_LOOK_S = 1.0  # between looks at a relay that does not say that it listens
_FIRST_LOOK_S = 0.05
_T = TypeVar("_T")


class Threads(Protocol):
    """Runs a blocking call in a thread, where it goes on when the caller is cancelled."""

    def __call__(self, work: Callable[[], _T], /) -> Awaitable[_T]: ...


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A relay container to create. Example: Sidecar("sandbox-412-98213-0a1b2c3d-net", {"image": ..}, None, False)."""

    name: str
    config: Mapping[str, Any]  # keyword arguments of the SDK's create_container
    sockets: HostSockets | None  # where it says that it listens; None = on another machine, and its log says so
    must_be_ready: bool  # before anything else runs in its namespace


class Places:
    """Where sockets of this machine are in a relay, and the mounts for it: their folders, or the volume they are on."""

    def __init__(self, root: str, volume: SocketVolume | None) -> None:
        self._root = root  # where the volume is mounted
        self._volume = volume
        self._folders: dict[Path, str] = {}
        self.mounts: list[Mount] = []

    def inside(self, path: Path, wanted: str) -> str:
        """`wanted` is the place of the folder, unless it has one."""
        if self._volume is not None:
            self.mounts = [Mount(self._root, self._volume.name, "volume", read_only=True, no_copy=True)]
            return self._volume.inside(path, self._root)
        if path.parent not in self._folders:
            self._folders[path.parent] = wanted
            self.mounts.append(Mount(wanted, str(path.parent.resolve()), "bind", read_only=True))
        return f"{self._folders[path.parent]}/{path.name}"


class NetworkLink:
    """A sandbox's place in the network. Start it before the sandbox, await `ready` before anything runs in that.

    `options` go into the sandbox's own host config: network mode, and what may not be set beside it.
    """

    def __init__(
        self,
        api: docker.APIClient,
        threads: Threads,
        sidecar: Sidecar | None,
        options: Mapping[str, Any],
        *,
        gateway_url: str | None = None,
        proxy_url: str | None = None,
    ) -> None:
        self.options = options
        self.gateway_url = gateway_url  # as processes in the sandbox reach them
        self.proxy_url = proxy_url
        self._api = api
        self._threads = threads
        self._sidecar = sidecar
        self._starting: asyncio.Future[None] | None = None
        if sidecar is not None and sidecar.sockets is not None:
            self._presence = sidecar.sockets.relay(sidecar.name)

    @property
    def alive(self) -> bool:
        """Whether the relay listens, as far as that can be known without asking the engine."""
        sidecar = self._sidecar
        if sidecar is None or sidecar.sockets is None:
            return False
        return self._presence.ready.is_set() and not self._presence.ended.is_set()

    async def start(self) -> None:
        """Create and start the sidecar, once. The sandbox may be *created* meanwhile, but can start only afterwards.

        Raises SandboxError. `remove` is still to be called then, and when it was cancelled.
        """
        if self._sidecar is None or self._starting is not None:
            return
        self._starting = asyncio.ensure_future(self._threads(self._start))
        try:
            await asyncio.shield(self._starting)
        except ENGINE_ERRORS as error:
            raise SandboxError(_explained(error)) from error
        if self._sidecar.must_be_ready:
            await self.ready()

    async def ready(self) -> None:
        """Until the relay listens. Raises SandboxError when it does not, with what it said."""
        sidecar = self._sidecar
        if sidecar is None:
            return
        pause_s = _LOOK_S if sidecar.sockets is not None else _FIRST_LOOK_S
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not await self._listens(pause_s):
                    if fault := await self._fault():
                        raise SandboxError(f"the sandbox's relay did not start: {fault}")
        except TimeoutError:
            raise SandboxError(
                f"the sandbox's relay did not report within {READY_TIMEOUT_S:g} s; it may not connect to the host's "
                "socket (a security module, or an engine that runs elsewhere than its socket says)"
            ) from None

    async def check(self) -> None:
        """Raises SandboxError when the relay has ended: what the sandbox failed at since is not the agent's fault.

        Costs nothing on a local engine as long as it lives.
        """
        sidecar = self._sidecar
        if sidecar is None or (sidecar.sockets is not None and not self._presence.ended.is_set()):
            return
        if fault := await self._fault():
            raise SandboxError(f"the relay that leads the sandbox to the gateway ended: {fault}")

    async def remove(self) -> None:
        """Remove the sidecar, also when its start was cut short; the sandbox first. Idempotent.

        Raises SandboxError when the engine does not do it.
        """
        sidecar = self._sidecar
        if sidecar is None:
            return
        if self._starting is not None:
            await asyncio.wait([self._starting])
            with contextlib.suppress(Exception):  # told to whoever started it
                self._starting.result()
        try:
            await self._threads(lambda: self._remove(sidecar.name))
        except ENGINE_ERRORS as error:
            raise SandboxError(f"the relay {sidecar.name} could not be removed: {reason(error)}") from error
        if sidecar.sockets is not None:
            sidecar.sockets.forget(sidecar.name)

    # -- in threads ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        assert self._sidecar is not None
        container = self._api.create_container(name=self._sidecar.name, **self._sidecar.config)
        self._api.start(container["Id"])

    def _remove(self, name: str) -> None:
        try:
            self._api.remove_container(name, force=True, v=True)
        except ENGINE_ERRORS as error:
            # 409 = it is being removed already, by a reaper or by an earlier call that was given up.
            if not is_absent(error) and getattr(error, "status_code", None) != 409:
                raise

    # -- looking ---------------------------------------------------------------------------------------------------

    async def _listens(self, pause_s: float) -> bool:
        sidecar = self._sidecar
        assert sidecar is not None
        if sidecar.sockets is None:
            await asyncio.sleep(pause_s)
            said = await self._threads(lambda: self._api.logs(sidecar.name, stdout=True, stderr=False))
            return CLOSED.encode() in said
        try:
            async with asyncio.timeout(pause_s):
                await self._presence.ready.wait()
        except TimeoutError:
            return False
        return True

    async def _fault(self) -> str | None:
        """Why the sidecar does not run, in a line; None when it does."""
        sidecar = self._sidecar
        assert sidecar is not None
        try:
            state, said = await self._threads(lambda: self._look(sidecar.name))
        except ENGINE_ERRORS as error:
            return "it was removed" if is_absent(error) else reason(error)
        if state["Running"]:
            return None
        why = "out of memory" if state.get("OOMKilled") else f"exit code {state['ExitCode']}"
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        return f"{why}: {(state.get('Error') or (lines[-1] if lines else 'it said nothing'))[:300]}"

    def _look(self, name: str) -> tuple[dict[str, Any], bytes]:
        state: dict[str, Any] = self._api.inspect_container(name)["State"]
        said: bytes = b"" if state["Running"] else self._api.logs(name, tail=5)
        return state, said


def _explained(error: Exception) -> str:
    text = reason(error)
    if "bind source path does not exist" in text or "invalid mount config" in text:
        text += "; the engine does not see this host's folder: set TMPDIR to one that it sees, or use a local engine"
    elif "address pool" in text:
        text += "; remove networks that nobody uses (docker network prune)"
    return f"the sandbox's relay could not be started: {text}"

"""What each `NetworkMode` is in Docker: enforced by the network namespace itself, with no right on the host's firewall.

- `none`: Docker's own `none` network, loopback only.
- `proxy-only`: a *sidecar* container, also with loopback only, holds the namespace and relays one port of it to the
  gateway's Unix socket, whose folder is mounted into the sidecar alone; the sandbox joins the namespace. There is no
  interface to send anything by. An `--internal` Docker network would be no seal: it reaches the host's ports.
- `allowlist`: that, and a second port that leads to the interception proxy, which holds the list of hosts.
- `public`: a sidecar on a bridge network of the run, which is closed from within (see `netguard`) towards the host's
  addresses, private networks, the metadata address and other sandboxes. Left open there: the internet (where the host's
  own public address may be reachable like anybody's, when it is not one of its interfaces'), DNS at the resolvers that
  Docker uses, and ICMP. For an engine on another machine its public addresses are not known and stay open.

IPv6 is off in all of them, and the sealed ones have no resolver. AF_VSOCK, the way from a virtual machine to its
hypervisor, is no part of a network namespace: engines refuse it from 23.0 on, with an older one a warning is logged.

Owns the plan of a mode, the run's bridge network and the folder of sockets; what a sidecar is made of is
`docker_relay`'s, its life `docker_sidecar`'s, how many are started ahead of need `docker_spares`', how a sandbox is
made `docker`'s, the only caller.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import Callable, Coroutine, Hashable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import docker

from sandboxes import docker_relay
from sandboxes.base import Access, BoxSpec, Endpoint, Network, NetworkMode, SandboxError
from sandboxes.docker_api import ENGINE_ERRORS, is_absent, reason
from sandboxes.docker_images import Images
from sandboxes.docker_labels import CLAIM, engine_of, labels_of
from sandboxes.docker_sidecar import NetworkLink, Sidecar
from sandboxes.docker_spares import Spare, Spares, sandbox_claim
from sandboxes.docker_volumes import open_to_relays, sockets_root
from sandboxes.host_sockets import HostSockets
from sandboxes.lifecycle import remove_tree
from sandboxes.ownership import Claim, Keeper, adopt, claim
from sandboxes.processes import LifecycleError

log = logging.getLogger(__name__)

GATEWAY_PORT = 18101  # on the sandbox's loopback
PROXY_PORT = 18102
_GATEWAY = "gateway"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a mode needs of us. Example: _Plan(bridge=False, relayed={18101: "gateway"}); nothing = Docker's `none`."""

    bridge: bool
    relayed: Mapping[int, str]  # port on the sandbox's loopback -> service

    @property
    def sidecar(self) -> bool:
        return self.bridge or bool(self.relayed)


@dataclass(frozen=True, slots=True)
class _Base:
    """What a run's sidecars share, and is removed after the last: a folder of sockets, perhaps a bridge network."""

    claim: Claim
    sockets: HostSockets | None


class DockerNetwork:
    """The network of one run's sandboxes in one engine. An async context manager; makes nothing before it is needed."""

    def __init__(
        self,
        api: docker.APIClient,
        *,
        address: str,
        run_id: str,
        registry: Path,
        access: Access,
        images: Images,
        relay_base: str,
        executor: Executor | None = None,
        spare_relays: int = 0,
    ) -> None:
        self._api = api
        self._address = address
        self._run_id = run_id
        self._registry = registry
        self._access = access
        self._images = images
        self._relay_base = relay_base
        self._executor = executor
        self._local = address.startswith("unix://")
        self._lock = asyncio.Lock()
        self.spares = Spares(spare_relays)
        self._base: _Base | None = None
        self._adopted: dict[Path, _Base] = {}
        self._bridge: str | None = None
        self._image: str | None = None

    async def __aenter__(self) -> Self:
        """Raises one of ENGINE_ERRORS when the engine does not answer."""
        version = str((await self._threads(self._api.version))["Version"])
        if self._local and _lets_vsock_through(version):
            log.warning(
                "Docker %s lets containers open AF_VSOCK sockets, which no network mode holds: code in a sandbox may "
                "reach services of the hypervisor this machine runs on; Docker 23.0 and newer refuse them",
                version,
            )
        return self

    async def __aexit__(self, *exc: object) -> None:
        """After the last sandbox was removed. Raises SandboxError for what stays; its record does too, for a reaper."""
        await _to_end(self._close())

    # -- asked by the backend --------------------------------------------------------------------------------------

    def check(self, network: Network) -> None:
        """Raises SandboxError when the mode cannot be had with this engine and this run's services."""
        mode, gateway = network.mode, self._access.gateway
        if network.allow and mode is not NetworkMode.ALLOWLIST:
            raise SandboxError(f"network mode {mode} takes no list of hosts; use mode allowlist, or drop the list")
        if mode is NetworkMode.ALLOWLIST and self._access.proxy_for(network) is None:
            hosts = ", ".join(network.allow) or "nothing"
            raise SandboxError(
                f"network mode allowlist needs an interception proxy that lets through {hosts}; none runs"
            )
        if self._local or mode is NetworkMode.NONE:
            return
        if mode is not NetworkMode.PUBLIC and (gateway is not None or mode is NetworkMode.ALLOWLIST):
            raise SandboxError(
                f"network mode {mode} needs a Docker engine on this machine (unix://..): the one at {self._address} "
                "cannot mount the gateway's socket; use a local engine, or mode public and a public URL of the gateway"
            )
        if mode is NetworkMode.PUBLIC and gateway is not None and gateway.public_url is None:
            raise SandboxError(
                f"sandboxes of the engine at {self._address} cannot reach the gateway: give it a public URL (a tunnel)"
            )

    async def prepare(self, network: Network) -> None:
        """Make what is the same for all sandboxes of this mode: sockets, the relay's image, the bridge network.

        Raises SetupFailed or SandboxError.
        """
        plan = self._plan(network)
        if not plan.sidecar:
            return
        async with self._lock:
            if self._base is None:
                await _to_end(self._make_base())
            assert self._base is not None
            folder = Path(self._base.claim.folders[0])
            if self._image is None:
                context = await self._threads(lambda: docker_relay.image_folder(folder, self._relay_base))
                self._image = await self._images.ensure(BoxSpec("the relay", build_dir=context), "")
            if self._bridge is None and plan.bridge:
                await _to_end(self._make_bridge(self._base.claim))

    def link(self, name: str, network: Network, owner: Claim) -> NetworkLink:
        """The place of the sandbox container `name`, not started yet; `owner` owns both. `prepare` comes first."""
        plan = self._plan(network)
        if not plan.sidecar:
            return self._link(plan, None)
        assert self._base is not None
        sockets = self._base.sockets
        config = self._config(plan, _sidecar_name(name), owner, sockets)
        return self._link(plan, Sidecar(_sidecar_name(name), config, sockets, must_be_ready=plan.bridge))

    def take_spare(self, network: Network) -> Spare | None:
        """A place like `link`'s with a running relay, and its owner, both the caller's now. None = none is there."""
        plan = self._plan(network)
        return self.spares.take(self._kind(plan)) if plan.sidecar else None

    def order_spare(self, network: Network, *, first: bool = False) -> None:
        """Have one more made for a later sandbox; `first` = only when there is none. `prepare` comes first.

        None for an engine on another machine: whether it still lives could not be told without asking.
        """

        async def begin() -> Spare:
            how = {"run_id": self._run_id, "address": self._address}
            owner = await self._threads(lambda: sandbox_claim(self._registry, **how))
            return Spare(owner, self.link(owner.id, network, owner))

        plan = self._plan(network)
        if plan.sidecar and self._local:
            self.spares.order(self._kind(plan), begin, first=first)

    async def adopt(self, name: str, network: Network) -> NetworkLink:
        """The place of a sandbox whose maker died and that is ours now: its relay leads to this run's services.

        The modes must be the same. Raises SandboxError when its relay is gone; what is left of it is removed then.
        """
        plan = self._plan(network)
        if not plan.sidecar:
            return self._link(plan, None)
        name = _sidecar_name(name)
        link = self._link(plan, Sidecar(name, {}, None, must_be_ready=False))
        try:
            try:
                labels = (await self._threads(lambda: self._api.inspect_container(name)))["Config"]["Labels"] or {}
            except ENGINE_ERRORS as error:
                raise SandboxError(f"the sandbox's relay {name} cannot be taken over: {reason(error)}") from error
            if docker_relay.FOLDER_LABEL in labels:
                sockets = await self._adopt_base(Path(labels[docker_relay.FOLDER_LABEL]))
                link = self._link(plan, Sidecar(name, {}, sockets, must_be_ready=False))
            await link.ready()
        except BaseException:
            await link.remove()
            raise
        return link

    async def keep(self, keeper: Keeper, until: float) -> None:
        """What the run's sandboxes share waits for a successor as the sandboxes themselves do (`Claim.keep`).

        Raises OSError.
        """
        async with self._lock:
            for owner in [base.claim for base in (self._base, *self._adopted.values()) if base is not None]:
                if owner.keeper != keeper or owner.kept_until < until:
                    await self._threads(functools.partial(owner.keep, keeper, max(until, owner.kept_until)))

    # -- plans -----------------------------------------------------------------------------------------------------

    def _plan(self, network: Network) -> _Plan:
        mode = network.mode
        relayed = {}
        if mode is not NetworkMode.NONE and self._access.gateway is not None and self._local:
            relayed[GATEWAY_PORT] = _GATEWAY
        proxy = self._access.proxy_for(network) if mode is NetworkMode.ALLOWLIST else None
        if proxy is not None:
            relayed[PROXY_PORT] = _proxy_service(proxy.allow)
        return _Plan(bridge=mode is NetworkMode.PUBLIC, relayed=relayed)

    def _link(self, plan: _Plan, sidecar: Sidecar | None) -> NetworkLink:
        gateway = self._access.gateway
        public = gateway.public_url if gateway is not None and plan.bridge and not self._local else None
        options = docker_relay.alone() if sidecar is None else {"network_mode": f"container:{sidecar.name}"}
        return NetworkLink(
            self._api,
            self._threads,
            sidecar,
            # With raw sockets a sandbox on a bridge could answer for its neighbours' addresses.
            {**options, "cap_drop": ["NET_RAW"]},
            gateway_url=f"http://127.0.0.1:{GATEWAY_PORT}" if GATEWAY_PORT in plan.relayed else public,
            proxy_url=f"http://127.0.0.1:{PROXY_PORT}" if PROXY_PORT in plan.relayed else None,
        )

    def _kind(self, plan: _Plan) -> Hashable:
        """Equal for sandboxes whose relays are alike; not for one that was told of other addresses of this host."""
        return plan.bridge, tuple(sorted(plan.relayed.items())), tuple(self._closing() if plan.bridge else ())

    def _services(self) -> dict[str, Endpoint]:
        gateway = {} if self._access.gateway is None else {_GATEWAY: self._access.gateway}
        return gateway | {_proxy_service(proxy.allow): proxy.endpoint for proxy in self._access.proxies}

    def _config(self, plan: _Plan, name: str, owner: Claim, sockets: HostSockets | None) -> dict[str, Any]:
        assert self._image is not None
        bridge = None
        if plan.bridge:
            assert self._bridge is not None
            bridge = docker_relay.Bridge(self._bridge, self._closing())
        options, host = docker_relay.container(
            name, self._image, owner, relayed=plan.relayed, sockets=sockets, bridge=bridge
        )
        return {**options, "host_config": self._api.create_host_config(**host)}

    def _closing(self) -> list[str]:
        return docker_relay.guard_options() if self._local else []

    # -- what the run's sidecars share -----------------------------------------------------------------------------

    async def _make_base(self) -> None:
        owner = await self._threads(self._make_claim)
        sockets = HostSockets(Path(owner.folders[0]) / "sockets", self._services()) if self._local else None
        if sockets is not None:
            try:
                await sockets.__aenter__()
            except BaseException:
                await self._end(_Base(owner, None))
                raise
        self._base = _Base(owner, sockets)

    def _make_claim(self) -> Claim:
        """With a folder of its own, in which `sockets` are."""
        try:
            owner = claim(self._registry, "network", run_id=self._run_id, engine=engine_of(self._address))
            folder = owner.make_folder(sockets_root())
            open_to_relays(folder)
            (folder / "sockets").mkdir()
        except LifecycleError as error:
            raise SandboxError(str(error)) from error
        except OSError as error:
            raise SandboxError(f"cannot make a folder for sockets: {error}; free space or set TMPDIR") from error
        return owner

    async def _make_bridge(self, owner: Claim) -> None:
        options = {"com.docker.network.bridge.enable_icc": "false"}
        labels = labels_of(owner, "network")
        try:
            await self._threads(
                lambda: self._api.create_network(owner.id, "bridge", options=options, labels=labels, enable_ipv6=False)
            )
        except ENGINE_ERRORS as error:
            hint = "; remove networks that nobody uses (docker network prune)" if "pool" in reason(error) else ""
            raise SandboxError(f"the run's network could not be made: {reason(error)}{hint}") from error
        self._bridge = owner.id

    async def _adopt_base(self, folder: Path) -> HostSockets:
        """Take over a dead run's folder of sockets, once for all its sandboxes."""
        async with self._lock:
            known = self._adopted.get(folder)
            if known is not None and known.sockets is not None:
                return known.sockets
            try:
                owner = await self._threads(lambda: adopt(self._registry, folder.parent.name))
            except LifecycleError as error:
                raise SandboxError(f"the sandbox's network cannot be taken over: {error}") from error
            sockets = await HostSockets(folder, self._services(), own=True).__aenter__()
            self._adopted[folder] = _Base(owner, sockets)
            return sockets

    async def _close(self) -> None:
        problems = await self.spares.close()
        async with self._lock:
            bases = [*self._adopted.values(), *([self._base] if self._base is not None else [])]
            self._adopted, self._base, self._bridge = {}, None, None
        problems += [problem for base in bases if (problem := await self._end(base))]
        if problems:
            raise SandboxError("; ".join(problems))

    async def _end(self, base: _Base) -> str | None:
        if base.sockets is not None:
            await base.sockets.__aexit__()
        try:
            await self._threads(lambda: self._remove(base.claim))
        except ENGINE_ERRORS as error:  # the record stays: the next start has another go
            return f"the run's network {base.claim.id} could not be removed: {reason(error)}"
        return None

    def _remove(self, owner: Claim) -> None:
        for network in self._api.networks(filters={"label": f"{CLAIM}={owner.id}"}):
            try:
                self._api.remove_network(network["Id"])
            except ENGINE_ERRORS as error:
                if not is_absent(error):
                    raise
        for folder in owner.folders:
            remove_tree(Path(folder))
        owner.release()

    async def _threads(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _lets_vsock_through(version: str) -> bool:
    """By the engine's default seccomp profile, on a machine that has the sockets at all."""
    major = version.partition(".")[0]
    return major.isdecimal() and int(major) < 23 and Path("/dev/vsock").exists()


async def _to_end(work: Coroutine[None, None, None]) -> None:
    """Begun means finished, also when the caller is cancelled: what it makes must be known to be removed."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


def _sidecar_name(sandbox: str) -> str:
    return f"{sandbox}-net"


def _proxy_service(allow: tuple[str, ...]) -> str:
    return "proxy-" + hashlib.sha256("\n".join(sorted(allow)).lower().encode()).hexdigest()[:12]

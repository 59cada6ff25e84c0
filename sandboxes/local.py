"""The local backend: sandboxes on this machine, sealed by bubblewrap where that works.

Owns the settings, what can be had here, and which sandboxes are open. One sandbox is `local_box`'s. Made by
`sandboxes.open_backend`.

Without bubblewrap it is no security boundary: the agent runs as you. Held back then: the environment of the parent (no
keys or tokens), runaway CPU, memory, files and processes, left-over processes, left-over folders. Not held back:
reading or writing your files, using the network.

There are no images: sandboxes have this machine's programs, and the files beside a task's Dockerfile as their
workspace; the Dockerfile itself is not read.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from sandboxes import bubblewrap
from sandboxes.base import (
    Access,
    BoxSpec,
    Endpoint,
    Limits,
    Mount,
    Network,
    NetworkMode,
    SandboxError,
    SandboxGone,
    Traits,
)
from sandboxes.lifecycle import Claim, LifecycleError, adopt
from sandboxes.local_box import LocalSandbox, remove_folders
from sandboxes.local_plan import Kept, Plan, Service, Services
from sandboxes.local_process import own_user
from sandboxes.local_watch import ENFORCED
from sandboxes.ownership import Owner, recorded
from sandboxes.processes import kill_owned

log = logging.getLogger(__name__)


class LocalConfig(BaseModel):
    """Settings of the local sandbox. The tighter of `limits` and the task's own counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["local"] = "local"
    root: Path | None = Field(None, description="holds the sandboxes' folders; None = the system's temp folder")
    isolation: Literal["auto", "bubblewrap", "none"] = Field(
        "auto", description="auto = bubblewrap where it works, else none"
    )
    network: NetworkMode | None = Field(None, description="for every task; None = the task's own, else proxy-only")
    limits: Limits = Limits(cpu_s=600, memory_mb=4096, file_mb=512, processes=256)

    @field_validator("limits")
    @classmethod
    def _positive(cls, limits: Limits) -> Limits:
        for field in fields(limits):
            value = getattr(limits, field.name)
            if value is not None and field.name not in ENFORCED:
                raise ValueError(f"the local sandbox cannot hold {field.name}; leave it null, or use docker")
            if value is not None and value <= 0:
                raise ValueError(f"{field.name} must be above 0, or null for no limit; it is {value}")
        return limits


class LocalBackend:
    """See `sandboxes.base.Backend`. The first look at `traits`, if not `__aenter__`, tries bubblewrap (20 ms)."""

    def __init__(self, config: LocalConfig, *, run_id: str, registry: Path, access: Access) -> None:
        self._config = config
        self._run_id = run_id
        self._registry = registry
        self._access = access
        self._sandboxes: list[LocalSandbox] = []
        self._warned: set[str] = set()

    @property
    def _sealed(self) -> bool:
        return self._config.isolation != "none" and bubblewrap.find().problem is None

    @property
    def traits(self) -> Traits:
        sealed = self._sealed
        return Traits(
            boundary=sealed,
            users=False,
            mounts=sealed,
            networks=frozenset(NetworkMode) if sealed else frozenset({NetworkMode.PUBLIC}),
            limits=ENFORCED,
        )

    async def __aenter__(self) -> Self:
        if self._config.isolation == "none":
            return self
        problem = (await asyncio.to_thread(bubblewrap.find)).problem
        if problem is not None and self._config.isolation == "bubblewrap":
            raise SandboxError(
                f"{problem}; install bubblewrap and allow user namespaces, or set isolation to auto or none"
            )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(sandbox.stop() for sandbox in self._sandboxes))
        self._sandboxes.clear()

    def check(self, spec: BoxSpec) -> None:
        network = self._network(spec)
        sealed = self._sealed
        own = {None, bubblewrap.USER, str(os.getuid())} if sealed else {None, own_user(), str(os.getuid())}
        if spec.user not in own:
            raise SandboxError(
                f"task {spec.name!r} wants to run as {spec.user}, but local sandboxes have one user; use docker"
            )
        if network.allow and network.mode is not NetworkMode.ALLOWLIST:
            raise SandboxError(
                f"network mode {network.mode} has no list of allowed hosts; use mode allowlist, or drop the list"
            )
        if not sealed and network.mode in (NetworkMode.NONE, NetworkMode.ALLOWLIST):
            why = bubblewrap.find().problem if self._config.isolation != "none" else "isolation is set to none"
            raise SandboxError(
                f"network mode {network.mode} cannot be enforced by the local sandbox here: {why}; "
                "install bubblewrap, or use docker"
            )
        if network.mode is NetworkMode.ALLOWLIST and self._access.proxy_for(network) is None:
            raise SandboxError(
                "network mode allowlist needs an interception proxy with the list "
                f"{', '.join(network.allow) or '(empty)'}; none was started"
            )

    async def prepare(self, spec: BoxSpec) -> None:
        self.check(spec)

    def sandbox(self, spec: BoxSpec) -> LocalSandbox:
        self.check(spec)
        self._warn(spec)
        network = self._network(spec)
        sealed = self._sealed
        plan = Plan(
            name=spec.name,
            workdir=spec.workdir or "/app",
            env=dict(spec.env),
            limits=_tighter(self._config.limits, spec.limits),
            network=network.mode,
            allow=network.allow,
            sealed=sealed,
            mounts=_mounts(spec, sealed),
            workspace=spec.build_dir if spec.image is None or not _has_dockerfile(spec) else None,
            healthcheck=spec.healthcheck,
        )
        return self._open(plan, self._services(network))

    def _open(self, plan: Plan, services: Services) -> LocalSandbox:
        sandbox = LocalSandbox(plan, services, under=self._config.root, run_id=self._run_id, registry=self._registry)
        self._sandboxes = [known for known in self._sandboxes if not known.stopped]
        self._sandboxes.append(sandbox)
        return sandbox

    async def attach(self, sandbox_id: str) -> LocalSandbox:
        try:
            adopted = await asyncio.to_thread(adopt, self._registry, sandbox_id)
        except LifecycleError as e:
            if recorded(self._registry, sandbox_id, Owner.current()) is not None:
                raise SandboxError(f"cannot take the sandbox over: {e}") from e
            raise SandboxGone(f"the sandbox is gone: {e}") from e
        kept = await asyncio.to_thread(_kept, adopted)
        sandbox = self._open(kept.plan, self._services(Network(kept.plan.network, kept.plan.allow)))
        await sandbox.take_over(adopted, kept)
        return sandbox

    def _network(self, spec: BoxSpec) -> Network:
        if self._config.network is None or self._config.network is spec.network.mode:
            return spec.network
        return Network(self._config.network)

    def _services(self, network: Network) -> Services:
        proxy = self._access.proxy_for(network) if network.mode is NetworkMode.ALLOWLIST else None
        return Services(_service("gateway", self._access.gateway), _service("proxy", proxy.endpoint if proxy else None))

    def _warn(self, spec: BoxSpec) -> None:
        if not self._sealed and self._network(spec).mode is NetworkMode.PROXY_ONLY:
            self._warn_once(
                "the local sandbox has no bubblewrap here: agents can use the network and read your files. "
                "Install bubblewrap, or use docker"
            )
        if spec.image is not None or _has_dockerfile(spec):
            self._warn_once(
                "local sandboxes have this machine's programs: images and Dockerfiles of tasks are not used"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _kept(adopted: Claim) -> Kept:
    """What is known of a sandbox that is ours now. Raises SandboxGone when it never was one, and ends what there is."""
    kept = Kept.read(Path(adopted.folders[0]) / "control") if adopted.folders else None
    if kept is None:
        kill_owned(adopted.id)
        remove_folders(adopted)
        raise SandboxGone(f"the sandbox is gone: {adopted.id} was never started to its end")
    return kept


def _tighter(ours: Limits, theirs: Limits) -> Limits:
    both = {f.name: (getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(Limits)}
    return Limits(**{name: min((v for v in pair if v is not None), default=None) for name, pair in both.items()})


def _mounts(spec: BoxSpec, sealed: bool) -> tuple[Mount, ...]:
    for mount in spec.mounts:
        if not mount.source.is_dir():
            raise SandboxError(f"task {spec.name!r} wants {mount.source} in its sandbox, which is no folder")
    return tuple({m.target: m for m in (*(bubblewrap.own_mounts() if sealed else ()), *spec.mounts)}.values())


def _service(name: str, endpoint: Endpoint | None) -> Service | None:
    if endpoint is None:
        return None
    if endpoint.socket is not None:
        return Service(endpoint.url, str(endpoint.socket))
    parts = urlsplit(endpoint.url or "")
    if parts.scheme != "http" or not parts.hostname:
        raise SandboxError(f"the {name}'s address {endpoint.url!r} is not http://HOST:PORT")
    return Service(endpoint.url, (parts.hostname, parts.port or 80))


def _has_dockerfile(spec: BoxSpec) -> bool:
    return spec.build_dir is not None and (spec.build_dir / "Dockerfile").exists()

"""Sandboxes in any environment that Harbor knows (Daytona, Modal, Runloop, its own Docker, a class of yours).

Owns the settings and what a run's sandboxes share: the worker in Harbor's own Python (`harbor_link`) and the mapping of
networks and limits to Harbor's. One sandbox is `harbor_sandbox`'s. Opened by `open_backend` for `harbor:<name>`.

Harbor's environments end with the worker, and the worker ends with the run, however that dies. What neither outlives is
the machine: a provider's own lifetime limit then ends the box. Harbor cannot find a box again, so `attach` is refused.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from sandboxes.base import Access, BoxSpec, Network, NetworkMode, Sandbox, SandboxError, SandboxGone, Traits
from sandboxes.lifecycle import Claim, LifecycleError, claim, remove_tree

if TYPE_CHECKING:
    from sandboxes.harbor_link import Worker
    from sandboxes.harbor_sandbox import HarborSandbox

PYTHON_VARIABLE = "HARNESS_TRAINER_HARBOR_PYTHON"
SETUP = "run `harness-trainer setup harbor` (in a checkout: `make setup-harbor`)"
_OF_CHECKOUT = Path(__file__).parents[1] / ".venv-harbor" / "bin" / "python"
_LIMITS = frozenset({"cpus", "memory_mb", "disk_mb", "deadline_s"})


class HarborConfig(BaseModel):
    """Settings of Harbor's environments. Keys of providers are theirs: environment variables, never settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["harbor"] = "harbor"
    name: str = Field("docker", description="Harbor's name of the environment, or MODULE:CLASS; given as harbor:NAME")
    python: Path | None = Field(None, description=f"a Python 3.12 that has harbor; None = ${PYTHON_VARIABLE}")
    image: str = Field("python:3.12-slim", description="for tasks that bring neither image nor Dockerfile")
    network: NetworkMode | None = Field(None, description="for every task; None = the task's own, else proxy-only")
    options: dict[str, Any] = Field(default_factory=dict, description="further arguments of Harbor's environment")
    start_timeout_s: float = Field(600.0, gt=0, description="most seconds to get one sandbox, beyond its build time")


class HarborBackend:
    """See `sandboxes.base.Backend`."""

    def __init__(self, config: HarborConfig, *, run_id: str, registry: Path, access: Access) -> None:
        self.config = config
        self.run_id = run_id
        self._registry = registry
        self._access = access
        self._worker: Worker | None = None
        self._claim: Claim | None = None
        self._folder: Path | None = None
        self._sandboxes: set[HarborSandbox] = set()
        self._num_boxes = 0

    @property
    def traits(self) -> Traits:
        # Which networks a provider enforces is Harbor's to say: it refuses what its environment cannot do. It does not
        # say whether programs like sudo work there.
        networks = frozenset(NetworkMode)
        return Traits(True, users=True, mounts=False, networks=networks, limits=_LIMITS, escalation=True)

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise SandboxError("the Harbor backend is not open; use it in `async with`")
        return self._worker

    async def __aenter__(self) -> Self:
        from sandboxes.harbor_link import Worker

        python = self._python()
        try:
            self._claim = await asyncio.to_thread(claim, self._registry, "harbor", run_id=self.run_id)
            self._folder = await asyncio.to_thread(self._claim.make_folder, Path(tempfile.gettempdir()))
        except (LifecycleError, OSError) as e:
            raise SandboxError(f"cannot make a folder for Harbor's worker: {e}") from e
        try:
            log = self._folder / "worker.log"
            self._worker = await Worker.start(python, registry=self._registry, run_id=self.run_id, log=log)
        except BaseException:
            await asyncio.shield(self._close())
            raise
        return self

    def _python(self) -> Path:
        own = self.config.python or os.environ.get(PYTHON_VARIABLE) or (_OF_CHECKOUT if _OF_CHECKOUT.exists() else None)
        if not own:
            raise SandboxError(
                f"harbor sandboxes need a Python 3.12 with harbor: {SETUP}, or name one in {PYTHON_VARIABLE} or"
                " --sandbox.python"
            )
        found = shutil.which(str(own))
        if found is None:
            raise SandboxError(f"{own} is no program; {PYTHON_VARIABLE} must name a Python 3.12 that has harbor")
        return Path(found).absolute()

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._sandboxes)))
        if self._worker is not None:
            await self._worker.stop()
        if self._claim is not None and self._folder is not None:
            await asyncio.to_thread(remove_tree, self._folder)
            await asyncio.to_thread(self._claim.release)

    def check(self, spec: BoxSpec) -> None:
        self.policy(spec)
        for name in ("cpu_s", "file_mb", "processes"):
            if getattr(spec.limits, name) is not None:
                raise SandboxError(f"Harbor's environments cannot limit {name}, which {spec.name} asks for")

    @property
    def access(self) -> Access:
        return self._access

    def policy(self, spec: BoxSpec, access: Access | None = None) -> tuple[dict[str, Any], str | None]:
        """Harbor's network policy for the box, and the gateway's address inside. Raises SandboxError.

        `access`: with the addresses of the moment; None = those of the run's start, for a check.
        """
        network = self._network(spec)
        gateway = (access or self._access).gateway
        url = None if gateway is None or network.mode is NetworkMode.NONE else gateway.public_url
        if gateway is not None and url is None and network.mode is not NetworkMode.NONE:
            raise SandboxError(
                "Harbor's environments run elsewhere and cannot reach the capture gateway on this machine; expose it"
                " (a tunnel) and set gateway.public_url"
            )
        if network.mode is NetworkMode.PUBLIC:
            return {"network_mode": "public"}, url
        hosts = [_host(entry) for entry in network.allow] if network.mode is NetworkMode.ALLOWLIST else []
        if url is not None:
            hosts.append(urlsplit(url).hostname or "")
        if not hosts:
            return {"network_mode": "no-network"}, url
        return {"network_mode": "allowlist", "allowed_hosts": hosts}, url

    def _network(self, spec: BoxSpec) -> Network:
        mode = self.config.network
        if mode is None:
            return spec.network
        return Network(mode, spec.network.allow if mode is NetworkMode.ALLOWLIST else ())

    async def prepare(self, spec: BoxSpec) -> None:
        """Harbor builds when an environment starts; nothing is shared between environments on this side."""
        self.check(spec)

    def sandbox(self, spec: BoxSpec) -> Sandbox:
        self.check(spec)
        if self._folder is None:
            raise SandboxError("the Harbor backend is not open; use it in `async with`")
        from sandboxes.harbor_sandbox import HarborSandbox

        self._num_boxes += 1
        made = HarborSandbox(self, spec, self._folder / f"box-{self._num_boxes}")
        self._sandboxes.add(made)
        return made

    def forget(self, sandbox: HarborSandbox) -> None:
        """It is gone; called by the sandbox itself."""
        self._sandboxes.discard(sandbox)

    async def attach(self, sandbox_id: str) -> Sandbox:
        raise SandboxGone(f"there is no sandbox {sandbox_id}: Harbor's environments end with the run that made them")


def _host(entry: str) -> str:
    """An entry of our allow-list as Harbor's, which knows whole hosts only. Raises SandboxError."""
    host, colon, port = entry.rpartition(":")
    if not colon or entry.endswith("]"):
        host, port = entry, "*"
    if port != "*":
        raise SandboxError(f"Harbor's environments allow whole hosts, not single ports: write {host}:* for {entry}")
    return host.strip("[]")

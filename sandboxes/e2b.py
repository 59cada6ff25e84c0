"""Sandboxes in E2B's cloud, through the official SDK: settings, and the backend of one run.

Owns what a run has in common: the check of what E2B can do for a task, the sweep of what dead owners left, and the end
of everything. Knows nothing of a single sandbox (`e2b_sandbox`). The SDK is imported when the backend opens, because
the settings are read long before.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from sandboxes.base import Access, BoxSpec, Network, NetworkMode, Sandbox, SandboxError, Traits
from sandboxes.docker_labels import read_mark
from sandboxes.e2b_network import Reach, reach
from sandboxes.ownership import LifecycleError, Owner, adopt

if TYPE_CHECKING:
    from sandboxes.e2b_sandbox import E2BSandbox, Shared

log = logging.getLogger(__name__)

# E2B fixes CPU and memory when a template is built; a finished template's are what they are. `processes` is held for
# users other than root only.
_TRAITS = Traits(
    boundary=True,
    users=True,
    mounts=False,
    networks=frozenset(NetworkMode),
    limits=frozenset({"deadline_s", "cpu_s", "file_mb"}),
)

# A command that is waited for holds a stream, which without HTTP/2 (a deployment reached by plain HTTP) is a connection
# of its own. The SDK's cap is 200 to one address: further requests would wait until one of those commands ends.
_MAX_CONNECTIONS = "10000"


class E2BConfig(BaseModel):
    """Settings of the E2B sandbox. The API key is $E2B_API_KEY, never a setting."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["e2b"] = "e2b"
    template: str = Field("base", description="for tasks that name no template of their own")
    network: NetworkMode | None = Field(None, description="for every task; None = the task's own, else proxy-only")
    max_creating: int = Field(8, ge=1, description="sandboxes created at the same time")
    create_timeout_s: float = Field(300.0, gt=0, description="most seconds to get one sandbox, retries included")
    domain: str | None = Field(None, description="of a deployment of your own; None = $E2B_DOMAIN, else E2B's cloud")
    api_url: str | None = Field(None, description="of its API; None = $E2B_API_URL, else from the domain")
    sandbox_url: str | None = Field(None, description="of its way into sandboxes; None = $E2B_SANDBOX_URL, else ditto")


class E2BBackend:
    """See `sandboxes.base.Backend`. `cache` is for notes and logs of template builds (None = the project's cache)."""

    def __init__(
        self,
        config: E2BConfig,
        *,
        run_id: str,
        registry: Path,
        access: Access,
        cache: Path | None = None,
        api_key: str | None = None,
        look_s: float = 60.0,
        first_wait_s: float = 0.5,
    ) -> None:
        """`look_s`: how often a sandbox's existence is checked; `first_wait_s`: the first back-off of a creation."""
        self._config = config
        self._run_id = run_id
        self._registry = registry
        self._access = access
        self._cache = cache
        self._api_key = api_key
        self._look_s = look_s
        self._first_wait_s = first_wait_s
        self._shared: Shared | None = None
        self._made: weakref.WeakSet[E2BSandbox] = weakref.WeakSet()

    @property
    def traits(self) -> Traits:
        return _TRAITS

    async def __aenter__(self) -> Self:
        os.environ.setdefault("E2B_MAX_CONNECTIONS", _MAX_CONNECTIONS)  # read when the SDK is imported, and only then
        # Half a second, and the settings are read long before.
        module = await asyncio.to_thread(importlib.import_module, "sandboxes.e2b_sandbox")
        self._shared = module.share(
            self._config,
            run_id=self._run_id,
            registry=self._registry,
            cache=self._cache,
            api_key=self._api_key,
            look_s=self._look_s,
            first_wait_s=self._first_wait_s,
        )
        try:
            await self._sweep(None)  # our first question: it also tells whether the key is good
        except BaseException:
            self._shared = None
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        shared, self._shared = self._shared, None
        if shared is None:
            return
        await asyncio.gather(*(box.stop() for box in list(self._made)))
        await shared.templates.close()
        if shared.claim_ids:
            try:
                await self._sweep(shared)
            except SandboxError as e:
                log.warning("whether sandboxes are left in E2B could not be asked: %s", e)

    async def _sweep(self, shared: Shared | None) -> None:
        """End what dead owners of this host left; with `shared` also what is left of ours, e.g. made by a request that
        was given up."""
        from sandboxes.e2b_reaping import Engine

        own = frozenset(shared.claim_ids) if shared is not None else frozenset()
        connection = (shared or self._open()).service.connection
        try:
            engine = Engine(connection.address, connection=connection)
            ended = await asyncio.to_thread(engine.sweep, Owner.current(), own)
        except LifecycleError as e:
            raise SandboxError(str(e)) from e
        for claim_id, what in ended.items():
            log.info("E2B sandboxes of %s ended: %s", claim_id, what.problem or ", ".join(map(str, what.things)))

    def _open(self) -> Shared:
        if self._shared is None:
            raise SandboxError("the E2B backend is not open; use it in `async with`")
        return self._shared

    def _network(self, spec: BoxSpec) -> Network:
        mode = self._config.network
        if mode is None or mode is spec.network.mode:
            return spec.network
        return Network(mode, spec.network.allow if mode is NetworkMode.ALLOWLIST else ())

    def _reach(self, spec: BoxSpec, access: Access | None = None) -> Reach:
        own = self._config.domain is not None or self._config.api_url is not None
        return reach(self._network(spec), access or self._access, private_ok=own)

    def check(self, spec: BoxSpec) -> None:
        self._reach(spec)
        if spec.image is None and spec.build_dir is not None and not (spec.build_dir / "Dockerfile").is_file():
            raise SandboxError(f"there is no Dockerfile in {spec.build_dir}, and no `image` names an E2B template")

    async def prepare(self, spec: BoxSpec) -> None:
        self.check(spec)
        shared = self._open()
        await shared.templates.ensure(spec, shared.default_template)

    def sandbox(self, spec: BoxSpec) -> Sandbox:
        return self._box(spec, self._open())

    def _box(self, spec: BoxSpec, shared: Shared) -> E2BSandbox:
        from sandboxes.e2b_sandbox import E2BSandbox

        box = E2BSandbox(
            replace(spec, network=self._network(spec)),
            self._reach(spec),
            shared,
            access=self._access,
            reach_by=lambda now: self._reach(spec, now),
        )
        self._made.add(box)
        return box

    async def attach(self, sandbox_id: str) -> Sandbox:
        from sandboxes.e2b_sandbox import GATEWAY
        from sandboxes.e2b_setup import read_spec

        shared = self._open()
        about = await shared.service.info(sandbox_id)
        mark = read_mark(about)
        if mark is None:
            raise SandboxError(f"E2B sandbox {sandbox_id} was not made by harness-trainer")
        try:
            owned = await asyncio.to_thread(adopt, mark.registry, mark.claim_id)
        except LifecycleError as e:
            raise SandboxError(f"E2B sandbox {sandbox_id} cannot be taken over: {e}") from e
        shared.claim_ids.add(owned.id)  # ours to end from here on, at the latest when the backend closes
        sandbox = await shared.service.connect(sandbox_id, shared.look_s + 300)
        spec = await read_spec(sandbox_id, lambda path: sandbox.files.read(path, user="root"))
        box = self._box(spec, shared)
        try:
            await box.take_over(sandbox, owned, about.get(GATEWAY) or None)
        except BaseException:
            await box.stop()
            raise
        return box

"""Sandboxes in a Docker engine, through the official SDK.

Owns the settings and what a run's sandboxes share: the connection, threads for it (the SDK blocks), images, the
network, and what the engine can limit. One sandbox is `docker_sandbox`'s. Opened by `open_backend`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from sandboxes.base import (
    Access,
    BoxSpec,
    Limits,
    Network,
    NetworkMode,
    SandboxError,
    SandboxGone,
    Traits,
)

if TYPE_CHECKING:
    import docker

    from sandboxes.docker_images import Images
    from sandboxes.docker_network import DockerNetwork
    from sandboxes.docker_sandbox import DockerSandbox, ImageFacts

log = logging.getLogger(__name__)

_NUM_CALLS = 16  # at the same time
_NUM_STREAMS = 1024  # commands running at the same time; threads are made when needed
_CALL_S = 120.0
_QUOTA_DRIVERS = ("btrfs", "zfs")  # storage drivers that hold a size per container; others need a prepared disk
_LIMITS = frozenset({"cpus", "cpu_s", "memory_mb", "file_mb", "processes", "deadline_s"})


class DockerConfig(BaseModel):
    """Settings of the Docker sandbox. What a task asks for in its task.toml wins over `image` and `limits`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["docker"] = "docker"
    host: str | None = Field(None, description="the engine's address; None = $DOCKER_HOST, else Docker's default")
    image: str = Field("python:3.12-slim", description="for tasks that bring neither image nor Dockerfile")
    relay_base: str = Field("python:3.12-slim", description="base of the relay's image: anything with a python3")
    network: NetworkMode | None = Field(None, description="for every task; None = the task's own, else proxy-only")
    limits: Limits = Limits(memory_mb=4096, processes=512)
    max_creating: int = Field(4, ge=1, description="containers created at the same time")
    spare_relays: int = Field(4, ge=0, description="relays of sandboxes to come, started ahead; 0 = each with its own")


class DockerBackend:
    """See `sandboxes.base.Backend`."""

    images: Images
    network: DockerNetwork
    api: docker.APIClient

    def __init__(self, config: DockerConfig, *, run_id: str, registry: Path, access: Access) -> None:
        from sandboxes.docker_labels import engine_address

        self.run_id, self.registry = run_id, registry
        self.address = engine_address(config.host)
        self.default_image = config.image
        self.calls = ThreadPoolExecutor(_NUM_CALLS, "docker")
        self.streams = ThreadPoolExecutor(_NUM_STREAMS, "docker-exec")
        self.creating = asyncio.Semaphore(config.max_creating)
        self._config = config
        self._access = access
        self._limits = _LIMITS
        self._facts: dict[str, ImageFacts] = {}
        self._sandboxes: set[DockerSandbox] = set()
        self._stack = contextlib.AsyncExitStack()
        self._open = False

    @property
    def traits(self) -> Traits:
        from sandboxes.docker_sandbox import is_local

        mounts = is_local(self.address)
        return Traits(True, users=True, mounts=mounts, networks=frozenset(NetworkMode), limits=self._limits)

    async def __aenter__(self) -> Self:
        from sandboxes.docker_images import Images
        from sandboxes.docker_network import DockerNetwork

        loop = asyncio.get_running_loop()
        self._stack.callback(self.streams.shutdown, wait=False)
        self._stack.callback(self.calls.shutdown, wait=False)
        try:
            await loop.run_in_executor(self.calls, self._connect)
            await loop.run_in_executor(self.calls, self._sweep)
            self._stack.callback(self.api.close)
            self.images = Images(self.address, registry=self.registry, run_id=self.run_id)
            self._stack.push_async_callback(self.images.close)
            self.network = await self._stack.enter_async_context(
                DockerNetwork(
                    self.api,
                    address=self.address,
                    run_id=self.run_id,
                    registry=self.registry,
                    access=self._access,
                    images=self.images,
                    relay_base=self._config.relay_base,
                    executor=self.calls,
                    spare_relays=self._config.spare_relays,
                )
            )
            self._stack.push_async_callback(self._stop_all)
        except BaseException:
            await self._stack.aclose()
            raise
        self._open = True
        return self

    def _connect(self) -> None:
        from sandboxes.docker_api import ENGINE_ERRORS, connect, reason

        try:
            self.api = connect(self.address, timeout_s=_CALL_S, connections=_NUM_CALLS + 64)
            info = self.api.info()
        except ENGINE_ERRORS as e:
            raise SandboxError(
                f"no Docker engine answers at {self.address} ({reason(e)}); start one, or name another in DOCKER_HOST"
            ) from e
        if info.get("OSType") != "linux":
            raise SandboxError(f"the Docker engine at {self.address} runs {info.get('OSType')} containers, not linux")
        if info.get("Driver") in _QUOTA_DRIVERS:
            self._limits |= {"disk_mb"}

    def _sweep(self) -> None:
        """What `reap` cannot know of, because its record is lost."""
        from sandboxes.docker_reaping import sweep
        from sandboxes.processes import LifecycleError

        try:
            for claim_id, ended in sweep(self.address).items():
                what = ", ".join(map(str, ended.things))
                log.warning("removed what %s left in the engine: %s %s", claim_id, what, ended.problem)
        except LifecycleError as e:
            log.warning("left-overs of dead runs were not looked for: %s", e)

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        try:
            await asyncio.shield(asyncio.ensure_future(self._stack.aclose()))
        except SandboxError as e:
            log.warning("%s; it stays on record for the next start", e)

    async def _stop_all(self) -> None:
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._sandboxes)))

    # --- sandboxes ---

    def check(self, spec: BoxSpec) -> None:
        self._opened()
        for field in dataclasses.fields(Limits):
            value = getattr(spec.limits, field.name)
            if value is not None and field.name not in self._limits:
                raise SandboxError(
                    f"the Docker engine at {self.address} cannot limit {field.name} ({spec.name} asks for {value}): "
                    "its storage driver keeps no quotas; leave the limit out or use another engine"
                )
        for mount in spec.mounts:
            if not mount.source.is_dir():
                raise SandboxError(f"cannot mount {mount.source} in the sandbox of {spec.name}: no such folder")
        self.network.check(self._effective(spec).network)

    async def prepare(self, spec: BoxSpec) -> None:
        self._opened()
        effective = self._effective(spec)
        await self.facts(await self.images.ensure(effective, self.default_image))
        await self.network.prepare(effective.network)
        self.network.order_spare(effective.network, first=True)

    def sandbox(self, spec: BoxSpec) -> DockerSandbox:
        self._opened()
        self.check(spec)
        return self._made(self._effective(spec))

    def _made(self, spec: BoxSpec) -> DockerSandbox:
        from sandboxes.docker_images import default_cache
        from sandboxes.docker_sandbox import DockerSandbox

        made = DockerSandbox(self, spec, log_dir=default_cache() / "logs")
        self._sandboxes.add(made)
        return made

    async def attach(self, sandbox_id: str) -> DockerSandbox:
        from sandboxes.docker_api import ENGINE_ERRORS, is_absent, reason
        from sandboxes.docker_labels import read_mark
        from sandboxes.docker_sandbox import BOX
        from sandboxes.ownership import adopt
        from sandboxes.processes import LifecycleError

        self._opened()
        loop = asyncio.get_running_loop()
        try:
            seen = await loop.run_in_executor(self.calls, self.api.inspect_container, sandbox_id)
        except ENGINE_ERRORS as e:
            if is_absent(e):
                raise SandboxGone(f"there is no sandbox {sandbox_id} at {self.address}") from e
            raise SandboxError(f"the Docker engine at {self.address} failed ({reason(e)})") from e
        labels = seen["Config"]["Labels"] or {}
        mark = read_mark(labels)
        if mark is None or BOX not in labels:
            raise SandboxGone(f"the container {sandbox_id} is no sandbox of ours")
        try:
            owned = await loop.run_in_executor(self.calls, adopt, mark.registry, mark.claim_id)
        except LifecycleError as e:
            raise SandboxError(f"the sandbox {sandbox_id} cannot be taken over: {e}") from e
        box = json.loads(labels[BOX])
        spec = BoxSpec(
            name=box["name"],
            image=seen["Image"],
            env=dict(_split(line) for line in seen["Config"]["Env"] or []),
            user=box["user"],
            workdir=box["workdir"],
            limits=Limits(deadline_s=box["deadline_s"]),
            network=Network(NetworkMode(box["network"]), tuple(box["allow"])),
        )
        made = self._made(spec)
        try:
            await made.take_over(owned)
        except BaseException:
            await made.stop()
            raise
        return made

    def forget(self, sandbox: DockerSandbox) -> None:
        """It is gone; called by the sandbox itself."""
        self._sandboxes.discard(sandbox)

    async def facts(self, image: str) -> ImageFacts:
        """What the image says about itself. Raises SandboxError."""
        from sandboxes.docker_api import ENGINE_ERRORS, reason
        from sandboxes.docker_sandbox import ImageFacts

        if image not in self._facts:
            try:
                seen = await asyncio.get_running_loop().run_in_executor(self.calls, self.api.inspect_image, image)
            except ENGINE_ERRORS as e:
                self.images.forget(image)
                raise SandboxError(f"the image {image} cannot be used: {reason(e)}") from e
            config = seen.get("Config") or {}
            self._facts[image] = ImageFacts(
                user=config.get("User") or "",
                workdir=config.get("WorkingDir") or "",
                entrypoint=tuple(config.get("Entrypoint") or ()),
                has_home=any(line.startswith("HOME=") for line in config.get("Env") or []),
            )
        return self._facts[image]

    def _opened(self) -> None:
        if not self._open:
            raise SandboxError("the Docker backend is not open; use it in `async with`")

    def _effective(self, spec: BoxSpec) -> BoxSpec:
        """The spec with what it leaves open filled in from the settings."""
        given = {f.name: getattr(spec.limits, f.name) for f in dataclasses.fields(Limits)}
        limits = dataclasses.replace(self._config.limits, **{name: v for name, v in given.items() if v is not None})
        network = spec.network
        if self._config.network is not None:
            keeps_list = self._config.network is NetworkMode.ALLOWLIST
            network = Network(self._config.network, network.allow if keeps_list else ())
        return dataclasses.replace(spec, limits=limits, network=network)


def _split(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name, value

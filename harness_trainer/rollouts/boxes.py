"""What a rollout's sandbox is made of: the task's own wishes, plus the agent that is to run in it.

Owns where a harness's programs lie inside a sandbox, and the values of its placeholders. How sandboxes are made is
`sandboxes`'; when, its pool's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from capture_proxy.intercept.environment import agent_env
from capture_proxy.types import Session
from harness_trainer.errors import SetupError, TaskError
from harness_trainer.harnesses import base as harness_base
from harness_trainer.harnesses.base import Harness, NpmInstall, PipInstall
from harness_trainer.harnesses.install import python_folders
from harness_trainer.rollouts.budget import Limits
from harness_trainer.rollouts.config import RunnerSpec
from harness_trainer.tasks import Task, resolve_box
from sandboxes import SandboxConfig, open_backend
from sandboxes.base import (
    Access,
    Backend,
    BoxSpec,
    Endpoint,
    Mount,
    Network,
    NetworkMode,
    Proxy,
    Sandbox,
    SandboxError,
)

CA_FILE, CA_BUNDLE_FILE = "ca.pem", "ca-bundle.pem"  # in the certificate folder of an interception proxy
_AGENTS = Path(harness_base.__file__).parent / "agents"
_INSIDE = "/opt/harness-trainer"  # where a sandbox with a root of its own has the agents
DEADLINE_SLACK_S = 300.0  # the sandbox's own end comes only when ours did not


@dataclass(frozen=True)
class Boxes:
    """Example: `Boxes(spec, harness, access).spec_of(task)` is the BoxSpec of every rollout of that task."""

    spec: RunnerSpec
    harness: Harness
    access: Access  # with the proxies that the run has started
    _known: dict[str, BoxSpec] = field(default_factory=dict, repr=False)  # by task name

    @cached_property
    def _shares_our_files(self) -> bool:
        # The local sandbox shows this machine's own files at their own paths, isolated or not; all others have a root
        # of their own.
        return self.spec.sandbox.type == "local"

    def spec_of(self, task: Task) -> BoxSpec:
        """The same for every rollout of the task, so that they share an image and warm sandboxes."""
        if task.name not in self._known:
            self._known[task.name] = self._made(task)
        return self._known[task.name]

    def _made(self, task: Task) -> BoxSpec:
        box = resolve_box(task)
        total_s = Limits.of(self.spec.config, task).total_s + DEADLINE_SLACK_S
        own_s = box.limits.deadline_s
        limits = replace(box.limits, deadline_s=total_s if own_s is None else min(own_s, total_s))
        proxy = self._proxy_of(task)
        certificates = (
            () if proxy is None or proxy.ca_dir is None else (Mount(proxy.ca_dir, self._inside(proxy.ca_dir)),)
        )
        mounts = (*box.mounts, *self._mounts, *certificates)
        return replace(box, limits=limits, mounts=mounts, network=network_of(task, self.harness))

    def check(self, task: Task, backend: Backend) -> None:
        """Raises TaskError when the backend cannot give the task what it asks for."""
        _check(task, self.spec_of(task), backend, self.spec.sandbox)
        if self.harness.needs_intercept and self._proxy_of(task) is None:
            raise TaskError(
                f"task {task.name!r} has network mode {task.box.network.mode}, in which {self.harness.name} cannot be "
                "intercepted: use mode proxy-only or allowlist, or set rollouts.entry to base_url"
            )
        if self.harness.harbor is not None and not backend.traits.boundary:
            raise TaskError(
                f"task {task.name!r}: {self.harness.name} needs a sandbox with a root of its own, because Harbor's "
                "agents write to /logs and /tmp: install bubblewrap, or use docker"
            )

    def _proxy_of(self, task: Task) -> Proxy | None:
        network = network_of(task, self.harness)
        return self.access.proxy_for(network) if network.mode is NetworkMode.ALLOWLIST else None

    def _inside(self, folder: Path) -> str:
        """Where a mounted folder of ours is inside."""
        return str(folder) if self._shares_our_files else f"{_INSIDE}/{folder.name}"

    @cached_property
    def _mounts(self) -> tuple[Mount, ...]:
        folders: list[Path] = []
        in_place: tuple[Mount, ...] = ()  # its programs name their interpreter by path
        install = self.harness.install
        if isinstance(install, PipInstall):
            in_place = tuple(Mount(folder, str(folder)) for folder in python_folders(self.spec.harness_bin))
        elif install is not None:
            folders.append(self.spec.harness_bin.parent)
        if self._uses("agents"):
            folders.append(_AGENTS)
        return (*in_place, *(Mount(folder, self._inside(folder)) for folder in folders))

    def _uses(self, placeholder: str) -> bool:
        return f"${{{placeholder}}}" in json.dumps(self.harness.model_dump(mode="json"))

    def values(self, task: Task, session: Session, sandbox: Sandbox) -> dict[str, str | int]:
        """What `harnesses.base.PLACEHOLDERS` stand for. Raises SandboxError when the gateway cannot be reached."""
        if sandbox.gateway_url is None:
            raise SandboxError("the sandbox cannot reach the capture gateway, so no agent can work in it")
        programs, in_npm = self.spec.harness_bin, isinstance(self.harness.install, NpmInstall)
        return {
            "instruction": task.instruction,
            "base_url": sandbox.gateway_url,
            "token": session.token,
            "model": self.spec.model,
            "context": self.spec.context,
            "max_tokens": self.spec.config.max_tokens,
            "max_turns": self.spec.config.max_turns,
            "app": sandbox.resolve(sandbox.workdir),
            "home": sandbox.resolve("/home"),
            "bin": f"{self._inside(programs.parent)}/{programs.name}" if in_npm else str(programs),
            "python": "python3",
            "agents": self._inside(_AGENTS),
        }

    def network_env(self, task: Task, session: Session, sandbox: Sandbox) -> dict[str, str]:
        """Variables that lead the agent to the task's interception proxy; {} when it has none."""
        proxy = self._proxy_of(task)
        if proxy is None or proxy.ca_dir is None or sandbox.proxy_url is None:
            return {}
        folder = self._inside(proxy.ca_dir)
        return agent_env(sandbox.proxy_url, session.token, f"{folder}/{CA_FILE}", f"{folder}/{CA_BUNDLE_FILE}")


def network_of(task: Task, harness: Harness) -> Network:
    """What the task's sandbox reaches: the interception proxy as well, with no host allowed, if the agent needs it."""
    network = task.box.network
    if harness.needs_intercept and network.mode is NetworkMode.PROXY_ONLY:
        return Network(NetworkMode.ALLOWLIST)
    return network


async def check_tasks(tasks: Sequence[Task], config: SandboxConfig, *, run_id: str, registry: Path) -> None:
    """Before anything slow is started: whether sandboxes can be had here, and such as the tasks ask for.

    Raises TaskError, and SetupError when there is no engine, no key or the like.
    """
    nowhere = Endpoint(url="http://127.0.0.1:9", public_url="http://127.0.0.1:9")
    lists = {task.box.network for task in tasks if task.box.network.mode is NetworkMode.ALLOWLIST}
    access = Access(gateway=nowhere, proxies=tuple(Proxy(nowhere, network.allow) for network in lists))
    try:
        async with open_backend(config, run_id=run_id, registry=registry, access=access) as backend:
            for task in tasks:
                _check(task, resolve_box(task), backend, config)
    except SandboxError as error:
        raise SetupError(f"no {config.type} sandboxes here: {error}") from error


def _check(task: Task, box: BoxSpec, backend: Backend, config: SandboxConfig) -> None:
    try:
        if box.network.mode is NetworkMode.NONE and getattr(config, "network", None) is None:
            raise SandboxError(
                "network mode `none` cuts the agent off from the model too; `proxy-only` lets it reach nothing else"
            )
        backend.check(box)
    except SandboxError as error:
        raise TaskError(f"task {task.name!r} cannot run in a {config.type} sandbox: {error}") from error

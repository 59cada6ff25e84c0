"""What one local sandbox is to be, put together from the task's wishes and the run's settings.

Data only, without pydantic, since it is written to disk for whoever takes a sandbox over. Made by `local`, obeyed by
`local_box`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sandboxes.base import Healthcheck, Limits, Mount, NetworkMode
from sandboxes.relay import Target

_KEPT = "plan.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """Example: Plan("fix-bug", "/app", {}, Limits(memory_mb=2048), NetworkMode.PROXY_ONLY, sealed=True)."""

    name: str  # of the task
    workdir: str
    env: Mapping[str, str]
    limits: Limits
    network: NetworkMode
    sealed: bool  # by bubblewrap
    allow: tuple[str, ...] = ()  # hosts, as in `Network.allow`
    mounts: tuple[Mount, ...] = ()
    # Of its beginning only, and not kept:
    workspace: Path | None = None  # a folder of the task whose files are put into `workdir`, without its Dockerfile
    healthcheck: Healthcheck | None = None

    def dump(self) -> dict[str, Any]:
        """For JSON; `load` is its inverse."""
        mounts = [[str(mount.source), mount.target] for mount in self.mounts]
        return {**asdict(self), "mounts": mounts, "workspace": None, "healthcheck": None}

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Plan:
        mounts = tuple(Mount(Path(source), target) for source, target in data["mounts"])
        network, limits = NetworkMode(data["network"]), Limits(**data["limits"])
        allow = tuple(data["allow"])
        return cls(**{**data, "limits": limits, "mounts": mounts, "network": network, "allow": allow})

    @property
    def shares_network(self) -> bool:
        """Whether processes have this machine's network."""
        return not self.sealed or self.network is NetworkMode.PUBLIC


@dataclass(frozen=True, slots=True)
class Kept:
    """What another process needs to go on with a sandbox; lies in its control folder."""

    plan: Plan
    uid: int | None  # of a sealed sandbox's processes; None = the owner's
    ends_at: float | None  # its deadline, in seconds of CLOCK_MONOTONIC

    def write(self, control: Path) -> None:
        data = {"plan": self.plan.dump(), "uid": self.uid, "ends_at": self.ends_at}
        temp = control / f".{_KEPT}.tmp"
        temp.write_text(json.dumps(data))
        temp.replace(control / _KEPT)

    @classmethod
    def read(cls, control: Path) -> Kept | None:
        """None when there is none, or none that can be read."""
        try:
            data = json.loads((control / _KEPT).read_text())
            return cls(Plan.load(data["plan"]), data["uid"], data["ends_at"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Service:
    """A service of this machine. Example: Service("http://127.0.0.1:8101", ("127.0.0.1", 8101))."""

    url: str | None  # as this machine reaches it
    target: Target  # where a relay connects to


@dataclass(frozen=True, slots=True)
class Services:
    """What a sandbox is led to; None = there is no such service."""

    gateway: Service | None = None
    proxy: Service | None = None

    def relayed(self, plan: Plan) -> dict[str, Service]:
        """Those that a sealed sandbox reaches at a port of its own loopback, by name."""
        if plan.shares_network or plan.network is NetworkMode.NONE:
            return {}
        named = {"gateway": self.gateway, "proxy": self.proxy if plan.network is NetworkMode.ALLOWLIST else None}
        return {name: service for name, service in named.items() if service is not None}

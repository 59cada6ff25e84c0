"""Which nodes of a Ray cluster take rollouts, and how many each at once. Pure; asked by `members`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RESOURCE = "rollouts"  # the custom resource with which a node is started: `ray start --resources='{"rollouts": 16}'`


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One living node. Example: NodeInfo("4bf714..", "10.0.0.3", {"CPU": 16.0, "rollouts": 8.0})."""

    node_id: str
    address: str
    resources: Mapping[str, float]

    @property
    def name(self) -> str:
        """For people; nodes may share an address."""
        return f"{self.address} ({self.node_id[:8]})"

    @property
    def declared(self) -> int | None:
        """Its own limit, by the resource; None = it was started without."""
        return int(self.resources[RESOURCE]) if RESOURCE in self.resources else None

    def capacity(self, per_node: int | None, max_concurrent: int) -> int:
        """Rollouts at once; 0 = it takes none: it has neither the resource nor a CPU (a head kept free)."""
        if self.declared is not None:
            return self.declared
        if self.resources.get("CPU", 0.0) <= 0:
            return 0
        return max_concurrent if per_node is None else per_node


NO_NODES = (
    "no node of the Ray cluster takes rollouts: start one with `ray start --address=HEAD:6379 "
    "--resources='{\"rollouts\": 16}'`, or give a node CPUs (this one may have been started with --num-cpus=0)"
)

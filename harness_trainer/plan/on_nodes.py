"""How many rollouts the nodes of a run's Ray cluster take at a time, for `rollouts.executor: ray`.

Owns that count and the words for it. The cluster is asked as the run itself asks it (`precheck`); one that is not there
yet is no reason against planning. Called by `cli.plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness_trainer.config import RunConfig
from harness_trainer.errors import SetupError
from harness_trainer.rollouts.on_ray.config import RayConfig
from harness_trainer.rollouts.on_ray.nodes import NodeInfo
from harness_trainer.rollouts.on_ray.precheck import ask_nodes, summary


@dataclass(frozen=True, slots=True)
class OnNodes:
    """Example: OnNodes(32, "2 of the Ray cluster's 3 nodes take rollouts, 32 at a time in all")."""

    places: int | None  # None = not known
    line: str


def on_nodes(config: RunConfig, ask: Callable[[RayConfig], list[NodeInfo]] = ask_nodes) -> OnNodes | None:
    """Blocking, for some seconds; None = no rollouts of this run are on nodes."""
    rollouts, own = config.rollouts, [source.env.type == "own" for source in config.each_source]
    if rollouts.executor != "ray" or not any(own):
        return None
    try:
        nodes = ask(rollouts.ray)
        line = summary(nodes, rollouts.ray, rollouts.max_concurrent)
    except SetupError as error:
        return OnNodes(None, f"not counted, so as if they took rollouts.max_concurrent together: {error}")
    if not all(own):
        return OnNodes(None, f"{line}; no bound here, since other sources of the run need none")
    each = [node.capacity(rollouts.ray.per_node, rollouts.max_concurrent) for node in nodes]
    return OnNodes(sum(min(places, rollouts.max_running or places) for places in each), line)

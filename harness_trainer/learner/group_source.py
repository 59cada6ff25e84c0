"""The contract between rollouts and the learner: where finished groups come from, and what became of them.

Owns two names and no behaviour. The rollout side implements `GroupSource` (over its store); `feeder` calls it, and
`trl_compat` for a checkpoint's position. All methods are called from the learner's thread; none may block longer than
it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from harness_trainer.learner.rows import Row
from harness_trainer.rollouts.lineage import Lineage
from harness_trainer.rollouts.types import RolloutResult


@dataclass(slots=True)
class TrainGroup:
    """All rollouts of one task that share a baseline, finished. Example: TrainGroup(7, "x", [r0, r1], [[row], []])."""

    group_id: int
    task: str
    results: list[RolloutResult]
    rows: list[list[Row]]  # of each result, in the same order; [] = nothing of it may be trained


class GroupSource(Protocol):
    """Delivers each finished group once, and is told what became of it."""

    def start(self) -> None:
        """Begin producing. Called once, after the first weights were published."""
        ...

    def stop(self) -> None:
        """Stop producing and release what is held. Called on every end of training; idempotent."""
        ...

    def next_group(self, timeout_s: float) -> TrainGroup | None:
        """The next finished group, or None if none is ready within `timeout_s` seconds."""
        ...

    def on_trained(self, group_ids: Sequence[int], step: int) -> None:
        """The optimizer has taken step number `step` (from 1) on exactly these groups."""
        ...

    def on_dropped(self, group_id: int, reason: str) -> None:
        """The group will never be trained. `reason` is one of `feeder.DropReason`."""
        ...

    def policy_changed(self, version: int) -> None:
        """The engine now samples with policy `version`; it reports it as the string f"v{version}"."""
        ...

    def lineage(self) -> Lineage:
        """How the policies of the run descend from each other, the current one included."""
        ...

    def position(self) -> tuple[int, dict[str, int]]:
        """For a checkpoint: the first group id that was not opened yet, and the number of groups by state."""
        ...

    def check_health(self) -> None:
        """Raise TrainingFailed if no group can come any more. Called while the learner waits."""
        ...

"""Turns finished groups into step batches: drops, staleness, waiting with health checks.

Owns which groups a step is made of and why a group is not trained; `step_batch` makes samples of them. Free of torch
and TRL: `trl_compat` packs the samples into tensors and pulls one `StepBatch` per optimizer step. The same object plays
TRL's rollout worker (start, stop, update_model_version, check_health and two queues that stay empty, because whole
groups do not fit in a queue of samples).
"""

from __future__ import annotations

import enum
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.group_source import GroupSource, TrainGroup
from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.learner.step_batch import (
    StepBatch,
    build_step,
    has_signal,
    has_spread,
    rewards_of,
    row_age,
    trained_rows,
)
from harness_trainer.rollouts.lineage import Lineage


class DropReason(enum.StrEnum):
    """Why a group is never trained. It is dropped whole: a part of a group has another baseline."""

    TOO_FEW_REWARDS = "too_few_rewards"  # fewer than two rollouts could be scored
    NO_SPREAD = "no_spread"  # all rewards equal: nothing to prefer
    NO_TRAINABLE_ROWS = "no_trainable_rows"  # no scored rollout has a token that may be trained
    OVER_TOKEN_BUDGET = "over_token_budget"  # one row alone exceeds the budget of a micro-batch
    STALE = "stale"  # its oldest trained token was sampled more than `max_staleness` optimizer steps away


@dataclass(frozen=True, slots=True)
class FeederOptions:
    """How groups become steps; the fields are those of `LearnerConfig` of the same names."""

    groups_per_step: int
    token_budget: int  # unique tokens of one micro-batch
    max_staleness: int  # optimizer steps; 0 = only what the current policy sampled
    max_dropped_in_a_row: int = 256  # groups dropped since the last trained one before the run is given up
    poll_s: float = 1.0  # longest wait between two health checks
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)


class GroupFeeder:
    """One source, one trainer, one thread. `next_step` blocks until a step is complete or the source is dead."""

    def __init__(self, source: GroupSource, options: FeederOptions) -> None:
        self.source = source
        self.options = options
        self.version = 0  # the policy that the engine samples with
        self._lineage = Lineage()
        self.wait_s = 0.0  # TRL reads and resets this once per step
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.while_waiting: Callable[[], None] = lambda: None  # called between two looks for a group
        self._dropped: Counter[str] = Counter()
        self._dropped_in_a_row: Counter[str] = Counter()

    # What TRL's trainer calls.

    def start(self) -> None:
        self.source.start()

    def stop(self) -> None:
        self.source.stop()

    def update_model_version(self, model_version: int) -> None:
        self.version = model_version
        self.source.policy_changed(model_version)
        self._lineage = self.source.lineage()  # whatever is sampled from now on is by versions that it knows

    def check_health(self, stale_after_s: float = 0.0) -> None:
        """`stale_after_s` is TRL's; the source knows better how long a rollout may take."""
        self.source.check_health()

    # What our trainer calls.

    def next_step(self) -> StepBatch:
        """The next `groups_per_step` trainable groups.

        Raises TrainingFailed when the source reports that none will come, when too many groups in a row had to be
        dropped, or when a reward is not a finite number (with the rollout's id).
        """
        started_at, waited_s = time.monotonic(), self.wait_s
        while True:
            groups = self._gather()
            batch = build_step(groups, self._age, self.options.objective)
            if batch.has_signal:
                break
            for group in groups:  # each differed from nothing in the step, which only a global baseline can show
                self._drop(group, DropReason.NO_SPREAD)
        self._dropped_in_a_row.clear()
        batch.dropped, self._dropped = self._dropped, Counter()
        batch.started_at, batch.wait_s = started_at, self.wait_s - waited_s
        return batch

    def _gather(self) -> list[TrainGroup]:
        groups: list[TrainGroup] = []
        while len(groups) < self.options.groups_per_step:
            group = self._wait_for_group()
            reason = self._why_not(group)
            if reason is not None:
                self._drop(group, reason)
                continue
            groups.append(group)
            if self.options.objective.advantage != "global":
                self._dropped_in_a_row.clear()
        return groups

    def _wait_for_group(self) -> TrainGroup:
        started = time.monotonic()
        while True:
            self.while_waiting()
            # Before each wait, so that a source that died with groups still queued ends the run at once.
            self.source.check_health()
            group = self.source.next_group(self.options.poll_s)
            if group is not None:
                self.wait_s += time.monotonic() - started
                return group

    def _why_not(self, group: TrainGroup) -> DropReason | None:
        """Why the group cannot be trained; None = it can."""
        objective = self.options.objective
        if sum(reward is not None for reward in rewards_of(group, objective)) < 2:
            return DropReason.TOO_FEW_REWARDS
        if objective.advantage != "global" and not has_spread(group, objective):
            return DropReason.NO_SPREAD
        rows = [row for rows in trained_rows(group, objective) for row in rows]
        if not rows or (objective.advantage != "global" and not has_signal(group, objective)):
            return DropReason.NO_TRAINABLE_ROWS
        if max(len(row.ids_N) for row in rows) > self.options.token_budget:
            return DropReason.OVER_TOKEN_BUDGET
        if max(row_age(row, self._age) for row in rows) > self.options.max_staleness:
            return DropReason.STALE
        return None

    def _age(self, sampled: int) -> int:
        """Optimizer steps between the policy `sampled` and the current one."""
        return self._lineage.distance(sampled, self.version)

    def _drop(self, group: TrainGroup, reason: DropReason) -> None:
        self._dropped[reason] += 1
        self._dropped_in_a_row[reason] += 1
        self.source.on_dropped(group.group_id, reason)
        if self._dropped_in_a_row.total() >= self.options.max_dropped_in_a_row:
            raise TrainingFailed(
                f"{self._dropped_in_a_row.total()} groups in a row could not be trained"
                f" ({describe_counts(self._dropped_in_a_row)}; last task: {group.task}). {_ADVICE[reason]}"
            )


_ADVICE = {
    DropReason.TOO_FEW_REWARDS: "Look at the rollouts' outcomes: most of them could not be scored.",
    DropReason.NO_SPREAD: "Use easier tasks, graded rewards, more rollouts per group or a higher temperature.",
    DropReason.NO_TRAINABLE_ROWS: "Look at the rollouts' findings: nothing of what they captured may be trained.",
    DropReason.OVER_TOKEN_BUDGET: "Raise token_budget to at least the engine's context length.",
    DropReason.STALE: "Raise max_staleness, or keep fewer rollouts in flight.",
}


def describe_counts(counts: Iterable[tuple[str, int]] | Counter[str]) -> str:
    """ "no_spread 3, stale 1": most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in Counter(dict(counts)).most_common())

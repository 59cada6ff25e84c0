"""Turns finished groups into step batches: advantages, drops, staleness, waiting with health checks.

Owns which groups a step is made of and why a group is not trained. Free of torch and TRL: `trl_compat` packs the
samples into tensors and pulls one `StepBatch` per optimizer step. The same object plays TRL's rollout worker (start,
stop, update_model_version, check_health and two queues that stay empty, because whole groups do not fit in a queue of
samples).
"""

from __future__ import annotations

import enum
import queue
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.advantages import group_advantages
from harness_trainer.learner.group_source import GroupSource, TrainGroup
from harness_trainer.learner.rows import Row
from harness_trainer.rollouts.types import RolloutResult


class DropReason(enum.StrEnum):
    """Why a group is never trained. It is dropped whole: a part of a group has another baseline."""

    TOO_FEW_REWARDS = "too_few_rewards"  # fewer than two rollouts could be scored
    NO_SPREAD = "no_spread"  # all rewards equal: nothing to prefer
    NO_TRAINABLE_ROWS = "no_trainable_rows"  # no scored rollout has a token that may be trained
    OVER_TOKEN_BUDGET = "over_token_budget"  # one row alone exceeds the budget of a micro-batch
    STALE = "stale"  # its oldest trained token was sampled more than `max_staleness` versions ago


@dataclass(slots=True)
class StepBatch:
    """Everything one optimizer step trains on.

    `samples` are dicts in the shape of TRL's queued samples: input_ids (N, int64), completion_mask (N, int64),
    old_log_probs (N, float32, nats), advantage (float), group_id (int), metrics (dict).
    """

    groups: list[TrainGroup]
    samples: list[dict[str, Any]]
    rewards: list[float]  # of every scored rollout in the groups, one each
    staleness: list[int]  # of every row: current version minus the oldest version that sampled a trained token
    dropped: Counter[str] = field(default_factory=Counter)  # groups dropped since the step before, by reason
    named_rewards: dict[str, list[float]] = field(default_factory=dict)  # of the same rollouts, by the tests' names
    wait_s: float = 0.0  # seconds spent waiting for groups
    started_at: float = field(default_factory=time.monotonic)  # monotonic seconds: the wait began

    @property
    def group_ids(self) -> list[int]:
        return [group.group_id for group in self.groups]

    @property
    def num_trained_tokens(self) -> int:
        # A token at position 0 has no predecessor to be predicted from; `rows` never masks it in.
        return sum(int(sample["completion_mask"][1:].sum()) for sample in self.samples)

    def by_harness(self) -> dict[str, dict[str, float | int | None]]:
        """What the step's groups came to, agent by agent. Example: {"pi": {"num_groups": 1, "reward_mean": 0.5}}."""
        results: dict[str, list[RolloutResult]] = {}
        for group in self.groups:
            for result in group.results:
                results.setdefault(result.harness, []).append(result)
        return {name: _summed_up(of_agent) for name, of_agent in sorted(results.items())}

    @property
    def reward_mean(self) -> float | None:
        return statistics.fmean(self.rewards) if self.rewards else None

    @property
    def reward_std(self) -> float | None:
        """Population standard deviation over the rollouts of the step."""
        return statistics.pstdev(self.rewards) if self.rewards else None


def _summed_up(results: list[RolloutResult]) -> dict[str, float | int | None]:
    rewards = [result.reward for result in results if result.reward is not None]
    return {
        "num_groups": len({result.group_id for result in results}),
        "num_rollouts": len(rewards),  # scored ones, as in the step's own report
        "num_turns": sum(result.num_turns for result in results),
        "reward_mean": statistics.fmean(rewards) if rewards else None,
        "reward_std": statistics.pstdev(rewards) if rewards else None,
    }


@dataclass(frozen=True, slots=True)
class FeederOptions:
    """How groups become steps; the fields are those of `LearnerConfig` of the same names."""

    groups_per_step: int
    token_budget: int  # unique tokens of one micro-batch
    max_staleness: int  # versions; 0 = only what the current policy sampled
    advantage_scale: Literal["std", "none"] = "std"
    max_dropped_in_a_row: int = 256  # groups dropped since the last trained one before the run is given up
    poll_s: float = 1.0  # longest wait between two health checks


class GroupFeeder:
    """One source, one trainer, one thread. `next_step` blocks until a step is complete or the source is dead."""

    def __init__(self, source: GroupSource, options: FeederOptions) -> None:
        self.source = source
        self.options = options
        self.version = 0  # the policy that the engine samples with
        self.wait_s = 0.0  # TRL reads and resets this once per step
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
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

    def check_health(self, stale_after_s: float = 0.0) -> None:
        """`stale_after_s` is TRL's; the source knows better how long a rollout may take."""
        self.source.check_health()

    # What our trainer calls.

    def next_step(self) -> StepBatch:
        """The next `groups_per_step` trainable groups.

        Raises TrainingFailed when the source reports that none will come, when too many groups in a row had to be
        dropped, or when a reward is not a finite number (with the rollout's id).
        """
        batch = StepBatch([], [], [], [])
        while len(batch.groups) < self.options.groups_per_step:
            group, waited_s = self._wait_for_group()
            batch.wait_s += waited_s
            self.wait_s += waited_s
            reason = self._take(group, batch)
            if reason is None:
                self._dropped_in_a_row.clear()
            else:
                self._drop(group, reason)
        batch.dropped, self._dropped = self._dropped, Counter()
        return batch

    def _wait_for_group(self) -> tuple[TrainGroup, float]:
        started = time.monotonic()
        while True:
            # Before each wait, so that a source that died with groups still queued ends the run at once.
            self.source.check_health()
            group = self.source.next_group(self.options.poll_s)
            if group is not None:
                return group, time.monotonic() - started

    def _take(self, group: TrainGroup, batch: StepBatch) -> DropReason | None:
        """Add the group to the batch, or say why it cannot be trained."""
        advantages = self._advantages(group)
        known = [advantage for advantage in advantages if advantage is not None]
        if not known:
            return DropReason.TOO_FEW_REWARDS
        if not any(known):
            return DropReason.NO_SPREAD
        pairs = [
            (row, advantage)
            for rows, advantage in zip(group.rows, advantages, strict=True)
            if advantage is not None
            for row in rows
            if row.num_trained > 0
        ]
        if not any(advantage for _, advantage in pairs):
            return DropReason.NO_TRAINABLE_ROWS
        if max(len(row.ids_N) for row, _ in pairs) > self.options.token_budget:
            return DropReason.OVER_TOKEN_BUDGET
        staleness = [self.version - oldest_version(row) for row, _ in pairs]
        if max(staleness) > self.options.max_staleness:
            return DropReason.STALE
        batch.groups.append(group)
        batch.staleness.extend(staleness)
        for result in group.results:
            if result.reward is not None:
                batch.rewards.append(result.reward)
                for name, value in result.rewards.items():
                    batch.named_rewards.setdefault(name, []).append(value)
        batch.samples.extend(_sample(row, advantage, group.group_id) for row, advantage in pairs)
        return None

    def _advantages(self, group: TrainGroup) -> list[float | None]:
        for result in group.results:
            try:
                group_advantages([result.reward])
            except ValueError as error:
                raise TrainingFailed(
                    f"rollout {result.rollout_id} of task {group.task} has the reward {result.reward!r}:"
                    " a verifier must give a finite number or nothing"
                ) from error
        return group_advantages([result.reward for result in group.results], self.options.advantage_scale)

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


def oldest_version(row: Row) -> int:
    """The oldest policy that sampled a trained token of the row (which has at least one)."""
    return min(version for version, trained in zip(row.versions_N, row.mask_N, strict=True) if trained)


def describe_counts(counts: Iterable[tuple[str, int]] | Counter[str]) -> str:
    """ "no_spread 3, stale 1": most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in Counter(dict(counts)).most_common())


def _sample(row: Row, advantage: float, group_id: int) -> dict[str, Any]:
    return {
        "input_ids": np.asarray(row.ids_N, dtype=np.int64),
        "completion_mask": np.asarray(row.mask_N, dtype=np.int64),
        "old_log_probs": np.asarray(row.logprobs_N, dtype=np.float32),
        "advantage": advantage,
        "group_id": group_id,
        "metrics": {},  # rewards are counted per rollout in StepBatch; TRL would average them per row
    }

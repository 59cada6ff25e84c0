"""What one optimizer step trains on: the rows of its groups as samples, every trained token with its advantage.

Owns which rollouts of a group are trained, what their rewards are after penalties, and the advantage of each token.
Pure functions; `feeder` decides which groups make a step and calls them, `trl_compat` packs the samples.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.advantages import Scale, is_finite_number, step_advantages, turn_advantages
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.learner.rows import Row
from harness_trainer.rollouts.types import Outcome, RolloutResult

Age: TypeAlias = Callable[[int], int]  # optimizer steps between a policy version and the current one


@dataclass(slots=True)
class StepBatch:
    """Everything one optimizer step trains on.

    `samples` are dicts in the shape of TRL's queued samples: input_ids (N, int64), completion_mask (N, int64),
    old_log_probs (N, float32, nats), advantage (float, the outcome's), group_id (int), metrics (dict); and ours:
    advantages (N, float64, the outcome's plus the turns'), rollout (int, which of the step's rollouts the row is of).
    """

    groups: list[TrainGroup]
    samples: list[dict[str, Any]]
    rewards: list[float]  # of every scored rollout in the groups, one each
    staleness: list[int]  # of every row: optimizer steps from the policy of its oldest trained token to the current one
    dropped: Counter[str] = field(default_factory=Counter)  # groups dropped since the step before, by reason
    named_rewards: dict[str, list[float]] = field(default_factory=dict)  # of the same rollouts, by the tests' names
    num_masked: int = 0  # rollouts left out of the loss because a limit had cut them
    wait_s: float = 0.0  # seconds spent waiting for groups
    started_at: float = field(default_factory=time.monotonic)  # monotonic seconds: the wait began
    taken_at: float = field(default_factory=time.time)  # Unix seconds: the last of its groups was there

    @property
    def group_ids(self) -> list[int]:
        return [group.group_id for group in self.groups]

    @property
    def has_signal(self) -> bool:
        """Whether some trained token is better or worse than what it is compared with."""
        return any(np.any(sample["advantages"][sample["completion_mask"] == 1]) for sample in self.samples)

    @property
    def is_shaped(self) -> bool:
        """Whether some of it was sampled from less than the whole softmax, as `Row` has it."""
        return any(row.is_shaped for group in self.groups for rows in group.rows for row in rows)

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


def build_step(groups: Sequence[TrainGroup], age: Age, objective: ObjectiveConfig) -> StepBatch:
    """The samples of these groups; each has at least two rewards. `age` is counted from the policy of now."""
    batch = StepBatch(list(groups), [], [], [])
    rewards = [rewards_of(group, objective) for group in groups]
    num_rollouts = 0
    for group, advantages in zip(groups, step_advantages(rewards, objective.advantage), strict=True):
        of_turns = turn_advantages_of(group, objective)
        rows = trained_rows(group, objective)
        for result, outcome, turns, rows_of_it in zip(group.results, advantages, of_turns, rows, strict=True):
            _count(result, batch)
            if outcome is not None and rows_of_it:
                batch.samples += [_sample(row, outcome, turns, group.group_id, num_rollouts) for row in rows_of_it]
                batch.staleness += [row_age(row, age) for row in rows_of_it]
                num_rollouts += 1
        batch.num_masked += sum(r.reward is not None and _is_masked(r, objective) for r in group.results)
    return batch


def rewards_of(group: TrainGroup, objective: ObjectiveConfig) -> list[float | None]:
    """One reward per rollout as it is trained on: the verifier's, less the penalty for being cut by a limit.

    Raises TrainingFailed with the rollout's id for a reward that is not a finite number.
    """
    rewards: list[float | None] = []
    for result in group.results:
        for reward in (result.reward, *result.turn_rewards.values()):
            if reward is not None and not is_finite_number(reward):
                raise TrainingFailed(
                    f"rollout {result.rollout_id} of task {group.task} has the reward {reward!r}:"
                    " a verifier must give a finite number or nothing"
                )
        penalty = objective.truncation_penalty if result.outcome is Outcome.TRUNCATED else 0.0
        rewards.append(None if result.reward is None else result.reward - penalty)
    return rewards


def trained_rows(group: TrainGroup, objective: ObjectiveConfig) -> list[list[Row]]:
    """Of each rollout the rows that are trained; [] where it is not scored, masked, or has nothing to train."""
    return [
        [] if result.reward is None or _is_masked(result, objective) else [row for row in rows if row.num_trained > 0]
        for result, rows in zip(group.results, group.rows, strict=True)
    ]


def has_spread(group: TrainGroup, objective: ObjectiveConfig) -> bool:
    """Whether the group prefers anything to anything, by its rollouts' rewards or by its turns'."""
    (advantages,) = step_advantages([rewards_of(group, objective)], "group_mean")
    return any(advantages) or any(any(turns.values()) for turns in turn_advantages_of(group, objective))


def has_signal(group: TrainGroup, objective: ObjectiveConfig) -> bool:
    """Whether some trained token of the group has an advantage, with the group for a baseline."""
    (outcomes,) = step_advantages([rewards_of(group, objective)], objective.advantage)
    return any(
        outcome is not None and outcome + turns.get(turn_id, 0.0) != 0
        for outcome, turns, rows in zip(
            outcomes, turn_advantages_of(group, objective), trained_rows(group, objective), strict=True
        )
        for row in rows
        for turn_id in row.turn_ids
    )


def turn_advantages_of(group: TrainGroup, objective: ObjectiveConfig) -> list[dict[str, float]]:
    """Of each rollout what its turns add to the outcome's advantage, by turn id, weighted (as in arXiv 2505.11821)."""
    if not objective.turn_reward_weight:
        return [{} for _ in group.results]
    # An unscored rollout is out of this baseline as it is out of the other.
    judged = [{} if result.reward is None else result.turn_rewards for result in group.results]
    scale: Scale = "none" if objective.advantage in ("group_mean", "leave_one_out") else "std"
    values = turn_advantages([list(turns.values()) for turns in judged], scale)
    weight = objective.turn_reward_weight
    return [
        {turn_id: weight * value for turn_id, value in zip(turns, of_it, strict=True)}
        for turns, of_it in zip(judged, values, strict=True)
    ]


def row_age(row: Row, age: Age) -> int:
    """Of the oldest trained token of the row (it has one at least); a turn that spans an update has two policies."""
    return max(map(age, {version for version, trained in zip(row.versions_N, row.mask_N, strict=True) if trained}))


def _is_masked(result: RolloutResult, objective: ObjectiveConfig) -> bool:
    return objective.truncated == "mask" and result.outcome is Outcome.TRUNCATED


def _count(result: RolloutResult, batch: StepBatch) -> None:
    if result.reward is not None:
        batch.rewards.append(result.reward)
        for name, value in result.rewards.items():
            batch.named_rewards.setdefault(name, []).append(value)


def _sample(row: Row, outcome: float, turns: dict[str, float], group_id: int, rollout: int) -> dict[str, Any]:
    advantages = np.full(len(row.ids_N), outcome)
    if turns:
        for turn_id, (start, end) in zip(row.turn_ids, row.turn_spans, strict=True):
            advantages[start:end] += turns.get(turn_id, 0.0)
    return {
        "input_ids": np.asarray(row.ids_N, dtype=np.int64),
        "completion_mask": np.asarray(row.mask_N, dtype=np.int64),
        "old_log_probs": np.asarray(row.logprobs_N, dtype=np.float32),
        "advantage": outcome,
        "advantages": advantages,
        "group_id": group_id,
        "rollout": rollout,
        "metrics": {},  # rewards are counted per rollout in StepBatch; TRL would average them per row
    }

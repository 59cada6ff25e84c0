"""Which task the next group gets: in passes or by pass rate, and never one that is in quarantine.

Owns the choice. It depends on the group's id, the seed and what the store holds, so a restart draws the same. Used by
`runner`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness_trainer.errors import TrainingFailed
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.policy_config import CurriculumConfig
from harness_trainer.rollouts.policy_records import PolicyRecords
from harness_trainer.tasks import Task

_NAMED_TASKS = 3


def task_of_group(group_id: int, tasks: Sequence[Task], seed: int) -> Task:
    """Every task once per pass, each pass in an order of its own; the same id always means the same task."""
    pass_, position = divmod(group_id, len(tasks))
    order = list(range(len(tasks)))
    random.Random(f"{seed}:{pass_}").shuffle(order)
    return tasks[order[position]]


def weight_of(pass_rate: float | None, curriculum: CurriculumConfig) -> float:
    """How often a task is drawn, relative to others; a task that was never scored counts in full."""
    if pass_rate is None or curriculum.low <= pass_rate <= curriculum.high:
        return 1.0
    return curriculum.outside


class Curriculum:
    """Reads the store, so its methods block for a moment."""

    def __init__(self, config: RolloutConfig, tasks: Sequence[Task], store: PolicyRecords) -> None:
        self._config = config
        self._tasks = list(tasks)
        self._store = store

    def draw(self, group_id: int) -> Task:
        """Raises TrainingFailed when every task is in quarantine."""
        config, curriculum = self._config, self._config.curriculum
        quarantined = self._store.quarantined()
        tasks = [task for task in self._tasks if task.name not in quarantined]
        if not tasks:
            raise TrainingFailed(
                f"all {len(self._tasks)} tasks are quarantined, because no sandbox could be had for them:"
                f" {_reasons(quarantined)}. Mend them (`harness-trainer tasks check` tries them) and continue with"
                " --rollouts.forget-quarantine true"
            )
        if curriculum.by == "order":
            return task_of_group(group_id, tasks, config.seed)
        rates = self._store.pass_rates(config.pass_reward, curriculum.window)
        weights = [weight_of(rates.get(task.name), curriculum) for task in tasks]
        return random.Random(f"curriculum:{config.seed}:{group_id}").choices(tasks, weights)[0]


def _reasons(quarantined: dict[str, str]) -> str:
    named = [f"{task}: {reason}" for task, reason in list(quarantined.items())[:_NAMED_TASKS]]
    more = len(quarantined) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")

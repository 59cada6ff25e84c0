"""Which task of a source the next group gets: in passes or by pass rate, and never one that is in quarantine.

Owns the choice. It depends on the group's number, the seed and what the store holds, so a restart draws the same. Used
by `sources`, which says the number that a group has in its source; in a run of one source that is the group's id.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

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

    def left(self, quarantined: Mapping[str, str]) -> list[Task]:
        """The tasks that may be drawn."""
        return [task for task in self._tasks if task.name not in quarantined]

    def draw(self, group_id: int, quarantined: Mapping[str, str] | None = None) -> Task:
        """`quarantined`: as the store gives it; None = as it is now. Raises TrainingFailed when every task is there."""
        config, curriculum = self._config, self._config.curriculum
        quarantined = self._store.quarantined() if quarantined is None else quarantined
        tasks = self.left(quarantined)
        if not tasks:
            raise TrainingFailed(all_quarantined(len(self._tasks), quarantined))
        if curriculum.by == "order":
            return task_of_group(group_id, tasks, config.seed)
        rates = self._store.pass_rates(config.pass_reward, curriculum.window)
        weights = [weight_of(rates.get(task.name), curriculum) for task in tasks]
        return random.Random(f"curriculum:{config.seed}:{group_id}").choices(tasks, weights)[0]


def all_quarantined(num_tasks: int, quarantined: Mapping[str, str]) -> str:
    return (
        f"all {num_tasks} tasks are quarantined, because none could be set up: {_reasons(quarantined)}. Mend that"
        " (`harness-trainer tasks check` tries tasks in sandboxes) and continue with --rollouts.forget-quarantine true"
    )


def _reasons(quarantined: Mapping[str, str]) -> str:
    named = [f"{task}: {reason}" for task, reason in list(quarantined.items())[:_NAMED_TASKS]]
    more = len(quarantined) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")

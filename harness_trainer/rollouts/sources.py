"""Where a run's rollouts come from, opened: one source, or several that share its groups by weights.

Owns which source a group is of, and what that decides: the task, the agent, who runs its rollouts, which settings they
have. Groups are dealt out evenly, so that at every moment as many were opened of each source as its weight says (which
of them a step trains depends on when they end), and by the group's id alone, so that a restart draws the same. Within a
source `curriculum` draws, by the number that the group has there. A source whose tasks are all in quarantine is dealt
no group until one is released; a run ends when none is left.

In a run of several sources a task's name has its source's before it (`wordle/row-00001`), in the store and everywhere
else; in a run with one nothing does, and the source's name is "". `__main__` opens sources, `runner` uses them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from typing import TypeAlias

from harness_trainer.errors import HarnessTrainerError, TrainingFailed
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.curriculum import Curriculum, all_quarantined
from harness_trainer.rollouts.group_scores import GroupScores
from harness_trainer.rollouts.needs import Plan
from harness_trainer.rollouts.slots import Attempt
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, RolloutResult
from harness_trainer.tasks import Task

log = logging.getLogger("harness_trainer.rollouts")

HarnessOf: TypeAlias = Callable[[int, Task], str]  # the name of a group's agent, by the group's number in its source


@dataclass(frozen=True, slots=True)
class OpenSource:
    """Example: OpenSource(config, tasks, attempt, lambda n, task: "EchoEnv", name="echo", weight=2.0)."""

    config: RolloutConfig  # the run's, with the source's own settings
    tasks: Sequence[Task]  # to train on, named as `named` does
    attempt: Attempt
    harness_of: HarnessOf
    name: str = ""  # "" = the run has this one only
    weight: float = 1.0
    evaluation_tasks: Sequence[Task] = ()
    group_scores: GroupScores | None = None  # of rollouts that end with `awaits_group`; None = none does
    evaluated: Sequence[tuple[str, str]] | None = None  # task and agent of each group; None = one per task, in turn
    agents: Collection[str] | None = None  # by name; None = it has one, whatever that was called when a group began

    def each_evaluated(self) -> Sequence[tuple[str, str]]:
        if self.evaluated is not None:
            return self.evaluated
        return [(task.name, self.harness_of(n, task)) for n, task in enumerate(self.evaluation_tasks)]


class Sources:
    """All of a run. `plan` is told which sandboxes are still to be had, of every source."""

    def __init__(self, sources: Sequence[OpenSource], *, plan: Plan = lambda needs: None) -> None:
        self._sources = {source.name: source for source in sources}
        self._of_task = {task.name: source for source in sources for task in (*source.tasks, *source.evaluation_tasks)}
        self.tasks = {task.name: task for source in sources for task in source.tasks}
        self.evaluation_tasks = {task.name: task for source in sources for task in source.evaluation_tasks}
        self.plan = plan

    @property
    def names(self) -> list[str]:
        """[""] = there is one, which needs no name."""
        return list(self._sources)

    def name_of(self, task: str) -> str:
        return self._of_task[task].name

    def config_of(self, task: str) -> RolloutConfig:
        return self._of_task[task].config

    def lacks_agent(self, task: str, agent: str) -> bool:
        """Whether a group of an earlier runner names an agent that is none of the run's now."""
        agents = self._of_task[task].agents
        return agents is not None and agent not in agents

    def group_scores_of(self, task: str) -> GroupScores:
        """Of a task whose rollouts ended with `awaits_group`."""
        scores = self._of_task[task].group_scores
        assert scores is not None
        return scores

    def evaluated(self, num: int | None = None) -> list[tuple[str, str]]:
        """Name of the task and of the agent of each group of an evaluation; None = each pair once, else in turn."""
        pairs = [pair for source in self._sources.values() for pair in source.each_evaluated()]
        return [pairs[n % len(pairs)] for n in range(len(pairs) if num is None else num)] if pairs else []

    async def attempt(self, job: Job) -> RolloutResult:
        return await self._of_task[job.task.name].attempt(job)

    def draws(self, store: RolloutStore) -> Draws:
        return Draws(list(self._sources.values()), store)


class Draws:
    """Reads the store, so its method blocks for a moment."""

    def __init__(self, sources: Sequence[OpenSource], store: RolloutStore) -> None:
        # By name: a continued run may have its sources in another order, and deals the same.
        ordered = sorted(sources, key=lambda source: source.name)
        self._sources = [(source, Curriculum(source.config, source.tasks, store)) for source in ordered]
        self._store = store
        self._out: set[str] = set()  # sources that a person was told are out

    def draw(self, group_id: int) -> tuple[Task, str]:
        """The group's task and the name of its agent. Raises TrainingFailed when every task is in quarantine."""
        quarantined = self._store.quarantined()
        left = [pair for pair in self._sources if pair[1].left(quarantined)]
        if not left:
            raise TrainingFailed(all_quarantined(sum(len(source.tasks) for source, _ in self._sources), quarantined))
        self._tell({source.name for source, _ in self._sources} - {source.name for source, _ in left})
        chosen, number = deal(group_id, [source.weight for source, _ in left])
        source, curriculum = left[chosen]
        task = curriculum.draw(number, quarantined)
        return task, source.harness_of(number, task)

    def _tell(self, out: set[str]) -> None:
        for name in sorted(out - self._out):
            line = f"source {name} gets no groups: all its tasks are quarantined; the other sources go on without it"
            log.warning(line)
            self._store.tell("source_out", line, source=name)
        self._out = out


def deal(group_id: int, weights: Sequence[float]) -> tuple[int, int]:
    """Which source the group is of, and how many groups that source had before it.

    The m-th group of a source of weight w has the date (m + 1/2) / w; groups are numbered by date. Example: with the
    weights 2 and 1 the groups are of 0, 1, 0, 0, 1, 0, ... Exact fractions: of two groups none gets the same place.
    """
    exact = [Fraction(weight) for weight in weights]
    before = max(Fraction(0), (group_id - len(exact)) / sum(exact))  # a date by which at most `group_id` are dealt
    dealt = [floor(before * weight + Fraction(1, 2)) for weight in exact]
    while True:
        chosen = min(range(len(exact)), key=lambda n: (dealt[n] + Fraction(1, 2)) / exact[n])
        if sum(dealt) == group_id:
            return chosen, dealt[chosen]
        dealt[chosen] += 1


def named(source: str, tasks: Sequence[Task]) -> list[Task]:
    """The tasks by the names that they have in the run."""
    return [replace(task, name=f"{source}/{task.name}") for task in tasks] if source else list(tasks)


def source_in(task: str, sources: Mapping[str, object] | Sequence[str]) -> str:
    """The source in a task's name, of a run with these; "" = in none of them."""
    first = task.partition("/")[0]
    return first if first in sources and first != task else ""


@contextmanager
def naming(source: str) -> Iterator[None]:
    """What a person is told of a fault says in which source it is."""
    try:
        yield
    except HarnessTrainerError as error:
        if not source:
            raise
        raise type(error)(f"source {source}: {error}") from error

"""A fixed set of tasks, run with the current policy every so many steps: pass@1 and mean reward with their intervals.

Owns when it runs and what comes of it. Its groups have ids and states of their own in the store, so nothing of them is
ever trained on, and training groups keep theirs. While one is due or under way the learner takes no step
(`learner.store_source` holds it back), so the engine keeps one policy; and `runner` opens no group, so that it is over
the sooner. Open groups go on. Used by `runner`.

Evan Miller, "Adding Error Bars to Evals" (arXiv 2411.00640): tasks are the sample, rollouts of one task are not
independent, so standard errors are taken over tasks' means.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from harness_trainer.errors import TaskError
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.group import Group, Unfit
from harness_trainer.rollouts.slots import Slots
from harness_trainer.rollouts.store import RolloutStore

if TYPE_CHECKING:
    from harness_trainer.rollouts.sources import Sources

log = logging.getLogger("harness_trainer.rollouts")

POLL_S = 0.25
_Z = statistics.NormalDist().inv_cdf(0.975)  # 95 %, two-sided


@dataclass(frozen=True, slots=True)
class Report:
    """Example: Report(pass_at_1=0.5, pass_at_1_ci=(0.15, 0.85), reward_mean=0.6, ..., num_tasks=4, num_scored=4, ...).

    None = no rollout was scored; of an interval also: too few tasks to tell.
    """

    pass_at_1: float | None
    pass_at_1_ci: tuple[float, float] | None
    reward_mean: float | None  # of the tasks' means
    reward_ci: tuple[float, float] | None
    num_tasks: int  # with a scored rollout
    num_scored: int  # rollouts
    num_unscored: int  # rollouts that infra failures left without a reward; they are in no mean

    @property
    def line(self) -> str:
        unscored = f", {self.num_unscored} unscored" if self.num_unscored else ""
        return (
            f"pass@1 {_shown(self.pass_at_1, self.pass_at_1_ci)}, reward {_shown(self.reward_mean, self.reward_ci)}"
            f" ({self.num_tasks} tasks, {self.num_scored} rollouts{unscored})"
        )


def summarise(
    rewards: Mapping[str, Sequence[float | None]], pass_reward: float, of_tasks: Mapping[str, float] | None = None
) -> Report:
    """`rewards`: of every rollout, by task; None = it could not be scored.

    `of_tasks`: what passes is, by task, of those that differ from `pass_reward`.
    """
    known = {task: [r for r in of_task if r is not None] for task, of_task in rewards.items()}
    bars = [(of_tasks or {}).get(task, pass_reward) for task, of_task in known.items() if of_task]
    scored = [of_task for of_task in known.values() if of_task]
    num_scored = sum(map(len, scored))
    num_unscored = sum(map(len, rewards.values())) - num_scored
    if not scored:
        return Report(None, None, None, None, 0, 0, num_unscored)
    means = [statistics.fmean(of_task) for of_task in scored]
    passes = [
        statistics.fmean(float(reward >= bar) for reward in of_task) for of_task, bar in zip(scored, bars, strict=True)
    ]
    return Report(
        statistics.fmean(passes),
        proportion_interval(passes, num_scored),
        statistics.fmean(means),
        mean_interval(means),
        len(scored),
        num_scored,
        num_unscored,
    )


def mean_interval(means: Sequence[float]) -> tuple[float, float] | None:
    """95 %, by the central limit theorem over tasks."""
    if len(means) < 2:
        return None
    half = _Z * statistics.stdev(means) / math.sqrt(len(means))
    centre = statistics.fmean(means)
    return centre - half, centre + half


def proportion_interval(passes: Sequence[float], num_rollouts: int) -> tuple[float, float]:
    """95 %, Wilson's: with 0 of 5 passed it is not the single point 0. `passes`: of every task the share that passed.

    The sample size is the effective one, at which independent rollouts would vary as the tasks' shares do; at most the
    number of rollouts, and the number of tasks where these shares do not vary at all.
    """
    share, num_tasks = statistics.fmean(passes), len(passes)
    variance = statistics.variance(passes) / num_tasks if num_tasks > 1 else 0.0
    size = min(max(1.0, share * (1 - share) / variance), num_rollouts) if variance else float(num_tasks)
    return wilson(share, size)


def wilson(share: float, size: float) -> tuple[float, float]:
    """95 %, of a share that was found among `size` independent trials."""
    middle = share + _Z**2 / (2 * size)
    half = _Z * math.sqrt(share * (1 - share) / size + _Z**2 / (4 * size**2))
    scale = 1 + _Z**2 / size
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


class Evaluator:
    """Runs what is due, until it is cancelled. `groups`: task and agent of each, by name.

    `last_step`: the run's, whose policy is always evaluated.
    """

    def __init__(
        self,
        config: RolloutConfig,
        sources: Sources,
        store: RolloutStore,
        slots: Slots,
        groups: Sequence[tuple[str, str]],
        *,
        last_step: int,
    ) -> None:
        self._config = config
        self._sources = sources
        self._store = store
        self._slots = slots
        self._groups = groups
        self._last_step = last_step

    async def due(self) -> int | None:
        """The step after which one is due or under way; None = there is none."""
        return await asyncio.to_thread(self._store.due_evaluation, self._config.evaluation.every, self._last_step)

    async def run(self) -> None:
        while True:
            due = await self.due()
            if due is None:
                await asyncio.sleep(POLL_S)
            else:
                await self._evaluate(due)

    async def _evaluate(self, step: int) -> None:
        log.info("evaluating the policy after step %d on %d tasks", step, len({task for task, _ in self._groups}))
        await asyncio.to_thread(self._store.start_evaluation, step, self._groups)
        groups = await self._with_agents(await asyncio.to_thread(self._store.evaluation_groups, step), step)
        async with asyncio.TaskGroup() as running:
            for group_id, task, harness, over in groups:
                if not over:
                    running.create_task(self._run_group(group_id, task, harness))
        rewards: dict[str, list[float | None]] = {}
        for group_id, task, *_ in groups:
            results = await asyncio.to_thread(self._store.results, group_id)
            rewards.setdefault(task, []).extend(result.reward for result in results)
        report, line = self._report(rewards)
        line = f"evaluation after step {step}: {line}"
        await asyncio.to_thread(self._store.finish_evaluation, step, report, line)
        log.info(line)

    async def _with_agents(
        self, groups: list[tuple[int, str, str, bool]], step: int
    ) -> list[tuple[int, str, str, bool]]:
        """The groups once those of agents that have gone are replaced by others of the same tasks."""
        sources = self._sources
        gone = [
            (group_id, task, agent)
            for group_id, task, agent, over in groups
            if not over and task in sources.evaluation_tasks and sources.lacks_agent(task, agent)
        ]
        if not gone:
            return groups
        lost = {group_id for group_id, *_ in gone}
        there = Counter((task, agent) for group_id, task, agent, _ in groups if group_id not in lost)
        wanted = list((Counter(self._groups) - there).elements())
        for group_id, task, agent in gone:
            instead = next((pair for pair in wanted if pair[0] == task), None)
            if instead is not None:
                wanted.remove(instead)
            new = None if instead is None else instead[1]
            await asyncio.to_thread(self._store.replace_evaluated, group_id, Unfit.AGENT_GONE, new)
            await tell_agent_gone(self._store, group_id, task, agent)
        return await asyncio.to_thread(self._store.evaluation_groups, step)

    def _report(self, rewards: Mapping[str, Sequence[float | None]]) -> tuple[dict[str, Any], str]:
        """Of all tasks; where the run has several sources, of each as well. The line for people says the same."""
        sources = self._sources
        passed_at = {task: sources.config_of(task).pass_reward for task in rewards}
        whole = summarise(rewards, self._config.pass_reward, passed_at)
        report, line = asdict(whole), whole.line
        if sources.names == [""]:
            return report, line
        its: dict[str, dict[str, Sequence[float | None]]] = {}
        for task, of_task in rewards.items():
            its.setdefault(sources.name_of(task), {})[task] = of_task
        by_source = {name: summarise(of_its, self._config.pass_reward, passed_at) for name, of_its in its.items()}
        report["sources"] = {name: asdict(one) for name, one in by_source.items()}
        return report, "; ".join([line, *(f"{name}: {one.line}" for name, one in by_source.items())])

    async def _run_group(self, group_id: int, name: str, harness: str) -> None:
        if name not in self._sources.evaluation_tasks:
            raise TaskError(f"an evaluation under way has task {name!r}, which is gone from its tasks: put it back")
        group = Group(group_id, self._sources.evaluation_tasks[name], harness, self._config.evaluation.samples)
        for slot, result in (await asyncio.to_thread(self._store.results_by_slot, group_id)).items():
            group.finish(slot, result)
        await self._slots.fill(group)
        await asyncio.to_thread(self._store.group_evaluated, group_id)


async def tell_agent_gone(store: RolloutStore, group_id: int, task: str, agent: str) -> None:
    """Of a group that is dropped for it, a person is told."""
    line = f"WARNING: group {group_id} ({task}) is dropped: its agent {agent!r} is none of the run's any more"
    log.warning("%s", line)
    await asyncio.to_thread(store.tell, Unfit.AGENT_GONE, line, group=group_id, task=task, agent=agent)


def _shown(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.3f}" if interval is None else f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"

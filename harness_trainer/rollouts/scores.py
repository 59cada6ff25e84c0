"""What the rollouts of an evaluation came to, agent by agent and task by task: pass@1, pass@k, mean reward, intervals.

Owns the arithmetic and the words of the table; reads the store. `harness-trainer rollout` prints it. Intervals of an
agent are over its tasks, as in `evaluation`; those of one task are over its rollouts, which are independent.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness_trainer.rollouts.evaluation import mean_interval, proportion_interval, wilson
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import RolloutResult

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Score:
    """Example: Score("pi", "moon", k=8, pass_at_1=0.25, pass_at_k=1.0, ..., num_scored=8, outcomes={"ok": 8}).

    None = no rollout was scored; of pass@k: no task has k scored rollouts; of an interval: too few to tell.
    """

    harness: str
    task: str | None  # None = all of the agent's tasks
    k: int
    pass_at_1: float | None
    pass_at_1_ci: Interval | None
    pass_at_k: float | None
    reward_mean: float | None
    reward_ci: Interval | None
    num_scored: int
    num_unscored: int  # rollouts that infra failures left without a reward; they are in no mean
    outcomes: dict[str, int]
    source: str = ""  # of the run's `sources`; "" = it has only one


def pass_at(k: int, num: int, num_passed: int) -> float | None:
    """The chance that one of k rollouts passes, from `num` of which `num_passed` did (arXiv 2107.03374, unbiased).

    None = there are fewer than k.
    """
    if num < k:
        return None
    return 1.0 - math.comb(num - num_passed, k) / math.comb(num, k)


def scores(
    results: Sequence[RolloutResult], k: int, pass_reward: float, of_sources: Mapping[str, float] | None = None
) -> list[Score]:
    """Agents in the order of their first rollout; of each its tasks, then all of them together if there are several.

    An agent of several sources is one of each. `of_sources`: what passes is, of those that differ from `pass_reward`.
    """
    by_agent: dict[tuple[str, str], dict[str, list[RolloutResult]]] = {}
    for result in results:
        by_agent.setdefault((result.source, result.harness), {}).setdefault(result.task, []).append(result)
    found = []
    for (source, harness), by_task in by_agent.items():
        bar = (of_sources or {}).get(source, pass_reward)
        of_tasks = [_of_task(harness, task, its, k, bar) for task, its in by_task.items()]
        whole = [_of_all(harness, of_tasks, k)] if len(of_tasks) > 1 else []
        found += [replace(score, source=source) for score in (*of_tasks, *whole)]
    return found


def stored_scores(
    store: RolloutStore, step: int, k: int, pass_reward: float, of_sources: Mapping[str, float] | None = None
) -> list[Score]:
    """Those of the evaluation after `step`, finished or not."""
    results = [r for group_id, *_ in store.evaluation_groups(step) for r in store.results(group_id)]
    return scores(results, k, pass_reward, of_sources)


def _of_task(harness: str, task: str, results: Sequence[RolloutResult], k: int, pass_reward: float) -> Score:
    rewards = [result.reward for result in results if result.reward is not None]
    passed = sum(reward >= pass_reward for reward in rewards)
    share = passed / len(rewards) if rewards else None
    return Score(
        harness,
        task,
        k,
        share,
        None if share is None else wilson(share, len(rewards)),
        pass_at(k, len(rewards), passed),
        statistics.fmean(rewards) if rewards else None,
        mean_interval(rewards),
        len(rewards),
        len(results) - len(rewards),
        dict(Counter(result.outcome.value for result in results)),
    )


def _of_all(harness: str, tasks: Sequence[Score], k: int) -> Score:
    scored = [task for task in tasks if task.num_scored]
    passes = [task.pass_at_1 for task in scored if task.pass_at_1 is not None]
    means = [task.reward_mean for task in scored if task.reward_mean is not None]
    at_k = [task.pass_at_k for task in tasks if task.pass_at_k is not None]
    num_scored = sum(task.num_scored for task in tasks)
    outcomes: Counter[str] = Counter()
    for task in tasks:
        outcomes.update(task.outcomes)
    return Score(
        harness,
        None,
        k,
        statistics.fmean(passes) if passes else None,
        proportion_interval(passes, num_scored) if passes else None,
        statistics.fmean(at_k) if at_k else None,
        statistics.fmean(means) if means else None,
        mean_interval(means),
        num_scored,
        sum(task.num_unscored for task in tasks),
        dict(outcomes),
    )

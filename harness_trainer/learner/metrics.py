"""What one step came to in numbers, under the names that TRL and OpenEnv use where they have one.

Owns what is of the step, and that an unknown number is absent, never 0; `rollout_metrics` owns what is of its rollouts,
`metric_names` what each means. TRL's own (losses, throughput) come from its log and pass by untouched. `measuring`
gathers the facts and calls `step_metrics`; everything here is pure. Free of torch and TRL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness_trainer.learner.feeder import DropReason
from harness_trainer.learner.rollout_metrics import (
    mean,
    of_rollouts,
    per_harness,
    per_source,
    per_tool,
    plain,
    ratio,
    stages,
)
from harness_trainer.learner.step_batch import StepBatch
from harness_trainer.rollouts.types import Outcome

MAX_STALENESS_SHOWN = 7  # steps that have a share of their own


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the metrics of a step are made of. None and absent = not known."""

    batch: StepBatch
    max_staleness: int  # optimizer steps; the run's own limit
    forwarded_tokens: int | None = None
    step_s: float | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)  # attempts of the step's groups, retried ones included
    num_running: int | None = None  # rollouts under way when the step was over
    group_counts: Mapping[str, int] | None = None  # training groups by state, at the same time
    ready_at: Mapping[int, float] = field(default_factory=dict)  # Unix seconds, by group
    sync_phases_s: Mapping[str, float] = field(default_factory=dict)  # of the weight update after the step
    engine_idle: float | None = None  # share of time, 0 to 1
    evaluation: Mapping[str, Any] | None = None  # of the policy that the step started from


def step_metrics(facts: StepFacts) -> dict[str, float]:
    """Example: {"reward": 0.5, "tools/call_frequency": 3.25, "stage/agent/p95_s": 41.2, ...}."""
    rollouts = [pair for group in facts.batch.groups for pair in zip(group.results, group.rows, strict=True)]
    results = [result for result, _ in rollouts]
    found: dict[str, float | None] = {
        **of_rollouts(rollouts),
        **per_tool(results),
        **stages(results),
        **per_harness(rollouts),
        **per_source(rollouts),
        **_rewards_by_name(facts.batch),
        **_outcomes(facts.outcomes),
        **_staleness(facts.batch.staleness, facts.max_staleness),
        **_dropped(facts.batch.dropped),
        **_run(facts),
        **{f"sync/{phase}_s": seconds for phase, seconds in facts.sync_phases_s.items()},
        **_evaluation(facts.evaluation),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def busy_seconds(calls: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """How long of [start, end) at least one of the calls, each [from, to), was under way."""
    busy, covered = 0.0, start
    for first, last in sorted(calls):
        first, last = max(first, covered), min(last, end)
        if last > first:
            busy += last - first
            covered = last
    return busy


def _rewards_by_name(batch: StepBatch) -> dict[str, float | None]:
    return {f"rewards/{plain(name)}": mean(values) for name, values in batch.named_rewards.items()}


def _outcomes(counts: Mapping[str, int]) -> dict[str, float | None]:
    return {f"outcome/{outcome}_total": counts.get(outcome, 0) for outcome in Outcome} if counts else {}


def _staleness(staleness: Sequence[int], limit: int) -> dict[str, float | None]:
    if not staleness:
        return {}
    shown = min(limit, MAX_STALENESS_SHOWN)
    shares: dict[str, float | None] = {f"sample/staleness_{n}_frac": _share(n, staleness) for n in range(shown + 1)}
    if limit > shown:
        shares[f"sample/staleness_over_{shown}_frac"] = mean([n > shown for n in staleness])
    return {"sample/staleness_mean": mean(staleness), "sample/staleness_max": max(staleness), **shares}


def _share(value: int, values: Sequence[int]) -> float:
    return sum(v == value for v in values) / len(values)


def _dropped(counts: Counter[str]) -> dict[str, float | None]:
    by_reason: dict[str, float | None] = {f"groups/dropped_{reason}_total": counts[reason] for reason in DropReason}
    return {"groups/dropped_total": counts.total(), **by_reason}


def _run(facts: StepFacts) -> dict[str, float | None]:
    batch, groups = facts.batch, facts.group_counts
    waits_s = [batch.taken_at - facts.ready_at[gid] for gid in batch.group_ids if gid in facts.ready_at]
    idle_s = None if facts.step_s is None else min(batch.wait_s, facts.step_s)
    return {
        "batch/trained_per_forwarded": ratio(batch.num_trained_tokens, facts.forwarded_tokens),
        "sample/time_in_queue_s": mean([max(0.0, wait) for wait in waits_s]),
        "queue/running_rollouts": facts.num_running,
        "queue/running_groups": None if groups is None else groups.get("running", 0),
        "queue/ready_groups": None if groups is None else groups.get("ready", 0),
        "perf/learner_idle_frac": ratio(idle_s, facts.step_s),
        "perf/engine_idle_frac": facts.engine_idle,
    }


def _evaluation(report: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Transformers' trackers show `eval_x` as `eval/x`."""
    if report is None:
        return {}
    found = _report(report, "")
    for source, its in report.get("sources", {}).items():
        found |= _report(its, f"source/{plain(source)}/")
    return found


def _report(report: Mapping[str, Any], at: str) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        f"{at}eval_reward": report["reward_mean"],
        f"{at}eval_pass_at_1": report["pass_at_1"],
    }
    for name, key in (("eval_reward", "reward_ci"), ("eval_pass_at_1", "pass_at_1_ci")):
        low, high = report[key] or (None, None)
        found |= {f"{at}{name}_ci_low": low, f"{at}{name}_ci_high": high}
    return found

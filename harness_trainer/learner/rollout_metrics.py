"""What a set of rollouts came to in numbers (rewards, turns, rows, drift, tools, stages), all at once, by agent
and, in a run of several, by source.

Owns how each is computed; None = not known. `metrics` calls it with a step's rollouts. Pure, free of torch and TRL.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from harness_trainer.learner.metric_names import PER_HARNESS
from harness_trainer.learner.rows import Row
from harness_trainer.rollouts.types import Outcome, RolloutResult

MAX_TOOLS = 24  # named in one step, most called first: a model may invent names without end
MAX_FACTS = 24  # of one source, most told first: a person's code names them
FACTS = "facts/"
_COMPARED_ROWS = 8  # newest first; a rollout whose rows share nothing would cost the square of their number
_STRANGE = re.compile(r"[^A-Za-z0-9_.@-]")

# A rollout and its training rows.
Rollout = tuple[RolloutResult, list[Row]]


def of_rollouts(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """What is given for all of a step and for each agent."""
    results = [result for result, _ in rollouts]
    captured = [result for result in results if result.num_turns or result.trace is not None]
    lengths = [result.num_completion_tokens for result in captured]
    turns = [result.num_turns for result in captured]
    bridged = [result for result in results if result.num_bridged_turns is not None]
    warm = [result.warm for result in results if result.warm is not None]
    return {
        "reward": mean([r.reward for r in results if r.reward is not None]),
        "reward_std": _reward_std(results),
        "rollout/correctness_mean": mean([r.verifier_reward for r in results if r.verifier_reward is not None]),
        "rollout/ok_frac": mean([r.outcome is Outcome.OK for r in results]),
        "rollout/truncated_frac": mean([r.outcome is Outcome.TRUNCATED for r in results]),
        "rollout/scored_frac": mean([r.reward is not None for r in results]),
        "rollout/duration_s": mean([_duration_s(r) for r in results if r.stages_s]),
        "rollout/warm_frac": mean(warm),
        "rollout/turns_mean": mean(turns),
        "rollout/turns_max": max(turns, default=None),
        "rollout/side_turns_mean": mean([r.num_side_turns for r in captured]),
        "rollout/samples_per_rollout": mean([len(rows) for _, rows in rollouts if rows]),
        "rollout/bridged_frac": ratio(
            sum(r.num_bridged_turns or 0 for r in bridged), sum(r.num_turns for r in bridged)
        ),
        "completions/mean_length": mean(lengths),
        "completions/min_length": min(lengths, default=None),
        "completions/max_length": max(lengths, default=None),
        **_drift([rows for _, rows in rollouts if rows]),
        **_tool_use(results),
        **_own_tool_use(results),
    }


def _reward_std(results: Sequence[RolloutResult]) -> float | None:
    """As TRL: every scored rollout counts with the population standard deviation of its group."""
    by_group: dict[int, list[float]] = {}
    for result in results:
        if result.reward is not None:
            by_group.setdefault(result.group_id, []).append(result.reward)
    return mean([statistics.pstdev(rewards) for rewards in by_group.values() for _ in rewards])


def _duration_s(result: RolloutResult) -> float:
    return sum(
        seconds for stage, seconds in result.stages_s.items() if "." not in stage
    )  # "verify.copy" is in "verify"


def _tool_use(results: Sequence[RolloutResult]) -> dict[str, float | None]:
    """As TRL's GRPOTrainer: calls per rollout, failures per call. A rollout without a capture is in neither."""
    known = [sum(r.tool_calls.values()) for r in results if r.tool_calls is not None]
    telling = [r for r in results if r.tool_calls and r.tool_failures is not None]
    # A result may be of a call that is in no recorded reply, and so in no count of calls.
    failures = sum(min(sum((r.tool_failures or {}).values()), sum((r.tool_calls or {}).values())) for r in telling)
    return {
        "tools/call_frequency": mean(known),
        "tools/failure_frequency": ratio(failures, sum(sum((r.tool_calls or {}).values()) for r in telling)),
    }


def _own_tool_use(results: Sequence[RolloutResult]) -> dict[str, float | None]:
    """What TRL's asynchronous worker tells of its loop, of the rollouts whose turns were ours."""
    own = [(r.tool_use, sum((r.tool_calls or {}).values())) for r in results if r.tool_use is not None]
    if not own:
        return {}
    return {
        "tools/latency_s": ratio(
            sum(sum(use.seconds.values()) for use, _ in own), sum(sum(use.num_ran.values()) for use, _ in own)
        ),
        "tools/parallel_calls_mean": ratio(sum(calls for _, calls in own), sum(use.num_rounds for use, _ in own)),
        "tools/loop_exhausted_frac": mean([use.exhausted for use, _ in own]),
        "tools/unknown_name_total": sum(use.num_unknown for use, _ in own),
    }


def _drift(rows_of_rollouts: Sequence[Sequence[Row]]) -> dict[str, float | None]:
    """As TRL counts it: a turn whose prompt does not begin with what is held drifts by the held tokens it leaves out.

    TRL holds one row; where an agent goes back and forth between conversations, ours is compared with the closest.
    """
    num_transitions = sum(max(0, sum(len(row.turn_ids) for row in rows) - 1) for rows in rows_of_rollouts)
    drifts = [drift for rows in rows_of_rollouts for drift in _drift_tokens(rows)]
    if not num_transitions:
        return {}
    return {
        "rollout/fork_frac": len(drifts) / num_transitions,
        "rollout/drift_tokens_mean": sum(drifts) / num_transitions,
        "rollout/drift_tokens_max": max(drifts, default=0),
    }


def _drift_tokens(rows: Sequence[Row]) -> list[int]:
    """Of each row but the first."""
    drifts = []
    ids = [np.asarray(row.ids_N) for row in rows]
    for n, row in enumerate(rows[1:], start=1):
        prompt = ids[n][: row.turn_spans[0][0]] if row.turn_spans else ids[n]
        matched = [(_common_prefix(earlier, prompt), len(earlier)) for earlier in ids[max(0, n - _COMPARED_ROWS) : n]]
        most, length = max(matched, key=lambda match: match[0])
        drifts.append(length - most)
    return drifts


def _common_prefix(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> int:
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length


def per_harness(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    return _by("harness", rollouts, lambda result: result.harness)


def per_source(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """{} where the run has one source. With the named rewards, which mean something else in each source."""
    by_source: dict[str, list[RolloutResult]] = {}
    for result, _ in rollouts:
        if result.source:
            by_source.setdefault(result.source, []).append(result)
    found = _by("source", [pair for pair in rollouts if pair[0].source], lambda result: result.source)
    for source, results in by_source.items():
        at = f"source/{plain(source)}"
        found[f"{at}/groups_total"] = len({result.group_id for result in results})
        named: dict[str, list[float]] = {}
        for result in results:
            for name, reward in result.rewards.items() if result.reward is not None else ():
                named.setdefault(plain(name), []).append(reward)
        found |= {f"{at}/rewards/{name}": mean(rewards) for name, rewards in named.items()}
    return found


def _by(kind: str, rollouts: Sequence[Rollout], name_of: Callable[[RolloutResult], str]) -> dict[str, float | None]:
    by_name: dict[str, list[Rollout]] = {}
    for result, rows in rollouts:
        by_name.setdefault(name_of(result), []).append((result, rows))
    return {
        f"{kind}/{plain(one)}/{name}": value
        for one, its in by_name.items()
        for name, value in (of_rollouts(its) | _facts([result for result, _ in its])).items()
        if name in PER_HARNESS or name.startswith(FACTS)
    }


def _facts(results: Sequence[RolloutResult]) -> dict[str, float | None]:
    """The numbers that white-box episodes report, over those that report them."""
    told: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.facts.items():
            told.setdefault(plain(name), []).append(value)
    most_told = sorted(told, key=lambda name: -len(told[name]))[:MAX_FACTS]
    return {f"{FACTS}{name}": mean(told[name]) for name in most_told}


def per_tool(results: Sequence[RolloutResult]) -> dict[str, float | None]:
    calls: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    told = set()
    seconds: defaultdict[str, float] = defaultdict(float)
    ran: Counter[str] = Counter()
    for result in results:
        if result.tool_use is not None:
            for name, taken in result.tool_use.seconds.items():
                seconds[plain(name)] += taken
                ran[plain(name)] += result.tool_use.num_ran[name]
        for name, number in (result.tool_calls or {}).items():
            calls[plain(name)] += number
        for name, number in (result.tool_failures or {}).items():
            told.add(plain(name))
            failures[plain(name)] += number
    found: dict[str, float | None] = {}
    for name, number in calls.most_common(MAX_TOOLS):
        found[f"tools/{name}/call_total"] = number
        found[f"tools/{name}/failure_total"] = failures[name] if name in told else None
        if ran[name]:
            found[f"tools/{name}/latency_s"] = seconds[name] / ran[name]
    return found


def stages(results: Sequence[RolloutResult]) -> dict[str, float | None]:
    seconds: dict[str, list[float]] = {}
    for result in results:
        for stage, taken in result.stages_s.items():
            seconds.setdefault(plain(stage), []).append(taken)
    found: dict[str, float | None] = {}
    for stage, taken_s in seconds.items():
        found[f"stage/{stage}/mean_s"] = statistics.fmean(taken_s)
        found[f"stage/{stage}/p95_s"] = float(np.percentile(taken_s, 95))
    return found


def plain(name: str) -> str:
    """A part of a metric's name out of a name that somebody else chose. Example: "a b/c" -> "a_b_c"."""
    return _STRANGE.sub("_", name)[:64] or "_"


def mean(values: Sequence[float | bool]) -> float | None:
    return statistics.fmean(values) if values else None


def ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole

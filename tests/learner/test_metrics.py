"""What a step's metrics say of small groups whose numbers are known, and when the engine counts as idle."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from capture_proxy.store import Store
from capture_proxy.types import Session, SessionPolicy, Turn, TurnRole, TurnStatus
from harness_trainer.learner import metric_names
from harness_trainer.learner.feeder import DropReason
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.measuring import EngineWatch
from harness_trainer.learner.metrics import StepFacts, busy_seconds, step_metrics
from harness_trainer.learner.rollout_metrics import plain
from harness_trainer.learner.rows import Row
from harness_trainer.learner.step_batch import StepBatch
from harness_trainer.loops.base import ToolUse
from harness_trainer.rollouts.types import Outcome, RolloutResult


def rollout(reward=1.0, *, group=0, harness="pi", outcome=Outcome.OK, **fields):
    return RolloutResult(f"g{group}", group, "task", harness, 0, outcome, reward, **fields)


def row(ids, prompt, turns=1):
    """A row of `turns` turns, the first of which was asked with the first `prompt` ids."""
    mask = [0] * prompt + [1] * (len(ids) - prompt)
    names = [f"t{n}" for n in range(turns)]
    return Row(ids, mask, [0.0] * len(ids), [1] * len(ids), names, [(prompt, len(ids))] * turns)


OF_OUR_LOOP = {
    "tools/latency_s", "tools/parallel_calls_mean", "tools/loop_exhausted_frac", "tools/unknown_name_total"
}  # fmt: skip


def metrics(*groups, staleness=(), dropped=(), rows=None, limit=2, **facts):
    """Of a step with these groups, each a list of results; `rows` of each result, by default none."""
    made = [
        TrainGroup(results[0].group_id, "task", results, (rows or [[[] for _ in g] for g in groups])[n])
        for n, results in enumerate(groups)
    ]
    batch = StepBatch(made, [], [], list(staleness), Counter(dropped))
    return step_metrics(StepFacts(batch, limit, **facts))


# -- what is computed ----------------------------------------------------------------------------------------------


def test_rewards_are_per_rollout_and_their_spread_is_the_groups_own():
    found = metrics([rollout(1.0), rollout(0.0)], [rollout(4.0, group=1), rollout(4.0, group=1)])
    assert found["reward"] == 2.25
    assert found["reward_std"] == 0.25  # 0.5, 0.5, 0, 0
    assert "rollout/correctness_mean" not in found, "no reward function had the last word"


def test_a_rollout_without_a_reward_is_in_no_mean_of_rewards():
    found = metrics([rollout(1.0), rollout(None, outcome=Outcome.INFRA_FAILED)])
    assert found["reward"] == 1.0 and found["rollout/scored_frac"] == 0.5
    nothing = metrics([rollout(None, outcome=Outcome.INFRA_FAILED)])
    assert "reward" not in nothing and "reward_std" not in nothing and nothing["rollout/scored_frac"] == 0.0


def test_correctness_is_the_verifiers_word_beside_a_reward_functions():
    found = metrics([rollout(0.3, verifier_reward=1.0), rollout(0.1, verifier_reward=0.0), rollout(0.2)])
    assert found["rollout/correctness_mean"] == 0.5 and found["reward"] == pytest.approx(0.2)


def test_a_loop_of_ours_tells_of_its_calls_as_trls_worker_does_and_an_agent_does_not():
    first = ToolUse(num_rounds=2, num_unknown=1, seconds={"guess": 0.6}, num_ran={"guess": 3})
    second = ToolUse(num_rounds=1, exhausted=True, seconds={"guess": 0.2, "look": 0.4}, num_ran={"guess": 1, "look": 1})
    found = metrics(
        [
            rollout(tool_calls={"guess": 3, "no": 1}, tool_failures={}, tool_use=first),
            rollout(tool_calls={"guess": 1, "look": 1}, tool_failures={}, tool_use=second),
            rollout(tool_calls={"bash": 9}),
        ]
    )
    own = {name: value for name, value in found.items() if name in OF_OUR_LOOP or name.endswith("/latency_s")}
    assert own == {
        "tools/latency_s": pytest.approx(1.2 / 5),
        "tools/guess/latency_s": pytest.approx(0.2),
        "tools/look/latency_s": pytest.approx(0.4),
        "tools/parallel_calls_mean": 2.0,
        "tools/loop_exhausted_frac": 0.5,
        "tools/unknown_name_total": 1,
    }
    assert not OF_OUR_LOOP & metrics([rollout(tool_calls={"bash": 1})]).keys()


def test_no_tool_call_is_zero_and_unknown_ones_are_absent():
    none_made = metrics([rollout(tool_calls={}), rollout(tool_calls={})])
    assert none_made["tools/call_frequency"] == 0.0 and "tools/failure_frequency" not in none_made
    assert not any(name.startswith("tools/") for name in metrics([rollout(tool_calls=None)]))
    mixed = metrics([rollout(tool_calls={"bash": 3}), rollout(tool_calls={}), rollout(tool_calls=None)])
    assert mixed["tools/call_frequency"] == 1.5 and mixed["tools/bash/call_total"] == 3


def test_failures_are_counted_where_results_tell():
    silent = metrics([rollout(tool_calls={"bash": 2})])
    assert "tools/failure_frequency" not in silent and "tools/bash/failure_total" not in silent
    found = metrics(
        [
            rollout(tool_calls={"bash": 3, "edit": 1}, tool_failures={"bash": 1}),
            rollout(tool_calls={"bash": 4}, tool_failures={"bash": 0}),
            rollout(tool_calls={"bash": 100}),
        ]
    )
    assert found["tools/failure_frequency"] == 1 / 8
    assert found["tools/bash/failure_total"] == 1 and "tools/edit/failure_total" not in found
    assert found["tools/bash/call_total"] == 107


def test_names_that_a_model_invents_can_neither_flood_nor_break_the_list():
    found = metrics([rollout(tool_calls={f"tool {n}/x": n for n in range(1, 100)})])
    named = sorted(name for name in found if name.endswith("call_total"))
    assert len(named) == 24 and "tools/tool_99_x/call_total" in named
    assert plain("") == "_" and len(plain("x" * 1000)) == 64
    assert metrics([rollout(tool_calls={"a b": 1, "a/b": 2})])["tools/a_b/call_total"] == 3
    beyond = metrics([rollout(tool_calls={"bash": 1}, tool_failures={"bash": 1, "unknown": 4})])
    assert beyond["tools/failure_frequency"] == 1.0, "failures of calls that were not recorded make no share above 1"


def test_stages_have_mean_and_95th_percentile_over_those_that_reached_them():
    found = metrics([rollout(stages_s={"agent": float(n), "verify.copy": 1.0}) for n in range(101)] + [rollout()])
    assert found["stage/agent/mean_s"] == 50 and found["stage/agent/p95_s"] == 95
    assert found["rollout/duration_s"] == 50, "a part of a stage is in the stage"
    assert "rollout/duration_s" not in metrics([rollout()])


def test_rows_turns_and_bridging():
    results = [
        rollout(num_turns=4, num_bridged_turns=3, num_completion_tokens=10, num_side_turns=1),
        rollout(num_turns=2, num_bridged_turns=0, num_completion_tokens=30),
        rollout(num_turns=0),
    ]
    found = metrics(results, rows=[[[row([1, 2], 1)], [row([1, 2], 1), row([3, 4], 1)], []]])
    assert found["rollout/turns_mean"] == 3 and found["rollout/turns_max"] == 4
    assert found["rollout/side_turns_mean"] == 0.5
    assert found["rollout/bridged_frac"] == 0.5 and found["rollout/samples_per_rollout"] == 1.5
    assert [found[f"completions/{of}_length"] for of in ("min", "mean", "max")] == [10, 20, 30]
    unknown = metrics([rollout(num_turns=4)])
    assert "rollout/bridged_frac" not in unknown and "rollout/samples_per_rollout" not in unknown


def test_drift_is_what_the_closest_row_holds_beyond_the_next_prompt():
    first = row([1, 2, 3, 4, 5, 6], 2, turns=3)
    forked = row([1, 2, 3, 9, 9], 4)  # three ids in common: three are left out
    found = metrics([rollout()], rows=[[[first, forked]]])
    assert found["rollout/fork_frac"] == 1 / 3
    assert found["rollout/drift_tokens_mean"] == 1 and found["rollout/drift_tokens_max"] == 3
    whole = metrics([rollout()], rows=[[[first]]])
    assert whole["rollout/fork_frac"] == 0 and whole["rollout/drift_tokens_max"] == 0
    assert "rollout/fork_frac" not in metrics([rollout()], rows=[[[row([1, 2], 1)]]]), "one turn has no transition"


def test_agents_are_told_apart():
    found = metrics(
        [rollout(1.0, num_turns=2, tool_calls={"a": 1}), rollout(0.0, num_turns=4, tool_calls={"a": 3})],
        [rollout(None, group=1, harness="cmd:my agent/x", outcome=Outcome.INFRA_FAILED)],
    )
    assert found["harness/pi/reward"] == 0.5 and found["harness/pi/rollout/turns_mean"] == 3
    assert found["harness/pi/tools/call_frequency"] == 2
    assert found["harness/cmd_my_agent_x/rollout/scored_frac"] == 0
    assert "harness/cmd_my_agent_x/reward" not in found


def test_sources_are_told_apart_in_a_run_that_has_several():
    whole = {"reward_mean": 0.5, "reward_ci": (0.25, 0.75), "pass_at_1": 0.5, "pass_at_1_ci": (0, 1)}
    found = metrics(
        [rollout(1.0, source="a/b", rewards={"won": 1.0}), rollout(0.0, source="a/b", rewards={"won": 0.0})],
        [rollout(0.25, group=1, source="c", rewards={"won": 0.5}), rollout(None, group=1, source="c")],
        evaluation={**whole, "sources": {"c": {**whole, "reward_mean": 0.125, "pass_at_1_ci": None}}},
    )
    assert (found["source/a_b/reward"], found["source/c/reward"]) == (0.5, 0.25)
    assert found["source/a_b/groups_total"] == found["source/c/groups_total"] == 1
    assert found["source/a_b/rewards/won"] == 0.5 and found["source/c/rewards/won"] == 0.5
    assert found["source/c/rollout/scored_frac"] == 0.5
    assert found["source/c/eval_reward"] == 0.125 and found["source/c/eval_reward_ci_low"] == 0.25
    assert "source/c/eval_pass_at_1_ci_low" not in found
    assert all(metric_names.find(name) for name in found), "and each is in the table"
    assert not any(name.startswith("source/") for name in metrics([rollout(1.0), rollout(0.0)]))


def test_what_episodes_report_is_told_by_source_over_those_that_report_it():
    found = metrics(
        [
            rollout(harness="Wordle", facts={"guesses": 2.0, "a b": 1.0}),
            rollout(harness="Wordle", facts={"guesses": 4.0}),
        ],
        [rollout(group=1, harness="Catch", source="catch", facts={"guesses": 0.0}), rollout(group=1, harness="Catch")],
    )
    assert {name: value for name, value in found.items() if "/facts/" in name} == {
        "harness/Wordle/facts/guesses": 3.0,
        "harness/Wordle/facts/a_b": 1.0,
        "harness/Catch/facts/guesses": 0.0,
        "source/catch/facts/guesses": 0.0,
    }
    assert all(metric_names.find(name) is not None for name in found)
    flood = metrics([rollout(harness="x", facts={f"n{n}": 1.0 for n in range(100)})])
    assert sum("/facts/" in name for name in flood) == 24


def test_staleness_is_told_by_its_distribution():
    found = metrics([rollout()], staleness=[0, 0, 1, 3], limit=3)
    assert found["sample/staleness_mean"] == 1 and found["sample/staleness_max"] == 3
    assert [found[f"sample/staleness_{n}_frac"] for n in range(4)] == [0.5, 0.25, 0, 0.25]
    far = metrics([rollout()], staleness=[0, 9], limit=20)
    assert far["sample/staleness_over_7_frac"] == 0.5 and "sample/staleness_8_frac" not in far


def test_outcomes_drops_queues_and_phases():
    found = metrics(
        [rollout()],
        dropped={DropReason.STALE: 2},
        outcomes={"ok": 3, "infra_failed": 1},
        num_running=5,
        group_counts={"ready": 2, "trained": 8},
        sync_phases_s={"write": 0.5},
        engine_idle=0.25,
        evaluation={"reward_mean": 0.5, "reward_ci": (0.4, 0.6), "pass_at_1": None, "pass_at_1_ci": None},
    )
    assert found["outcome/ok_total"] == 3 and found["outcome/truncated_total"] == 0
    assert found["groups/dropped_total"] == 2 and found["groups/dropped_stale_total"] == 2
    assert found["groups/dropped_no_spread_total"] == 0
    assert (found["queue/running_rollouts"], found["queue/ready_groups"], found["queue/running_groups"]) == (5, 2, 0)
    assert found["sync/write_s"] == 0.5 and found["perf/engine_idle_frac"] == 0.25
    assert found["eval_reward_ci_low"] == 0.4 and "eval_pass_at_1" not in found
    unknown = metrics([rollout()])
    assert not [name for name in unknown if name.startswith(("outcome/", "queue/", "sync/", "eval", "perf/"))]


def test_the_learner_is_idle_while_it_waits_and_tokens_are_compared():
    batch = StepBatch([TrainGroup(0, "t", [rollout()], [[]])], [], [], [], wait_s=3.0, taken_at=100.0)
    batch.samples = [{"completion_mask": torch.tensor([0, 0, 1, 1])}]
    found = step_metrics(StepFacts(batch, 0, forwarded_tokens=8, step_s=12.0, ready_at={0: 90.0, 7: 0.0}))
    assert found["perf/learner_idle_frac"] == 0.25 and found["batch/trained_per_forwarded"] == 0.25
    assert found["sample/time_in_queue_s"] == 10


# -- the engine's idleness -----------------------------------------------------------------------------------------


def test_busy_time_is_counted_once():
    calls = [(5, 20), (0, 4), (1, 3), (8, 9), (30, 40)]
    assert busy_seconds(calls, 2, 10) == 2 + 5
    assert busy_seconds([], 0, 1) == 0


def call(index, started_at, finished_at):
    return Turn(
        f"t{index}", "s", index, "openai_chat", {"messages": []}, {}, {}, [1], [2], [-0.1], [], {}, "stop",
        TurnStatus.OK, TurnRole.AGENT, started_at=started_at, finished_at=finished_at,
    )  # fmt: skip


async def test_the_engine_is_idle_while_no_recorded_call_is_under_way(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    unknown = EngineWatch(path)
    assert unknown.idle_share(10) is None, "no store, so nothing is known"
    store, session = Store.open(path), Session("s", "token", SessionPolicy(), {})
    await store.put_turn(call(0, 0.0, 1000.0), session)  # of the run before it was continued
    now = 0.0
    watch = EngineWatch(path, clock=lambda: now)
    now = 110.0
    await store.put_turn(call(1, 100.0, 105.0), session)
    assert watch.idle_share(10) is None, "the first step is judged after the second"
    await store.put_turn(call(2, 108.0, 114.0), session)  # was under way when the first step ended
    now = 120.0
    assert watch.idle_share(10) == pytest.approx(0.3)  # [100, 110): busy 100-105 and 108-110
    now = 130.0
    assert watch.idle_share(10) == pytest.approx(0.6)  # [110, 120): busy 110-114
    now = 140.0
    assert watch.idle_share(10) == 1.0
    await store.close()


# -- the table ----------------------------------------------------------------------------------------------------


def test_the_page_has_the_table():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8").endswith("-->\n\n" + metric_names.table()), (
        "put the output of `python -m harness_trainer.learner.metric_names` at the end of docs/metrics.md"
    )
    names = [metric.name for section in metric_names.SECTIONS.values() for metric in section]
    assert len(names) == len(set(names))


def test_all_that_is_computed_here_is_in_the_table():
    found = metrics(
        [
            rollout(
                verifier_reward=1.0, warm=True, num_turns=1, num_bridged_turns=0, num_completion_tokens=3,
                stages_s={"agent": 1.0}, tool_calls={"bash": 1}, tool_failures={"bash": 0},
            )
        ],
        rows=[[[row([1, 2, 3], 1, turns=2)]]], staleness=[0], limit=9, outcomes={"ok": 1}, num_running=0,
        group_counts={}, sync_phases_s={"write": 0.1}, engine_idle=0.0, step_s=1.0,
        evaluation={"reward_mean": 0.5, "reward_ci": (0, 1), "pass_at_1": 0.5, "pass_at_1_ci": (0, 1)},
    )  # fmt: skip
    assert not [name for name in found if metric_names.find(name) is None]
    assert {name.removeprefix("harness/pi/") for name in found if "/pi/" in name} >= metric_names.PER_HARNESS

"""What a finished rollout remembers for the metrics of its step: failed tools, bridged turns, the verifier's word."""

from __future__ import annotations

from pathlib import Path

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.harnesses import load_harness
from harness_trainer.rewards.outcome import failures_by_name, num_failures, num_outcomes_unknown
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, RolloutResult
from tests.capture.test_graph import turn
from tests.rollouts.rolling import rolling, task

GOOD, BAD = ("bash", {"command": "true"}), ("bash", {"command": "exit 3"})
WRITE = ("write_file", {"path": "a", "content": "b"})


async def rolled(tmp_path: Path, **settings: str) -> RolloutResult:
    replies = [Reply("", tool_calls=[GOOD, BAD]), Reply("", tool_calls=[WRITE]), "the moon"]
    async with rolling(tmp_path, ScriptedEngine(replies), load_harness("pyagent"), **settings) as means:
        return await run_rollout(Job("g0-0-a", 0, 0, task(tmp_path)), means)


async def test_tools_and_bridged_turns_are_counted_from_the_capture_and_survive_the_store(tmp_path: Path) -> None:
    result = await rolled(tmp_path)
    assert result.tool_calls == {"bash": 2, "write_file": 1}
    assert result.tool_failures == {"bash": 1}, "no result of write_file tells"
    assert result.num_bridged_turns is not None and 0 <= result.num_bridged_turns < result.num_turns
    assert result.verifier_reward is None, "the reward is the verifier's own"
    store = RolloutStore(tmp_path / "kept.sqlite")
    store.open_group(0, "moon", "pyagent")
    store.start_rollout(result.rollout_id, 0, 0, 0)
    store.finish_rollout(result, final=True)
    store.group_ready(0)
    (kept,) = store.results(0)
    assert (kept.tool_failures, kept.num_bridged_turns) == (result.tool_failures, result.num_bridged_turns)
    assert store.ready_times(1) == {}
    store.mark_trained([0], 1)
    assert list(store.ready_times(1)) == [0] and store.ready_times(1)[0] > 1e9
    store.close()


async def test_the_verifiers_reward_is_kept_beside_a_reward_functions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(outcome):\n    return 0.25\n")
    result = await rolled(tmp_path, reward=f"{tmp_path / 'mine.py'}:reward")
    assert (result.reward, result.verifier_reward) == (0.25, 1.0)


def asked(*results: tuple[str, str, str]) -> list[dict[str, object]]:
    """(call id, tool, what it returned) as the messages of the next request."""
    return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, _, text in results]


def test_a_failure_belongs_to_the_tool_that_was_called_and_counts_once() -> None:
    first, second, third = turn(0, [1], [2]), turn(1, [1], [2]), turn(2, [1], [2])
    results = (("a", "bash", "exit code: 1"), ("b", "edit", "Error: no such file"), ("c", "read", "some text"))
    first.message = {
        "role": "assistant",
        "tool_calls": [{"id": call_id, "function": {"name": tool}} for call_id, tool, _ in results],
    }
    second.request["messages"] = asked(*results)
    third.request["messages"] = asked(*results, ("d", "?", "Error: of a call that is in no reply"))
    assert failures_by_name([first, second]) == {"bash": 1, "edit": 1}
    assert failures_by_name([first, second, third]) == {"bash": 1, "edit": 1, "unknown": 1}
    assert num_failures([first, second, third]) == 3
    assert num_outcomes_unknown([first, second, third]) == 1, "of read's"
    assert failures_by_name([first]) is None
    assert (num_failures([first]), num_outcomes_unknown([first])) == (0, 3), "unknown is not hidden in a 0"
    assert (num_failures([]), num_outcomes_unknown([])) == (0, 0)

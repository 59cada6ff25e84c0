"""Rewards of single turns: read strictly, matched with the agent's calls, and carried to the tokens that they judge."""

import json

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.harnesses import load_harness
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.learner.rows import rows_from_trace
from harness_trainer.learner.step_batch import build_step
from harness_trainer.rewards.turns import parse_turn_rewards
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, Outcome
from tests.rollouts.rolling import rolling, task

TWO_CALLS = [Reply("", tool_calls=[("bash", {"command": "true"})]), "the moon"]


def verify(turn_rewards):
    return f"""
L="${{SANDBOX_ROOT:-}}/logs/verifier"
echo 0.5 > "$L/reward.txt"
printf '%s' '{turn_rewards}' > "$L/turn_rewards.json"
"""


async def rolled(tmp_path, replies, script, **settings):
    job_task = task(tmp_path, verify=script)
    async with rolling(tmp_path, ScriptedEngine(replies), load_harness("pyagent"), **settings) as means:
        return await run_rollout(Job("g0-0-a", 0, 0, job_task), means)


@pytest.mark.parametrize(("text", "rewards"), [("[0, null, -0.5]", [0.0, None, -0.5]), ("[]", []), (" [1]\n", [1.0])])
def test_a_list_of_numbers_and_nulls_is_read(text, rewards):
    assert parse_turn_rewards(text) == rewards


@pytest.mark.parametrize(
    "text",
    ["", "1", "{}", '{"a": 1}', "[true]", '["1"]', "[NaN]", "[Infinity]", "[1e999]", "[[1]]", "[1", f"[{'9' * 400}]"],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError):
        parse_turn_rewards(text)


async def test_the_tests_may_judge_every_call_and_the_judgement_reaches_its_tokens(tmp_path):
    result = await rolled(tmp_path, TWO_CALLS, verify("[0.25, 1]"))
    assert (result.outcome, result.reward) == (Outcome.OK, 0.5), result.detail
    assert list(result.turn_rewards.values()) == [0.25, 1.0]
    rows = rows_from_trace(result.trace).rows
    assert [turn for row in rows for turn in row.turn_ids] == list(result.turn_rewards)
    group = TrainGroup(0, "moon", [result, result], [rows, []])
    (sample,) = build_step(
        [group], lambda version: 0, ObjectiveConfig(advantage="group_mean", turn_reward_weight=1.0)
    ).samples
    (first, second) = rows[0].turn_spans
    # Centred by the mean of 0.625 over both rollouts: -0.375 and 0.375, the first turn's with what follows it.
    assert set(sample["advantages"][slice(*first)]) == {0.0}
    assert set(sample["advantages"][slice(*second)]) == {0.375}


@pytest.mark.parametrize("written", ["[0.25]", "[1, 2, 3]", "[NaN, 1]", "nonsense"])
async def test_a_judgement_that_does_not_fit_is_a_finding_and_the_reward_stands(tmp_path, written):
    result = await rolled(tmp_path, TWO_CALLS, verify(written))
    assert (result.outcome, result.reward, result.turn_rewards) == (Outcome.OK, 0.5, {})
    assert any("turn_rewards_unusable" in finding for finding in result.findings)


async def test_without_such_a_file_no_turn_is_judged_and_nothing_is_said(tmp_path):
    result = await rolled(tmp_path, TWO_CALLS, 'echo 1 > "${SANDBOX_ROOT:-}/logs/verifier/reward.txt"')
    assert (result.reward, result.turn_rewards) == (1.0, {})
    assert not any("turn_rewards" in finding for finding in result.findings)


FUNCTION = """
def reward(outcome):
    ids = [entry["metadata"]["node_id"] for entry in outcome.trace]
    return {"reward": outcome.env_reward, "turn_rewards": {%s}}
"""


async def test_a_persons_function_may_judge_turns_by_their_ids(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION % "ids[1]: 0.75")
    result = await rolled(tmp_path, TWO_CALLS, verify("[0, 0]"), reward=f"{tmp_path / 'mine.py'}:reward")
    assert (result.reward, list(result.turn_rewards.values())) == (0.5, [None, 0.75])


@pytest.mark.parametrize("entry", ["'nobody': 1.0", "ids[0]: 'good'", "ids[0]: float('nan')"])
async def test_what_a_function_says_of_no_turn_or_without_a_number_is_a_finding(tmp_path, entry):
    (tmp_path / "mine.py").write_text(FUNCTION % entry)
    result = await rolled(tmp_path, TWO_CALLS, verify("[]"), reward=f"{tmp_path / 'mine.py'}:reward")
    assert result.outcome is Outcome.OK and result.turn_rewards == {}
    assert any("turn" in finding and "warning" in finding for finding in result.findings)


async def test_turn_rewards_survive_the_store_in_their_order(tmp_path):
    result = await rolled(tmp_path, TWO_CALLS, verify("[null, 1]"))
    text = json.dumps(list(result.turn_rewards.items()))
    store = RolloutStore(tmp_path / "store.sqlite")
    store.open_group(0, "moon", "pyagent")
    store.start_rollout(result.rollout_id, 0, 0, 0)
    store.finish_rollout(result, final=True)
    store.group_ready(0)
    group = store.take_ready(set())
    assert group is not None
    (kept,) = group.results
    assert json.dumps(list(kept.turn_rewards.items())) == text

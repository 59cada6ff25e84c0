"""One rollout end to end: real gateway, sandbox, agent process and verifier; only the engine is scripted."""

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineError
from harness_trainer.harnesses import load_harness
from harness_trainer.rollouts.types import Outcome
from tests.rollouts.rolling import CALL, roll, shell_agent, task


async def test_an_agent_with_tools_is_captured_scored_and_traced(tmp_path):
    write = Reply("Writing.", tool_calls=[("write_file", {"path": "answer.txt", "content": "moon"})])
    engine = ScriptedEngine([write, "The moon is up."], version="v3")
    result = await roll(tmp_path, engine, load_harness("pyagent"))
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.OK, 1.0, 2), result.detail
    (row,) = result.trace["turns"]
    first, second = row["metadata"]["turns"]
    assert first["start"] == len(row["prompt_token_ids"]) and first["end"] < second["start"], "one extends the other"
    assert sum(row["loss_mask"]) == sum(t["end"] - t["start"] for t in (first, second)) == result.num_completion_tokens
    assert first["policy_versions"][0]["version"] == "v3"
    assert (tmp_path / "artifacts" / "g0-0-a" / "agent.stdout.log").read_text().strip() == "The moon is up."


async def test_the_pinned_sampling_wins_over_the_agents(tmp_path):
    engine = ScriptedEngine(["moon"])
    await roll(tmp_path, engine, load_harness("pyagent-chat"), temperature=0.7)
    assert engine.requests[0].sampling["temperature"] == 0.7
    assert engine.requests[0].max_tokens == 2048


async def test_an_agent_that_fails_is_scored_by_the_verifier(tmp_path):
    agent = shell_agent(CALL + "> /dev/null; touch answer.txt; echo oh no >&2; exit 3")
    result = await roll(tmp_path, ScriptedEngine(["hm"]), agent)
    assert (result.outcome, result.reward) == (Outcome.AGENT_FAILED, 0.5)
    assert "exit code 3" in result.detail and "oh no" in result.detail


async def test_an_engine_that_fails_for_good_is_infra_even_if_the_agent_exits_cleanly(tmp_path):
    engine = ScriptedEngine(["moon"], faults={n: EngineError("CUDA is on fire") for n in range(20)})
    result = await roll(tmp_path, engine, shell_agent(CALL + "> /dev/null; touch answer.txt; exit 0"))
    assert (result.outcome, result.reward) == (Outcome.INFRA_FAILED, None)
    assert "CUDA is on fire" in result.detail


async def test_an_engine_fault_that_a_retry_recovers_from_is_a_normal_rollout(tmp_path):
    engine = ScriptedEngine(["the moon"], faults={0: EngineError("hiccup")})
    result = await roll(tmp_path, engine, load_harness("pyagent-chat"))
    assert (result.outcome, result.reward) == (Outcome.OK, 1.0), result.detail
    assert result.num_trainable_turns == 1


async def test_an_agent_that_never_calls_the_model_is_infra_with_its_own_words(tmp_path):
    result = await roll(tmp_path, ScriptedEngine(["x"]), shell_agent("echo no such provider >&2; exit 0"))
    assert (result.outcome, result.reward) == (Outcome.INFRA_FAILED, None)
    assert "no model call" in result.detail and "no such provider" in result.detail


async def test_the_shipped_agent_that_runs_out_of_its_turns_is_truncated_and_its_work_is_scored(tmp_path):
    again = Reply("", tool_calls=[("bash", {"command": "touch answer.txt"})])
    result = await roll(tmp_path, ScriptedEngine([again]), load_harness("pyagent"), max_turns=2)
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.TRUNCATED, 0.5, 2), result.detail
    assert (result.exit_code, result.detail) == (3, "limit of the agent's own: turns")


async def test_the_turn_budget_truncates_and_the_work_is_still_scored(tmp_path):
    again = Reply("", tool_calls=[("bash", {"command": "touch answer.txt"})])
    call = CALL.replace('"go"', "\"go '$i'\"")  # another request each time: the same one would be a retry
    agent = shell_agent(f"for i in 1 2 3 4 5; do {call} > /dev/null; done; touch answer.txt; exit 1")
    result = await roll(tmp_path, ScriptedEngine([again]), agent, max_turns=2)
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.TRUNCATED, 0.5, 2)
    assert "max_turns" in result.detail


async def test_an_agent_that_hangs_is_truncated_and_scored(tmp_path):
    agent = shell_agent(CALL + "> /dev/null; touch answer.txt; sleep 600")
    slow = task(tmp_path, agent_timeout_s=2.0)
    result = await roll(tmp_path, ScriptedEngine(["x"]), agent, job_task=slow)
    assert (result.outcome, result.reward) == (Outcome.TRUNCATED, 0.5), result.detail


@pytest.mark.parametrize("wrote", ["", "nan", "1e9", "1.0 and more", "True"])
async def test_a_verifier_that_says_nothing_usable_is_unknown_and_not_zero(tmp_path, wrote):
    verify = f'printf "%s" "{wrote}" > "$SANDBOX_ROOT/logs/verifier/reward.txt"' if wrote else "exit 0"
    broken = task(tmp_path, verify=verify)
    result = await roll(tmp_path, ScriptedEngine(["moon"]), shell_agent(CALL), job_task=broken)
    assert (result.outcome, result.reward) == (Outcome.INFRA_FAILED, None)
    assert "not scored" in result.detail


async def test_log_probabilities_that_are_not_numbers_make_the_capture_invalid_and_keep_the_reward(tmp_path):
    engine = ScriptedEngine([Reply("moon", logprobs=[None] * 5)])
    result = await roll(tmp_path, engine, load_harness("pyagent-chat"))
    assert (result.outcome, result.reward) == (Outcome.CAPTURE_INVALID, 1.0), result.detail
    assert result.trace["turns"] == [] and "nothing_trainable" in result.detail


async def test_the_agent_sees_its_token_and_no_other_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("CAPTURE_PROXY_ADMIN_KEY", "the-admin-key")
    monkeypatch.setenv("HF_TOKEN", "a-provider-key")
    result = await roll(tmp_path, ScriptedEngine(["moon"]), shell_agent(CALL + "> /dev/null; env"))
    seen = (tmp_path / "artifacts" / "g0-0-a" / "agent.stdout.log").read_text()
    assert result.outcome is Outcome.OK
    assert "TOKEN=" in seen
    assert "the-admin-key" not in seen and "a-provider-key" not in seen

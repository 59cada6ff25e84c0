"""What a rollout came to, by the facts that are known of it: model, agent, tests. The most decisive fact wins."""

from __future__ import annotations

from typing import Any

import pytest

from capture_proxy.types import Capture, Session, SessionPolicy, Turn, TurnRole, TurnStatus
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.reading import AgentReport
from harness_trainer.rewards.base import Code, Finding, VerifierResult
from harness_trainer.rollouts.rollout import decide
from harness_trainer.rollouts.types import Outcome, RolloutResult
from sandboxes.base import RunResult

UNSCORED = {
    "wrote nothing": Code.REWARD_MISSING,
    "not finite": Code.REWARD_NOT_FINITE,
    "out of range": Code.REWARD_OUT_OF_RANGE,
    "timed out": Code.VERIFIER_TIMEOUT,
    "out of memory": Code.VERIFIER_OOM,
    "workspace too large": Code.WORKSPACE_TOO_LARGE,
}


def outcome(
    *,
    fault: str | None = None,
    limit: str | None = None,
    finish: str = "stop",
    turns: int = 1,
    exit_code: int | None = 0,
    reward: float | None = 1.0,
    code: Code | None = None,
    trainable: int = 1,
) -> RolloutResult:
    session = Session("r", "t", SessionPolicy(), {}, last_fault=fault, limit_hit=limit)
    turn = Turn(
        *("r-0", "r", 0, "openai_chat", {}, {}, {}, [1], [2], [-0.1], [], {}, finish, TurnStatus.OK, TurnRole.AGENT)
    )
    result = RolloutResult("r", 0, "task", "harness", 0, Outcome.OK, None, num_trainable_turns=trainable)
    findings = () if code is None else (Finding(code, "why"),)
    rewards: dict[str, Any] = {} if reward is None else {"reward": reward}
    verdict = VerifierResult(
        reward, "" if reward is not None else "why", "", 0.1, False, rewards=rewards, findings=findings
    )
    agent = RunResult(exit_code, "", "oh no", exit_code is None, False)
    decide(result, Capture(session, [turn] * turns), agent, verdict, AgentReport(), load_harness("pyagent"))
    return result


@pytest.mark.parametrize(
    ("facts", "expected", "reward"),
    [
        ({}, Outcome.OK, 1.0),
        ({"reward": 0.0}, Outcome.OK, 0.0),
        ({"exit_code": 1, "reward": 0.0}, Outcome.AGENT_FAILED, 0.0),  # the agent's own failure is scored
        ({"exit_code": None, "reward": 0.5}, Outcome.TRUNCATED, 0.5),  # its time-out too
        ({"limit": "max_turns", "exit_code": 1, "reward": 0.5}, Outcome.TRUNCATED, 0.5),
        ({"finish": "length", "exit_code": 1}, Outcome.TRUNCATED, 1.0),
        # A model-side fault that nothing recovered from is nobody's work, whatever the tests then say.
        ({"fault": "502", "reward": 0.0}, Outcome.INFRA_FAILED, None),
        ({"fault": "502", "exit_code": 1, "reward": 0.0}, Outcome.INFRA_FAILED, None),
        ({"fault": "502", "exit_code": None, "reward": 1.0}, Outcome.INFRA_FAILED, None),
        ({"fault": "502", "limit": "deadline", "reward": 1.0}, Outcome.INFRA_FAILED, None),
        ({"turns": 0, "reward": 0.0}, Outcome.INFRA_FAILED, None),
        # Tests that say nothing are no zero, whatever the agent did.
        ({"reward": None}, Outcome.INFRA_FAILED, None),
        ({"reward": None, "exit_code": 1}, Outcome.INFRA_FAILED, None),
        ({"reward": None, "exit_code": None}, Outcome.INFRA_FAILED, None),
        ({"reward": None, "limit": "max_turns"}, Outcome.INFRA_FAILED, None),
        ({"trainable": 0}, Outcome.CAPTURE_INVALID, 1.0),
    ],
)
def test_the_most_decisive_fact_decides(facts: dict[str, Any], expected: Outcome, reward: float | None) -> None:
    result = outcome(**facts)
    assert (result.outcome, result.reward) == (expected, reward), result
    assert (result.rewards == {}) == (reward is None)
    assert bool(result.detail) == (expected is not Outcome.OK)


@pytest.mark.parametrize("code", UNSCORED.values(), ids=UNSCORED)
def test_a_rollout_that_was_not_scored_says_so_with_a_code(code: Code) -> None:
    result = outcome(reward=None, code=code)
    assert (result.outcome, result.reward, result.failed_stage) == (Outcome.INFRA_FAILED, None, "verify")
    assert result.findings == [f"verifier: {code}: why"] and result.detail == "not scored: why"

"""What a rollout on an OpenEnv Harbor server came to: by what the server tells, and by our capture of it.

Owns reading the server's `HarborRolloutResult` (which comes from another machine and another version of the library, so
nothing in it is taken for granted) and the table of outcomes. Called by `harbor_server`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from capture_proxy.graph import assign_roles
from capture_proxy.types import Capture, Severity, Turn, TurnRole
from harness_trainer.rollouts.counts import count
from harness_trainer.rollouts.types import Outcome, RolloutResult

_QUESTIONS = ("Reply with the single word: ok", "Use the bash tool to list the files in /tmp.")  # OpenEnv's, of engines
# By Harbor's names for what went wrong; every other failure with a reward is the agent's.
_STAGES = {
    "EnvironmentStartTimeoutError": "create",
    "SandboxBuildFailedError": "prepare",
    "HealthcheckError": "create",
    "AgentSetupTimeoutError": "setup",
    "VerifierTimeoutError": "verify",
    "VerifierOutputParseError": "verify",
    "DownloadVerifierDirError": "verify",
    "AddTestsDirError": "verify",
    "RewardFileNotFoundError": "verify",
    "RewardFileEmptyError": "verify",
}
_AGENT_TIMEOUT = "AgentTimeoutError"
_DROPPED = "verifier keys dropped as unusable"  # how OpenEnv says that a reward was no finite number


def without_questions(capture: Capture) -> Capture:
    """The capture without what OpenEnv asks an engine before it lets an agent at it."""
    turns = [turn for turn in capture.turns if not _is_question(turn)]
    if len(turns) == len(capture.turns):
        return capture
    assign_roles(turns)  # one of the questions offers tools, beside which an agent without any looks like a side call
    return replace(capture, turns=turns)


def _is_question(turn: Turn) -> bool:
    messages = turn.request.get("messages")
    return isinstance(messages, list) and len(messages) == 1 and messages[0].get("content") in _QUESTIONS


def describe(result: RolloutResult, capture: Capture, told: Any) -> None:
    """Counts, findings and times: ours of the capture, the server's of its trial."""
    count(result, capture)
    result.findings += [f"server: {finding}" for finding in [*told.findings, *told.param_fixes]]
    if told.trial_name:
        result.findings.append(f"server: [INFO] trial {told.trial_name} in sandbox {told.sandbox}")
    result.stages_s |= {"agent.trial": told.wall_s} if told.wall_s else {}
    result.stages_s |= {f"agent.{phase}": seconds for phase, seconds in told.phase_timings.items()}


def judge(result: RolloutResult, capture: Capture, told: Any, reward_key: str) -> None:
    """The table that says what a rollout came to, most decisive fact first: `rollout.decide`'s, for a server.

    A failure of Harbor's that has a reward is the agent's: the verifier ran after it. One that has none is the
    machinery's. An error without a kind is the server's opinion of its own capture, which is not the one we train on.
    `reward_key` is the reward that the server was told to take; "" = its own choice.
    """
    fault, limit = capture.session.last_fault, capture.session.limit_hit
    last = next((turn for turn in reversed(capture.turns) if turn.role is TurnRole.AGENT), None)
    error = " ".join((told.error or "").split())[:400]
    reason = f"{told.exception_type}: {error}" if told.exception_type else error
    result.reward, result.rewards = _reward(result, told, reward_key)
    result.timed_out = told.exception_type == _AGENT_TIMEOUT
    if fault is not None:
        _infra(result, "agent", f"model side: {fault}")
    elif not told.ok and not told.trial_name:  # it never began: a name or an index that the server does not know
        _infra(result, "prepare", reason)
        result.setup_failed = True
    elif told.exception_type in _STAGES:
        _infra(result, _STAGES[told.exception_type], reason)
    elif last is None:
        _infra(result, "agent", f"the agent made no model call ({reason or 'the server reports no error'})")
    elif limit is not None:
        result.outcome, result.detail = Outcome.TRUNCATED, f"limit: {limit}"
    elif result.timed_out:
        result.outcome, result.detail = Outcome.TRUNCATED, "limit: agent time-out"
    elif told.budget_stop_count:
        result.outcome, result.detail = Outcome.TRUNCATED, "limit: model calls, by the server's count"
    elif last.finish_reason == "length":
        result.outcome, result.detail = Outcome.TRUNCATED, "the last reply reached its output cap"
    elif told.exception_type and result.reward is not None:
        result.outcome, result.detail = Outcome.AGENT_FAILED, reason
    elif told.exception_type:
        _infra(result, "agent", reason)
    else:
        result.outcome, result.detail = Outcome.OK, ""
    if result.outcome is not Outcome.INFRA_FAILED and result.reward is None:
        _infra(result, "verify", f"not scored: {reason or 'the verifier gave no reward'}")
    if result.outcome is Outcome.INFRA_FAILED:
        result.reward, result.rewards = None, {}
    elif not result.num_trainable_turns:
        ours = [finding for finding in result.findings if not finding.startswith("server: ")]
        fatal = [finding for finding in ours if f" {Severity.FATAL} " in finding]
        result.outcome, result.detail = Outcome.CAPTURE_INVALID, "; ".join(fatal) or "nothing was sampled"


def _infra(result: RolloutResult, stage: str, detail: str) -> None:
    result.outcome, result.failed_stage, result.detail = Outcome.INFRA_FAILED, stage, detail


def _reward(result: RolloutResult, told: Any, reward_key: str) -> tuple[float | None, dict[str, float]]:
    """The server's reward and all it has by name; what is no finite number is left out and said."""
    rewards = {name: float(value) for name, value in told.rewards.items() if math.isfinite(value)}
    for name in told.rewards.keys() - rewards.keys():
        result.findings.append(f"verifier: warning reward_not_finite: {name} is {told.rewards[name]}")
    reward = told.reward
    if reward is not None and not math.isfinite(reward):
        result.findings.append(f"verifier: warning reward_not_finite: the reward is {reward}")
        reward = None
    guessed = not reward_key and told.reward_key != "reward"
    if reward is not None and guessed and any(_DROPPED in finding for finding in told.findings):
        # The one that counts may be among those it dropped; the only one left is then taken for it.
        result.findings.append(f"verifier: warning reward_uncertain: only {told.reward_key!r} was left to train on")
        reward = None
    return reward, rewards

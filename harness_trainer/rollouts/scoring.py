"""Gives a finished rollout to a person's reward function, where the run has one.

Owns what the function is shown of a rollout and what its answer changes: the reward, and nothing of the outcome; and
the sum that `reward_weights` makes of a verifier's named rewards. Called by `rollout` and, for the sum, by `slots`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from capture_proxy.types import Capture
from harness_trainer.rewards.custom import RewardFunction
from harness_trainer.rewards.outcome import (
    HarnessRolloutOutcome,
    calls_by_name,
    completion,
    main_turns,
    num_failures,
    num_outcomes_unknown,
    trace_entries,
)
from harness_trainer.rewards.turns import TurnRewards, by_turn
from harness_trainer.rollouts.types import RolloutResult


async def score(result: RolloutResult, capture: Capture, reward: RewardFunction) -> None:
    """The person's function has the last word; where it fails the reward is unknown, which is not 0."""
    result.verifier_reward = result.reward
    try:
        shown = await asyncio.to_thread(outcome_of, result, capture)
    except ValueError as error:  # OpenEnv refuses what was captured
        result.reward = None
        result.findings.append(f"reward: warning trace_refused: {error}")
        return
    scored = await reward.score(shown)
    result.reward = scored.reward
    if scored.finding:
        result.findings.append(f"reward: {scored.finding}")
    if scored.turn_rewards:
        judge_turns(result, capture, scored.turn_rewards, "reward")


def judge_turns(result: RolloutResult, capture: Capture, rewards: TurnRewards, who: str) -> None:
    """Rewards of single turns, where they fit the agent's calls; `who` gave them."""
    try:
        result.turn_rewards = by_turn(rewards, capture)
    except ValueError as error:
        result.turn_rewards = {}
        result.findings.append(f"{who}: warning turn_rewards_unusable: {error}")


def outcome_of(result: RolloutResult, capture: Capture) -> HarnessRolloutOutcome:
    """Raises ValueError when the capture is none that OpenEnv lets pass."""
    turns = main_turns(capture)
    calls = calls_by_name(turns)
    return HarnessRolloutOutcome(
        env_reward=result.reward,
        completion=completion(turns),
        trace=trace_entries(capture),
        tool_call_count=sum(calls.values()),
        tool_failure_count=num_failures(turns),
        tool_outcome_unknown_count=num_outcomes_unknown(turns),
        tool_calls_by_name=calls,
        timed_out=result.timed_out,
        harness=result.harness,
        task=result.task,
        outcome=result.outcome.value,
        exit_code=result.exit_code,
        stages_s=dict(result.stages_s),
        findings=list(result.findings),
        rewards=dict(result.rewards),
    )


def weigh(result: RolloutResult, weights: Mapping[str, float]) -> None:
    """Partial credit: the reward becomes the weighted sum of the named ones. A named one that is missing is no zero."""
    if not weights or result.reward is None:
        return
    missing = [name for name in weights if name not in result.rewards]
    if not missing:
        result.reward = sum(weight * result.rewards[name] for name, weight in weights.items())
        return
    result.reward = None
    given = ", ".join(result.rewards) or "none"
    result.findings.append(
        f"reward: warning reward_missing: the tests gave no {', '.join(missing)} to weigh (named rewards: {given})"
    )

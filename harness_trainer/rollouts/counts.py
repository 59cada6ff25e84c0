"""What a rollout's capture says in numbers and findings. Called wherever a rollout becomes a result."""

from __future__ import annotations

from capture_proxy.trace import rollout_report
from capture_proxy.types import Capture, TurnRole
from harness_trainer.rewards.outcome import calls_by_name, failures_by_name, main_turns
from harness_trainer.rollouts.types import RolloutResult


def count(result: RolloutResult, capture: Capture) -> None:
    """Fill the result's counts, tool calls and findings from the capture."""
    agent_turns = [turn for turn in capture.turns if turn.role is TurnRole.AGENT]
    result.num_turns = len(agent_turns)
    result.num_side_turns = len(capture.turns) - len(agent_turns)
    result.num_completion_tokens = sum(len(turn.completion_ids_T) for turn in agent_turns)
    summed_up = rollout_report(capture)
    result.num_trainable_turns = summed_up.num_trained_turns
    result.num_bridged_turns = sum(turn.bridged_from is not None for turn in agent_turns)
    answered = main_turns(capture)
    result.tool_calls, result.tool_failures = calls_by_name(answered), failures_by_name(answered)
    for turn in capture.turns:
        result.findings += [f"{turn.turn_id}: {f.severity} {f.code}: {f.detail}" for f in turn.findings]
    result.findings += [f"rollout: {f.severity} {f.code}: {f.detail}" for f in summed_up.findings]

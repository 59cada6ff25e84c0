"""From evidence to figures and a verdict.

Owns what counts as qualified and how each figure is counted. A figure that nothing tells is None, never zero. Called by
`qualify.check`.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any

from capture_proxy import graph, trace
from capture_proxy.types import Capture, Turn, TurnRole
from harness_trainer.harnesses.base import Harness
from harness_trainer.qualify.bench import Evidence
from harness_trainer.qualify.scenarios import BASE, Expect, Scenario
from harness_trainer.qualify.step import Step
from harness_trainer.rollouts.types import Outcome


class Verdict(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    GAVE_UP = "gave up"  # the agent ends at a fault that others survive; it was recorded as no success
    NOT_OFFERED = "not offered"  # the agent has no tool for it, or this machine cannot watch it


@dataclass(frozen=True, slots=True)
class Line:
    """One agent in one scenario. None = unknown, or there is nothing to count."""

    harness: str
    scenario: str
    verdict: Verdict
    why: str  # one line for people; "" = passed, nothing to say
    outcome: str = ""
    num_turns: int | None = None  # of the agent, as captured
    num_asked: int | None = None  # replies that the scripted model gave to the agent's own calls
    num_trained: int | None = None
    num_conversations: int | None = None  # the agent's own and one per sub-agent
    num_rows: int | None = None
    num_side: int | None = None
    num_bridged: int | None = None  # turns whose prompt was continued token by token
    num_following: int | None = None  # turns that could have been: all but the first of each lineage
    drift_tokens: int | None = None
    num_mask: int | None = None  # sampled tokens that are trained
    num_sampled: int | None = None  # of the agent's turns
    num_coalesced: int | None = None
    first_call_s: float | None = None  # from a ready sandbox
    seconds: float | None = None
    dialects: list[str] = field(default_factory=list)
    routes: dict[str, int] = field(default_factory=dict)
    refused: list[str] | None = None  # hosts; None = nobody watched
    step: Step | None = None  # None = nobody learned from it

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value}


def line_of(harness: Harness, scenario: Scenario, evidence: Evidence) -> Line:
    counted = _counted(evidence.capture, real_engine=scenario.free) if evidence.capture is not None else {}
    verdict, why = _judge(scenario, evidence)
    result, director = evidence.result, evidence.director
    if verdict is Verdict.PASSED and scenario.expect is Expect.DONE and not scenario.free:
        verdict, why = _judge_rows(harness, counted, director.num_conversations)
    return Line(
        harness=harness.name,
        scenario=scenario.name,
        verdict=verdict,
        why=why,
        outcome=result.outcome.value,
        num_asked=None if scenario.free else director.num_asked,
        num_conversations=None if scenario.free else director.num_conversations,
        num_coalesced=evidence.num_coalesced,
        first_call_s=evidence.first_call_s,
        seconds=sum(s for stage, s in result.stages_s.items() if "." not in stage),
        routes=dict(sorted(evidence.wire.routes.items())),
        refused=evidence.refused,
        step=evidence.step,
        **counted,
    )


def _counted(capture: Capture, *, real_engine: bool) -> dict[str, Any]:
    summed_up = trace.rollout_report(capture)
    own = [turn for turn in capture.turns if turn.role is TurnRole.AGENT]
    trained = trace.trained_turns(capture)
    told = graph.build(own)
    bridged = [turn for turn in own if turn.bridged_from is not None]
    return {
        "num_turns": summed_up.num_turns,
        "num_trained": summed_up.num_trained_turns,
        "num_rows": summed_up.num_rows,
        "num_side": summed_up.num_side_turns,
        "num_bridged": len(bridged) if real_engine else None,  # the scripted engine has no template to bridge
        "num_following": len(own) - len(told.roots),
        "drift_tokens": _drift(own, told),
        "num_mask": sum(len(turn.completion_ids_T) for turn in trained.values()),
        "num_sampled": sum(len(turn.completion_ids_T) for turn in own),
        "dialects": sorted({turn.dialect for turn in capture.turns}),
    }


def _drift(own: list[Turn], told: graph.Graph) -> int:
    """Tokens of earlier turns that a later prompt should hold and has otherwise.

    A prompt that repeats no reply opens a conversation of its own (a sub-agent's) and owes the others nothing.
    """
    lengths = {turn.turn_id: len(turn.prompt_ids_P) + len(turn.completion_ids_T) for turn in own}
    goes_on = {t.turn_id for t in own if any(m.get("role") == "assistant" for m in t.request.get("messages", []))}
    forks = [node.fork for node in told.nodes.values() if node.fork is not None and node.turn_id in goes_on]
    return sum(max(0, lengths[fork.turn_id] - fork.position) for fork in forks if "rewritten" in fork.reason)


def _judge(scenario: Scenario, evidence: Evidence) -> tuple[Verdict, str]:
    result, director = evidence.result, evidence.director
    said = result.detail or f"outcome {result.outcome}"
    if director.lacks and scenario.name == BASE:
        return Verdict.FAILED, f"it offers no {scenario.needs.removeprefix('a ')} by a name that qualify knows"
    if director.lacks:
        return Verdict.NOT_OFFERED, f"it offers no {director.lacks.removeprefix('a ')}"
    if result.failed_stage not in ("", "agent"):
        return Verdict.FAILED, f"{result.failed_stage}: {said}"
    if "time-out" in said or (result.outcome is Outcome.INFRA_FAILED and "took more than" in said):
        return Verdict.FAILED, f"it did not end by itself: {said}"
    if not result.num_turns:
        return Verdict.FAILED, said
    if scenario.free:
        return _judge_free(evidence)
    if scenario.expect is Expect.STOPPED:
        return _judge_stop(scenario, evidence, said)
    done = result.outcome is Outcome.OK and result.reward == 1.0
    if scenario.expect is Expect.STANDS and not director.faulted:
        return Verdict.FAILED, f"it ended before the fault: {said}"
    if scenario.expect is Expect.STANDS and not done:
        return Verdict.GAVE_UP, said
    if result.outcome is not Outcome.OK:
        return Verdict.FAILED, said
    if result.reward != 1.0:
        return Verdict.FAILED, "it says that it is done, but what it was told to do is not"
    return _judge_capture(scenario, evidence)


def _judge_free(evidence: Evidence) -> tuple[Verdict, str]:
    result = evidence.result
    if result.outcome in (Outcome.INFRA_FAILED, Outcome.CAPTURE_INVALID) or not result.num_trainable_turns:
        return Verdict.FAILED, result.detail or "nothing of it can be trained"
    if evidence.step is not None and evidence.step.problem:
        return Verdict.FAILED, evidence.step.problem
    return Verdict.PASSED, result.detail


def _judge_stop(scenario: Scenario, evidence: Evidence, said: str) -> tuple[Verdict, str]:
    result = evidence.result
    if result.num_turns > scenario.max_turns:
        return Verdict.FAILED, f"it made {result.num_turns} calls where {scenario.max_turns} were allowed"
    if result.outcome is Outcome.TRUNCATED:
        return Verdict.PASSED, said
    return Verdict.FAILED, f"the budget ended it otherwise than as truncated: {said}"


def _judge_capture(scenario: Scenario, evidence: Evidence) -> tuple[Verdict, str]:
    """The task is done; whether the capture is whole. What a fault costs is no gap."""
    result, asked = evidence.result, evidence.director.num_asked
    if scenario.fault is not None:
        return Verdict.PASSED, "it went on"
    if result.num_turns != asked:
        turns = evidence.capture.turns if evidence.capture is not None else []
        sides = ", ".join(sorted({turn.side_reason for turn in turns if turn.side_reason})) or "no side calls"
        return Verdict.FAILED, f"it made {asked} calls of its own, captured are {result.num_turns} ({sides})"
    if result.num_trainable_turns != result.num_turns:
        return Verdict.FAILED, f"only {result.num_trainable_turns} of {result.num_turns} turns can be trained"
    return Verdict.PASSED, ""


def _judge_rows(harness: Harness, counted: dict[str, Any], conversations: int) -> tuple[Verdict, str]:
    """Whether each conversation of a whole capture is one row, where the adapter does not say why it is not."""
    rows, drift = counted["num_rows"], counted["drift_tokens"]
    if harness.splits_rows or (rows == conversations and not drift):
        return Verdict.PASSED, ""
    unlike = f"{rows} rows and {drift} drift tokens of {conversations} conversations, which should be a row each"
    return Verdict.FAILED, f"{unlike}; what cannot be helped is named in its adapter's splits_rows"

"""What a model call leaves on record: its turn, from the opening to the check of its tokens.

Owns what each of the engine's events writes into a turn, what an attempt that is made again takes back, and which
tokens cannot be trained on. Asks nobody and waits for nothing: the order of things is `turn`'s, the only caller.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, cast

from capture_proxy.dialects.base import Call
from capture_proxy.engines.base import FinishEvent, PromptEvent
from capture_proxy.errors import EngineError, SessionClosed
from capture_proxy.ledger import cut_by_window
from capture_proxy.sampling import shaping_findings
from capture_proxy.session import Admission, Live
from capture_proxy.types import Finding, Severity, Turn, TurnRole, TurnStatus


def open_turn(admission: Admission, call: Call, dialect: str, arrived: float) -> Turn:
    """A call that was admitted. It has failed until the engine has finished it."""
    sampling = dict(admission.request.sampling)
    if admission.request.max_tokens is not None:
        sampling["max_tokens"] = admission.request.max_tokens
    return Turn(
        turn_id=admission.turn_id,
        session_id=admission.live.session.session_id,
        index=admission.index,
        dialect=dialect,
        request=call.record(),
        requested_sampling=dict(call.sampling),
        sampling=sampling,
        prompt_ids_P=[],
        completion_ids_T=[],
        logprobs_T=[],
        version_spans=[],
        message={},
        finish_reason=None,
        status=TurnStatus.FAILED,
        role=TurnRole.AGENT,
        findings=[*call.findings, *admission.findings],
        started_at=arrived,
    )


def closing_turn(live: Live, call: Call, dialect: str, error: SessionClosed) -> Turn:
    """What an agent is told instead of an error: a plain assistant message that ends it. Never recorded."""
    return Turn(
        turn_id=f"{live.session.session_id}-closed",
        session_id=live.session.session_id,
        index=live.next_index,
        dialect=dialect,
        request=call.record(),
        requested_sampling={},
        sampling={},
        prompt_ids_P=[],
        completion_ids_T=[],
        logprobs_T=[],
        version_spans=[],
        message={"role": "assistant", "content": f"{error}."},
        finish_reason="stop",
        status=TurnStatus.OK,
        role=TurnRole.SIDE,
        side_reason=f"the session's end: {error.limit}",
        started_at=time.time(),
    )


@dataclass(frozen=True, slots=True)
class Blank:
    """A turn as it was before the engine was asked. What is listed here is all that an attempt writes into it."""

    sampling: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, turn: Turn) -> Blank:
        return cls(dict(turn.sampling), list(turn.findings))

    def restore(self, turn: Turn, error: EngineError) -> None:
        """The reply is of one engine: what another had sampled before it went away is no part of it."""
        detail = f"{len(turn.completion_ids_T)} tokens were sampled before the engine went away: {error}"
        self.findings.append(Finding(Severity.INFO, "sampled_anew", detail))
        turn.sampling, turn.findings = dict(self.sampling), list(self.findings)
        turn.prompt_ids_P, turn.completion_ids_T, turn.logprobs_T, turn.version_spans = [], [], [], []
        turn.message, turn.finish_reason, turn.stop_sequence, turn.first_token_at = {}, None, None, None
        turn.bridged_from, turn.bridge_refusal = None, None


def sent_message(content: str, reasoning: str) -> dict[str, Any]:
    """The assistant message as far as it was streamed: all there is when the engine never finishes."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def take_prompt(turn: Turn, event: PromptEvent) -> None:
    """What the engine was asked after all: the prompt's ids, and sampling as it filled it in."""
    turn.prompt_ids_P = event.prompt_ids_P
    turn.sampling.update(event.sampling)
    if event.max_tokens is not None:
        turn.sampling["max_tokens"] = event.max_tokens
    if event.clamped:
        detail = f"max_tokens lowered to the {event.max_tokens} that the window leaves"
        turn.findings.append(Finding(Severity.INFO, "clamped", detail))
    if not turn.is_shaped:
        turn.findings += shaping_findings(event.sampling)


def take_finish(turn: Turn, event: FinishEvent, admission: Admission) -> None:
    """Close the turn with the engine's whole message, checked against what the agent has been sent."""
    received = turn.message
    turn.finish_reason = event.finish_reason
    turn.stop_sequence = event.stop_sequence
    turn.version_spans = event.version_spans
    turn.findings += event.findings
    turn.message = dict(event.message)
    for name in ("content", "reasoning_content"):
        sent, whole = received.get(name) or "", turn.message.get(name) or ""
        if not whole.startswith(sent):
            detail = f"{name} was streamed as {sent[-80:]!r}, the whole reply has {whole[-80:]!r}"
            turn.findings.append(Finding(Severity.WARN, "stream_mismatch", detail))
            turn.message[name] = sent  # the record is of what the agent received
    if event.finish_reason == "length" and not cut_by_window(turn, admission.live.session.policy):
        turn.findings.append(Finding(Severity.INFO, "cut", _who_cut(admission)))


def _who_cut(admission: Admission) -> str:
    policy, cap = admission.live.session.policy, admission.request.max_tokens
    if cap is not None and cap == policy.max_tokens:
        return f"at the policy's max_tokens, {cap}"
    if policy.max_total_tokens is not None and policy.max_total_tokens <= admission.live.ledger.spent.tokens + (
        cap or 0
    ):
        return f"at the session's max_total_tokens, {policy.max_total_tokens}"
    return f"at the agent's own max_tokens, {cap}"


def check_tokens(turn: Turn) -> list[Finding]:
    """FATAL findings for tokens that cannot be trained on; never repaired, never cut to the shorter."""
    findings = []
    num_ids, num_logprobs = len(turn.completion_ids_T), len(turn.logprobs_T)
    if not turn.prompt_ids_P:
        findings.append(Finding(Severity.FATAL, "no_prompt_ids", "the engine did not return the prompt's ids"))
    if not num_ids and (turn.message.get("content") or turn.message.get("tool_calls")):
        findings.append(Finding(Severity.FATAL, "no_completion_ids", "the engine did not return the reply's ids"))
    if num_ids != num_logprobs:
        findings.append(Finding(Severity.FATAL, "misaligned", f"{num_ids} ids, {num_logprobs} logprobs"))
        turn.logprobs_T = [None] * num_ids
    else:
        missing = turn.logprobs_T.count(None)
        if missing:
            detail = f"{missing} of {num_ids} sampled tokens have no finite log-probability"
            findings.append(Finding(Severity.FATAL, "bad_logprob", detail))
        known = [x for x in turn.logprobs_T if x is not None] if missing else cast(list[float], turn.logprobs_T)
        if known and max(known) > 0:
            positive = [x for x in known if x > 0]
            detail = f"{len(positive)} log-probabilities are positive, the largest {max(positive)}"
            findings.append(Finding(Severity.FATAL, "positive_logprob", detail))
    covered = 0
    for span in turn.version_spans:
        if span.start != covered or span.end <= span.start:
            break
        covered = span.end
    if turn.version_spans and covered != num_ids:
        detail = f"policy versions cover {covered} of {num_ids} tokens"
        findings.append(Finding(Severity.FATAL, "version_gap", detail))
    return findings

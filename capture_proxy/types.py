"""The nouns of capture: what one model call was, and what a session is.

Owns the data types that pass between the rooms of this package and to its callers. No behaviour beyond
(de)serialisation, no I/O. Suffix `_P` is the prompt's length in tokens, `_T` the completion's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from capture_proxy.ids import Ids

IN_PROCESS = "in_process"  # `Turn.dialect` of calls that whoever trains made himself: each is the agent's work
GATEWAY_RESTARTED = "GatewayRestarted"  # how a session's `last_fault` begins when its gateway was killed


class TurnStatus(enum.StrEnum):
    """How the engine call behind a turn ended."""

    OK = "ok"  # the engine finished and the turn is committed
    ABORTED = "aborted"  # the agent hung up; what was sampled until then is kept, never trained
    FAILED = "failed"  # the engine or the network failed; `error` says how


class TurnRole(enum.StrEnum):
    """Whether a turn is the agent's work or a call beside it."""

    AGENT = "agent"
    SIDE = "side"  # titles, probes, summaries: kept, never trained; `side_reason` says why


class Severity(enum.StrEnum):
    """As in OpenEnv's validator: FATAL makes the turn untrainable, WARN does not, INFO is a note."""

    FATAL = "FATAL"
    WARN = "WARN"
    INFO = "INFO"


SHAPED = "shaped_sampling"  # a finding's code


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a person should know about a turn, e.g. `Finding(FATAL, "misaligned", "5 ids, 4 logprobs")`."""

    severity: Severity
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Completion tokens `[start, end)` of a turn were sampled by policy `version` (the engine's own string).

    Example: a 3000-token completion that ran through a weight update has
    `[VersionSpan("v6", 0, 2051), VersionSpan("v7", 2051, 3000)]`.
    """

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Turn:
    """One model call of an agent, exactly as the engine saw and sampled it.

    Example: prompt_ids_P=[1, 5, 9], completion_ids_T=[7, 2], logprobs_T=[-0.1, -0.9],
    version_spans=[VersionSpan("v3", 0, 2)], finish_reason="stop".
    """

    turn_id: str  # unique in the store, e.g. "5f0c...-0003"
    session_id: str
    index: int  # order of arrival within the session, from 0
    dialect: str  # "openai_chat", ..., or IN_PROCESS
    request: dict[str, Any]  # what the agent asked, as chat messages and tools: {"messages": [...], "tools": [...]}
    requested_sampling: dict[str, Any]  # sampling fields as the agent sent them
    sampling: dict[str, Any]  # sampling fields as the engine was asked
    prompt_ids_P: Ids  # the engine's own tokenisation of everything before this turn; [] if unknown
    completion_ids_T: list[int]  # every id the engine sampled, the end token included when it was sampled
    logprobs_T: list[float | None]  # log-probability (nats) under the sampling distribution; None = not finite/unknown
    version_spans: list[VersionSpan]  # cover [0, T) when the engine reports versions; [] = unknown
    message: dict[str, Any]  # the assistant message the agent received, chat-completions shape
    finish_reason: str | None  # "stop", "length", "tool_calls"; None when the call did not finish
    status: TurnStatus
    role: TurnRole
    side_reason: str | None = None  # set if and only if role is SIDE
    error: str | None = None  # set when status is FAILED
    findings: list[Finding] = field(default_factory=list)
    started_at: float = 0.0  # Unix seconds: the request arrived
    first_token_at: float | None = None  # Unix seconds: the first sampled id arrived; None = none did
    finished_at: float = 0.0  # Unix seconds: the reply was complete (or failed)
    bridged_from: str | None = None  # the turn whose exact ids this prompt begins with by construction; None = rendered
    bridge_refusal: str | None = None  # why a prompt was rendered anew although turns were recorded; None = it was not
    body_hash: bytes = b""  # BLAKE2b-128 of the request body; equal bodies are retries; b"" = unknown
    stop_sequence: str | None = None  # the stop string that ended the reply; None = another end, or unknown
    raw: bytes | None = None  # the request body as the agent sent it, decompressed; None = not loaded

    @property
    def capture_level(self) -> str:
        """ "tokens" when the engine gave the ids of prompt and reply, else "text" (evaluation only)."""
        return "tokens" if self.prompt_ids_P and self.completion_ids_T else "text"

    @property
    def is_shaped(self) -> bool:
        """Whether it was sampled from less than the plain softmax (`sampling.shaping_findings`)."""
        return any(finding.code == SHAPED for finding in self.findings)

    @property
    def trainable(self) -> bool:
        """Whether the sampled tokens may be trained on (finished agent turn, nothing FATAL found)."""
        return (
            self.status is TurnStatus.OK
            and self.role is TurnRole.AGENT
            and bool(self.completion_ids_T)
            and not any(f.severity is Severity.FATAL for f in self.findings)
        )


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    """What the trainer decided for a session; an agent's own wishes are recorded beside it, never obeyed.

    `sampling` overrides the agent's fields (e.g. {"temperature": 1.0, "top_p": 1.0, "top_k": -1});
    `max_tokens` caps each reply, None leaves the agent's own wish; `max_turns` caps engine calls that count as the
    agent's work, None is no cap; `max_total_tokens` caps what is sampled in the whole session, side calls included,
    None is no cap; `deadline` is Unix seconds after which calls are refused and running ones aborted, None is none.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    max_turns: int | None = None
    deadline: float | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # What a spent session (budget, deadline) answers: "refuse" = an error with `closed_status`, which ends most agents
    # at once; "reply" = a normal assistant message without tool calls, after which an agent stops by itself.
    at_limit: str = "refuse"
    closed_status: int = 403
    max_total_tokens: int | None = None


@dataclass(slots=True)
class Session:
    """One rollout's right to call the model. Its token is the only secret an agent ever holds.

    Example: Session("r17-2", "sk-...", SessionPolicy(max_turns=8), {"task": "haiku"}, sealed=False).
    """

    session_id: str  # chosen by the trainer, unique in the store
    token: str  # bearer token, random
    policy: SessionPolicy
    labels: dict[str, str]  # for people and metrics: task, harness, group
    sealed: bool = False
    created_at: float = 0.0  # Unix seconds
    last_fault: str | None = None  # the last model-side failure not yet followed by a good turn; None = healthy
    # What cut the session short, the first of them: "max_turns", "max_total_tokens", "deadline" or "context_length";
    # None = nothing did.
    limit_hit: str | None = None
    # Of several gateways on one store, the only one that serves it; "" = the one without a name.
    gateway: str = ""


@dataclass(slots=True)
class Capture:
    """Everything that was recorded of one session, in order of arrival. What `trace` and the learner read."""

    session: Session
    turns: list[Turn]

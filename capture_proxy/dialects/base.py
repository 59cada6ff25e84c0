"""The contract of a dialect: how one vendor's HTTP API says "chat with tools".

Owns the dialect-free call that every dialect parses into, and the two shapes of an answer (one body, or a stream). It
does not own what is sent to the engine (`session` pins sampling, `turn` drives the call) nor HTTP itself (`gateway`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from capture_proxy.errors import CaptureError
from capture_proxy.types import Finding, Turn


@dataclass(frozen=True, slots=True)
class Head:
    """What of a request is known before its body: e.g. Head({"model": "smol"}, {"alt": "sse"}, headers)."""

    path: Mapping[str, str]  # parameters of the route
    query: Mapping[str, str]
    headers: Mapping[str, str]  # names in lower case


@dataclass(frozen=True, slots=True)
class Call:
    """What an agent asked, in chat-completions terms.

    Example: Call("smol", [{"role": "user", "content": "hi"}], tools=[], tool_choice=None,
    sampling={"temperature": 0.7, "max_tokens": 64}, max_tokens=64, stream=True, include_usage=True).
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]  # [] = none offered
    tool_choice: Any  # None = not said
    sampling: dict[str, Any]  # the sampling fields as sent, under chat-completions names
    max_tokens: int | None  # output cap in tokens; None = not said
    stream: bool
    include_usage: bool  # the agent asked for a usage chunk at the end of the stream
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    parallel_tool_calls: bool | None = None  # None = not said
    findings: tuple[Finding, ...] = ()  # what parsing changed or dropped (a hosted tool, a system message in between)
    # A turn of the same session that this request goes on from (`previous_response_id`): `messages` then holds only
    # what is new, and the recorded history is put before it. None = the request holds the whole history.
    continues: str | None = None
    instructions: bool = False  # messages[0] is this request's own system text, not part of a continued history
    store: bool = True  # False = the agent asked that nobody may continue from this reply
    context: Any = None  # the dialect's own notes for `reply` and `stream` (custom tools, ...); never recorded

    def record(self) -> dict[str, Any]:
        """The part that a turn keeps as its `request`."""
        kept: dict[str, Any] = {"model": self.model, "messages": self.messages, "tools": self.tools}
        if self.tool_choice is not None:
            kept["tool_choice"] = self.tool_choice
        if self.instructions:
            kept["instructions"] = True
        if not self.store:
            kept["store"] = False
        if self.chat_template_kwargs:  # the prompt depends on them
            kept["chat_template_kwargs"] = self.chat_template_kwargs
        return kept


class StreamWriter(Protocol):
    """Writes one reply as a stream. Each method returns the bytes to send now; b"" is nothing."""

    media_type: str  # of the whole stream, e.g. "text/event-stream"

    def start(self, num_prompt_tokens: int | None) -> bytes:
        """The head of the stream, sent once the engine has accepted the prompt. None = length unknown."""
        ...

    def keepalive(self) -> bytes:
        """A valid no-op frame, before `start` or after it."""
        ...

    def delta(self, content: str, reasoning: str) -> bytes: ...

    def finish(self, turn: Turn) -> bytes:
        """All that is left: the rest of the text, whole tool calls, finish reason, usage, end marker.

        Called after the turn is committed; `turn.message` starts with everything that `delta` was given. Tool calls
        only come here: an agent may act on one at once, so none leaves before it is durable.
        """
        ...

    def error(self, error: CaptureError) -> bytes:
        """The end of a stream that failed after its head was sent."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """One path of a dialect, in Starlette's syntax. `kind` is what the gateway does there."""

    method: str
    path: str
    kind: str  # "call", "count" (tokens of a prompt), "models" or "model" (path parameter "model")


class Dialect(Protocol):
    """One vendor's API. Stateless: one object serves all requests."""

    name: str  # as in Turn.dialect

    @property
    def routes(self) -> Sequence[Route]: ...

    def speaks(self, head: Head) -> bool:
        """Whether a request on a path that several dialects serve (`/v1/models`) is from a client of this one."""
        ...

    def token(self, head: Head) -> str | None:
        """The session token, wherever this vendor's clients put their API key; None = none sent."""
        ...

    def parse(self, head: Head, body: bytes) -> Call:
        """Raises BadRequest for a body that is not a valid request of this dialect. Also used for "count" routes."""
        ...

    def reply(self, call: Call, turn: Turn) -> bytes:
        """The body of a reply that was not asked to stream."""
        ...

    def stream(self, turn_id: str, call: Call) -> StreamWriter: ...

    def count(self, num_tokens: int) -> bytes:
        """The body of a "count" route's answer."""
        ...

    def error(self, error: CaptureError) -> bytes:
        """The body of an error reply; its status is `error.status`."""
        ...

    def models(self, models: list[dict[str, Any]]) -> bytes: ...

    def model(self, model: dict[str, Any]) -> bytes: ...

"""The contract of an engine: a chat request in, exact tokens out.

Owns the events every engine yields and what it can prove about itself. `turn` drives it; nothing else does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from capture_proxy.types import Finding, VersionSpan


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A dialect-free request: chat-completions messages and tools plus the sampling that is in force."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]  # [] = none offered
    tool_choice: Any  # None = the engine's default
    sampling: dict[str, Any]  # effective: temperature, top_p, top_k, stop, seed, ...
    max_tokens: int | None  # None = what the window leaves
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""  # our id, sent along so that both logs agree
    parallel_tool_calls: bool | None = None  # None = the engine's default
    prompt_ids_P: list[int] | None = None  # token in: sample from exactly these; None = the engine renders `messages`
    stream: bool = True  # False = nobody waits for deltas; an engine may then send the reply as one


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """First event: the prompt as the engine tokenised it, and the output cap after clamping to the window."""

    prompt_ids_P: list[int]
    max_tokens: int | None
    clamped: bool  # True when max_tokens was lowered to what the window leaves
    sampling: dict[str, Any] = field(
        default_factory=dict
    )  # as the engine resolved it, its defaults included; {} = unknown


@dataclass(frozen=True, slots=True)
class DeltaEvent:
    """Tokens that were just sampled, and what of the message they settled.

    `ids` and `logprobs` align one to one. The three message parts may lag behind the ids (held back while a tool
    call or a multi-byte character is incomplete) but never run ahead of them.
    """

    ids: list[int]
    logprobs: list[float | None]
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # complete calls, chat-completions shape


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """Last event: how it ended, the whole message (non-streaming form), and who sampled which token."""

    finish_reason: str
    message: dict[str, Any]
    version_spans: list[VersionSpan]  # [] = the engine does not say
    findings: list[Finding] = field(default_factory=list)  # what was wrong with the engine's reply, e.g. misaligned ids
    stop_sequence: str | None = None  # the stop string that ended it; None = another end, or the engine does not say


SampleEvent: TypeAlias = PromptEvent | DeltaEvent | FinishEvent


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine was *seen* to do by real requests (see `engines.probe`). Unproven is False, never assumed."""

    model: str  # served model name
    max_model_len: int | None  # tokens; None = not reported
    token_ids: bool = False  # returns prompt and completion ids
    logprobs: bool = False  # returns one finite log-probability per sampled id
    processed_logprobs: bool = False  # they are of the sampling distribution (after temperature), not raw
    token_in: bool = False  # /inference/v1/generate takes ids
    weight_versions: bool = False  # says which policy sampled each token
    weight_update: bool = False  # the weight-transfer endpoints answer
    missing: list[str] = field(default_factory=list)  # for each False: the flag or setting that would give it

    @property
    def trainable(self) -> bool:
        return (
            self.token_ids
            and self.logprobs
            and self.processed_logprobs
            and self.token_in
            and self.weight_versions
            and self.weight_update
        )


class TextSplitter(Protocol):
    """Says which part of a reply's text is settled while the reply is still being sampled (`engines.splitter`)."""

    def feed(self, text: str) -> tuple[str, str]:
        """(content, reasoning) that may go out now."""
        ...


@dataclass(frozen=True, slots=True)
class Example:
    """A reply as a model family writes it, to see whether an engine's own parser reads it."""

    prompt_ids_P: list[int]
    completion_ids_T: list[int]  # without the end token
    messages: list[dict[str, Any]]  # what the prompt says, chat-completions shape
    tools: list[dict[str, Any]]
    call: tuple[str, dict[str, Any]]  # the function and the arguments that the reply calls
    # False = replies come in channels that only special tokens tell apart: their text can be streamed by the family's
    # own splitter alone, whatever the engine's parser makes of the whole.
    plain: bool = True


class ReplyReader(Protocol):
    """Reads replies of a model family for an engine that has no parser for it. Implementation: `rendering.Bridger`."""

    async def splitter(self, prompt_ids: list[int]) -> TextSplitter: ...

    async def read(
        self, prompt_ids: list[int], completion_ids: list[int], tools: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[Finding]]:
        """The whole reply, its end token included, as a chat message, and what of it could not be read."""
        ...

    async def example(self) -> Example: ...


class Engine(Protocol):
    """An engine that samples. Implementations: `vllm.VllmEngine` (real), `scripted.ScriptedEngine` (ships, for tests).

    `sample` yields exactly one PromptEvent, any number of DeltaEvents, one FinishEvent. Closing the generator early
    aborts the request in the engine within 2 s. Raises `PromptTooLong`, `BadRequest`, `EngineError`,
    `EngineUnreachable`.
    """

    def sample(self, request: ChatRequest) -> AsyncGenerator[SampleEvent, None]: ...

    async def render(self, request: ChatRequest) -> list[int]:
        """The prompt's ids as `sample` would have them, without sampling. Raises what `sample` raises."""
        ...

    async def takes_ids(self) -> bool:
        """Whether `sample` obeys `ChatRequest.prompt_ids_P`. Raises EngineError, EngineUnreachable."""
        ...

    def read_with(self, reader: ReplyReader) -> None:
        """Have `reader` read replies that the engine's own parser does not."""
        ...

    async def models(self) -> list[dict[str, Any]]: ...

    async def healthy(self) -> bool: ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Holds the engine's connections open for the life of the gateway."""
        ...

"""An engine through its chat endpoint alone, for servers without the token routes.

Owns `/v1/chat/completions`, streamed or not. With `return_token_ids` ids and log-probabilities are the engine's own and
the prompt's ids come back with the reply, but nobody says which policy sampled a token, so version spans stay empty.
A server that refuses or ignores that field is asked as any OpenAI-compatible one ("text": evaluation only). Called by
`engines.vllm`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import orjson

from capture_proxy.engines import wire
from capture_proxy.engines.base import ChatRequest, DeltaEvent, FinishEvent, PromptEvent, SampleEvent
from capture_proxy.errors import BadRequest, EngineError, EngineUnreachable, PromptTooLong
from capture_proxy.types import Finding, Severity

CHAT = "/v1/chat/completions"
_log = logging.getLogger(__name__)
# What every OpenAI-compatible server knows. Others refuse a request for one field beyond these.
_STANDARD = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "logit_bias",
    "response_format",
)


class ChatRoute:
    """The chat route of one server. `ids`: whether it is asked for token ids; None = its first reply tells."""

    def __init__(self, http: wire.Upstream, ids: bool | None) -> None:
        self._http = http
        self.ids = ids
        self.why_text = "asked for"  # why there are no ids

    async def sample(
        self, request: ChatRequest, chat: dict[str, Any], max_model_len: int | None
    ) -> AsyncGenerator[SampleEvent, None]:
        """The events of one reply. `chat` is the request in vLLM's schema without an output cap."""
        refusal: BadRequest | None = None
        if self.ids is not False:
            try:
                reply = _Reply()
                async for event in self._events(reply, {**chat, "return_token_ids": True}, request, max_model_len):
                    if isinstance(event, FinishEvent) and self.ids is None:
                        self._settle(reply)
                    yield event
                return
            except PromptTooLong:
                raise
            except BadRequest as error:
                if self.ids is not None:
                    raise
                refusal = error  # of this request, or of the token fields: without them we shall see
        reply = _Reply()
        try:
            async for event in self._events(reply, text_body(request, chat["model"]), request, max_model_len):
                if refusal is not None:
                    self._text_only(f"the engine refuses the token fields ({refusal})")
                    refusal = None
                if isinstance(event, FinishEvent):
                    event.findings.append(Finding(Severity.WARN, "text_only", f"no token ids: {self.why_text}"))
                yield event
        except BadRequest:
            if refusal is None:
                raise
            raise refusal from None

    async def _events(
        self, reply: _Reply, body: dict[str, Any], request: ChatRequest, max_model_len: int | None
    ) -> AsyncGenerator[SampleEvent, None]:
        cap = request.max_tokens
        if cap is not None:
            body["max_tokens"] = cap if max_model_len is None else min(cap, max_model_len)
        replies = self._streamed(reply, body) if request.stream else self._whole(body)
        prompted = False
        async with contextlib.aclosing(replies):
            async for events in replies:
                if not prompted:
                    prompted = True
                    yield _prompt(reply.prompt_ids(events[0]), body.get("max_tokens"), cap, max_model_len)
                if (delta := reply.take(events)) is not None:
                    yield delta
        yield reply.finish()

    async def _whole(self, body: dict[str, Any]) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The whole reply as one event."""
        body["stream"] = False
        try:
            whole = await self._http.ask("POST", CHAT, body, self._http.whole_timeout_s)
        except PromptTooLong:
            if body.pop("max_tokens", None) is None:
                raise
            # Some servers refuse a cap that the window does not hold, although the prompt fits.
            whole = await self._http.ask("POST", CHAT, body, self._http.whole_timeout_s)
        yield [whole]

    async def _streamed(self, reply: _Reply, body: dict[str, Any]) -> AsyncGenerator[list[dict[str, Any]], None]:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with contextlib.AsyncExitStack() as stack:
            try:
                replies = await stack.enter_async_context(self._http.stream(CHAT, body))
            except PromptTooLong:
                if body.pop("max_tokens", None) is None:
                    raise
                replies = await stack.enter_async_context(self._http.stream(CHAT, body))
            try:
                async for events in replies:
                    yield events
            except EngineUnreachable:
                # That it ends without [DONE] is forgiven to a server of text that has said how the reply ended.
                if reply.has_ids or not reply.ended:
                    raise

    def _settle(self, reply: _Reply) -> None:
        """What the first reply of a server tells of it."""
        if reply.has_ids:
            self.ids = True
        else:
            self._text_only("the engine ignores return_token_ids")

    def _text_only(self, why: str) -> None:
        self.ids, self.why_text = False, why
        _log.warning("%s: its turns are text for evaluation, none can be trained on", why)


class _Reply:
    """What has arrived of one reply."""

    def __init__(self) -> None:
        self._meter, self._calls = wire.Meter(), ToolCalls()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._usage: Any = None
        self._reason: str | None = None
        self._stop: Any = None  # the stop string that ended it, or the id of an end token
        self._has_prompt = False

    @property
    def has_ids(self) -> bool:
        return self._has_prompt or bool(self._meter.ids)

    @property
    def ended(self) -> bool:
        return self._reason is not None

    def prompt_ids(self, event: dict[str, Any]) -> list[int]:
        """The prompt's ids from the first event; [] when the server does not give them."""
        raw = event.get("prompt_token_ids")
        if raw is None:  # SGLang puts them into the choice
            choices = event.get("choices")
            choice = choices[0] if isinstance(choices, list) and choices else None
            raw = choice.get("prompt_token_ids") if isinstance(choice, dict) else None
        self._has_prompt = bool(raw)
        if raw is not None and not isinstance(raw, list):
            raise EngineError(f"the engine sent prompt ids that are no list: {str(raw)[:80]}")
        return raw or []

    def take(self, events: list[dict[str, Any]]) -> DeltaEvent | None:
        """What these events add, None for nothing. Raises EngineError for a malformed one."""
        ids: list[int] = []
        logprobs: list[float | None] = []
        content, reasoning = "", ""
        try:
            for event in events:
                self._usage = event.get("usage") or self._usage
                for choice in event.get("choices") or []:
                    self._reason = choice.get("finish_reason") or self._reason
                    self._stop = choice.get("stop_reason") or self._stop
                    whole = choice.get("message")
                    delta = whole or choice.get("delta") or {}
                    content += delta.get("content") or ""
                    reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
                    self._calls.add(delta.get("tool_calls"), whole=whole is not None)
                    entries = (choice.get("logprobs") or {}).get("content")
                    new_ids, new_logprobs = self._meter.take(choice.get("token_ids"), entries)
                    ids += new_ids
                    logprobs += new_logprobs
        except (AttributeError, TypeError) as error:
            raise EngineError(f"the engine sent a malformed event: {error}") from error
        self._content.append(content)
        self._reasoning.append(reasoning)
        return DeltaEvent(ids, logprobs, content, reasoning) if ids or content or reasoning else None

    def finish(self) -> FinishEvent:
        """Raises EngineError for a reply that the engine itself cut off, or with a tool call beyond repair."""
        if self.has_ids:
            self._meter.check_usage(self._usage)
        reason = wire.finish_reason(self._reason)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content) or None}
        if any(self._reasoning):
            message["reasoning_content"] = "".join(self._reasoning)
        calls, dropped = self._calls.finish(cut=reason == "length")
        if calls:
            message["tool_calls"] = calls
            reason = "tool_calls" if reason == "stop" else reason
        elif reason == "tool_calls":
            reason = "stop"
        stop = self._stop if isinstance(self._stop, str) else None
        return FinishEvent(reason, message, [], self._meter.findings + dropped, stop)


def text_body(request: ChatRequest, model: str) -> dict[str, Any]:
    """The request with nothing in it that an OpenAI-compatible server may not know."""
    sampling = {key: request.sampling[key] for key in _STANDARD if request.sampling.get(key) is not None}
    plain = [{k: v for k, v in m.items() if k not in ("reasoning", "reasoning_content")} for m in request.messages]
    body: dict[str, Any] = {**sampling, "model": model, "messages": plain}
    if request.tools:
        body["tools"] = request.tools
        body["tool_choice"] = request.tool_choice if request.tool_choice is not None else "auto"
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    return body


def _prompt(ids: list[int], cap: int | None, wanted: int | None, max_model_len: int | None) -> PromptEvent:
    room = None if max_model_len is None or not ids else max_model_len - len(ids)
    if room is None or wanted is None:
        return PromptEvent(ids, cap, False)
    return PromptEvent(ids, min(wanted, room), room < wanted)


@dataclass(slots=True)
class _Partial:
    call_id: str
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the arguments are a whole JSON value already, so that a name that follows begins another call."""
        return bool(self.arguments) and _is_json("".join(self.arguments))


@dataclass
class ToolCalls:
    """Puts tool calls together from their deltas, whatever a server does with ids, names and indices."""

    _parts: list[_Partial] = field(default_factory=list)
    _by_index: dict[Any, _Partial] = field(default_factory=dict)
    _by_id: dict[str, _Partial] = field(default_factory=dict)

    def add(self, deltas: Any, *, whole: bool = False) -> None:
        """`whole`: each entry is a call of its own, as in a reply that was not streamed."""
        for position, delta in enumerate(deltas or []):
            function = delta.get("function") or {}
            call_id, name = delta.get("id") or "", function.get("name") or ""
            index = ("whole", position) if whole else delta.get("index")
            part = self._find(call_id, name, index)
            if part is None:
                part = _Partial(call_id)
                self._parts.append(part)
            self._by_index[index] = part
            if call_id:
                part.call_id = part.call_id or call_id
                self._by_id[call_id] = part
            part.name = part.name or name
            arguments = function.get("arguments") or ""
            part.arguments.append(arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode())

    def _find(self, call_id: str, name: str, index: Any) -> _Partial | None:
        """The call that a delta goes on with; None = it begins one."""
        if call_id in self._by_id:
            return self._by_id[call_id]
        last = self._parts[-1] if self._parts else None
        part = self._by_index.get(index, last if index is None else None)
        # Another id under a used index is another call, and so is another name after whole arguments.
        if part is None or (call_id and part.call_id) or (name and part.name and part.complete):
            return None
        return part

    def finish(self, *, cut: bool) -> tuple[list[dict[str, Any]], list[Finding]]:
        """(the whole calls, a finding for each one that the end of the reply cut off).

        Raises EngineError for a call that can be neither shown nor explained by a cut (`cut`): an agent that is told
        nothing of it would take the reply for whole.
        """
        calls, findings = [], []
        for part in self._parts:
            arguments = "".join(part.arguments).strip() or "{}"
            if not part.name or not _is_json(arguments):
                what = f"a tool call without a name or whole arguments: {part.name!r} {arguments[:80]!r}"
                if not cut:
                    raise EngineError(f"the engine sent {what}")
                findings.append(Finding(Severity.WARN, "tool_call_dropped", what))
                continue
            call_id = part.call_id or f"call_{secrets.token_hex(8)}"
            function = {"name": part.name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
        return calls, findings


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True

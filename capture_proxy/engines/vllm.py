"""vLLM as the engine: exact ids in, exact ids, log-probabilities and policy versions out.

Owns how vLLM is asked. Transport "generate" renders the request to ids (`/v1/chat/completions/render`) unless it comes
with its prompt's ids (`engines.vllm_ids`), samples from exactly those (`/inference/v1/generate`) and has vLLM parse the
whole reply at the end (`/v1/chat/completions/derender`), so text can be streamed early and the message is still the
non-streaming form.
Transport "chat" (`engines.vllm_chat`) is for servers without those routes. Driven by `turn`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson

from capture_proxy.engines import vllm_chat, wire
from capture_proxy.engines.base import (
    ChatRequest,
    DeltaEvent,
    FinishEvent,
    PromptEvent,
    ReplyReader,
    SampleEvent,
    TextSplitter,
)
from capture_proxy.engines.splitter import Splitter
from capture_proxy.engines.vllm_ids import Frames, Reading
from capture_proxy.errors import CaptureError, EngineError, EngineUnreachable, PromptTooLong
from capture_proxy.types import Finding, Severity, VersionSpan

RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"
GENERATE = "/inference/v1/generate"
TOKENIZE = "/tokenize"
_ADAPTER = re.compile(r"v(\d+)")
# What of the engine's resolved sampling parameters a turn records.
_RESOLVED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
)


class VllmEngine:
    """One vLLM server. `transport` "auto" asks the server once whether it has the token routes.

    "generate" and "chat" give token ids, "text" asks any OpenAI-compatible server for text (evaluation only). "auto"
    ends there when the server neither has the token routes nor heeds `return_token_ids`, and logs why.
    `model` None = the first model the server lists. `read_timeout_s` bounds the silence between two chunks; it must
    exceed the longest pause for a weight update. `api_key` is vLLM's `--api-key`. With `adapters`, policies are LoRA
    adapters: each call samples with the newest one that is served as `v<n>`, and that name is its policy version.
    """

    def __init__(
        self,
        url: str,
        *,
        transport: str = "auto",
        model: str | None = None,
        api_key: str | None = None,
        read_timeout_s: float = 900.0,
        adapters: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._transport = transport
        self._model = model
        self._adapters = adapters
        self._max_model_len: int | None = None
        self._settling = asyncio.Lock()
        self._settled = False
        self._http = wire.Upstream(self.url, api_key=api_key, read_timeout_s=read_timeout_s)
        self._frames = Frames(self._ask_render)
        self._reading = Reading(lambda body: self._http.ask("POST", DERENDER, body))
        self._chat = vllm_chat.ChatRoute(self._http, {"auto": None, "text": False}.get(transport, True))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._http.open():
            yield

    async def models(self) -> list[dict[str, Any]]:
        """The models the server lists, as it lists them. Raises EngineError, EngineUnreachable."""
        models = (await self._http.ask("GET", "/v1/models", timeout_s=10.0)).get("data")
        if not isinstance(models, list) or not all(isinstance(m, dict) for m in models):
            raise EngineError("the engine's list of models is malformed")
        return models

    async def healthy(self) -> bool:
        try:
            return (await self._http.send("GET", "/health", timeout_s=5.0))[0] == 200
        except CaptureError:
            return False

    async def sample(self, request: ChatRequest) -> AsyncGenerator[SampleEvent, None]:
        await self._settle()
        if self._transport == "generate":
            events = self._generate(request)
        else:
            events = self._chat.sample(request, chat_body(request, self._model or ""), self._max_model_len)
        # Closing this generator must close the HTTP stream now, not when the inner one is collected.
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def takes_ids(self) -> bool:
        await self._settle()
        return self._transport == "generate"

    def read_with(self, reader: ReplyReader) -> None:
        self._reading.offer(reader)

    async def render(self, request: ChatRequest) -> list[int]:
        await self._settle()
        chat = self._body(request)
        if self._transport == "generate":
            try:
                return wire.token_ids((await self._http.ask("POST", RENDER, chat)).get("token_ids"), "prompt ids")
            except PromptTooLong:
                pass  # a prompt beyond the window has a length too; the other route knows no window
        asked: dict[str, Any] = {
            key: chat[key] for key in ("model", "messages", "tools", "chat_template_kwargs") if key in chat
        }
        return wire.token_ids((await self._http.ask("POST", TOKENIZE, asked)).get("tokens"), "prompt ids")

    async def _settle(self) -> None:
        """Find out, once, which model is served and which transport the server has."""
        if self._settled:
            return
        async with self._settling:
            if self._settled:
                return
            models = await self.models()
            chosen = next((m for m in models if self._model in (None, m.get("id"))), None)
            if chosen is None:
                raise EngineError(f"the engine serves no model {self._model!r}")
            self._model = str(chosen["id"])
            length = chosen.get("max_model_len")
            self._max_model_len = length if isinstance(length, int) else None
            if self._transport == "auto":
                # An empty request is refused either way: as invalid by the route, as unknown without it.
                status, _ = await self._http.send("POST", RENDER, b"{}")
                self._transport = "generate" if status in (400, 422) else "chat"
            if self._adapters and self._transport != "generate":
                raise EngineError("adapters need the engine's token routes: start vLLM with --enable-scale-out")
            self._settled = True

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        chat = chat_body(request, self._model or "")
        if self._reading.reader is not None and chat.get("tool_choice") == "auto":
            # A server without a parser refuses "auto". The tools are part of the prompt either way.
            chat["tool_choice"] = "none"
        return chat

    async def _rendered(self, request: ChatRequest, chat: dict[str, Any]) -> dict[str, Any]:
        """A request of the generate route, but for what is the same in each: the prompt's ids, resolved sampling."""
        if request.prompt_ids_P is not None:
            return await self._frames.around(chat, request.prompt_ids_P, self._max_model_len)
        rendered = await self._ask_render(chat)
        if rendered.get("reasoning_ended") is True and len(chat["messages"]) > 1:
            # The server looks for the last marker anywhere in the prompt and finds that of an earlier reply.
            rendered["reasoning_ended"] = (await self._frames.of(chat)).get("reasoning_ended")
        return rendered

    async def _ask_render(self, chat: dict[str, Any]) -> dict[str, Any]:
        rendered = await self._http.ask("POST", RENDER, chat)
        ids = rendered.get("token_ids")
        if not ids or not isinstance(ids, list) or not isinstance(rendered.get("sampling_params"), dict):
            raise EngineError("the engine rendered the request without token ids or sampling parameters")
        return rendered

    async def _newest_adapter(self) -> str | None:
        """The name of the newest policy; None = none was published yet, and the base model is what there is."""
        names = [str(model.get("id")) for model in await self.models() if model.get("parent")]
        return max(filter(_ADAPTER.fullmatch, names), key=lambda name: int(name[1:]), default=None)

    async def _generate(self, request: ChatRequest) -> AsyncGenerator[SampleEvent, None]:
        await self._reading.settle(self._model or "")
        reader = self._reading.reader
        chat = self._body(request)
        rendered = await self._rendered(request, chat)
        prompt_ids, params = rendered["token_ids"], rendered["sampling_params"]
        max_tokens, clamped = _cap(request.max_tokens, params.get("max_tokens"))
        body = {key: value for key, value in rendered.items() if value is not None}
        body |= {
            "request_id": f"{request.request_id}-{secrets.token_hex(3)}",
            "sampling_params": {**params, "max_tokens": max_tokens},
            "stream": request.stream,
            "output_mode": "text",
        }
        adapter = await self._newest_adapter() if self._adapters else None
        if adapter is not None:
            body["model"] = adapter
        if reader is not None:
            body["sampling_params"]["skip_special_tokens"] = False  # channels and calls are marked by them
        tools, reasoning = bool(request.tools), rendered.get("reasoning_parser_kwargs") is not None
        ended = rendered.get("reasoning_ended") is True
        splitter: TextSplitter = (
            await reader.splitter(prompt_ids)
            if reader is not None
            else Splitter(tools=tools, reasoning=reasoning, reasoning_ended=ended)
        )
        reply = _Reply(splitter, tools=tools, reasoning=reasoning)
        resolved = {key: params[key] for key in _RESOLVED if params.get(key) is not None}
        prompt = PromptEvent(prompt_ids, max_tokens, clamped, resolved)
        if request.stream:
            body["stream_options"] = {"include_usage": True}
            async with self._http.stream(GENERATE, body) as replies:
                yield prompt
                async for events in replies:
                    if (delta := reply.take(events)) is not None:
                        yield delta
        else:
            yield prompt  # before it is asked, so that an abort leaves the prompt on record
            whole = await self._http.ask("POST", GENERATE, body, self._http.whole_timeout_s)
            if (delta := reply.take([whole])) is not None:
                yield delta
        reply.meter.check_usage(reply.usage)
        reason = wire.finish_reason(reply.last.get("finish_reason"))
        if reader is not None:
            message = await _read(reader, request, prompt_ids, reply)
        else:
            message = await self._message(chat, prompt_ids, request.prompt_ids_P is not None, reply)
        if message.get("tool_calls") and reason == "stop":
            reason = "tool_calls"
        spans = wire.version_spans(reply.last.get("weight_versions"))
        if adapter is not None:
            # The engine's own versions are of the base weights, which never change.
            if reply.model not in (None, adapter):
                raise EngineError(f"the engine answered as {reply.model!r} where adapter {adapter!r} was asked")
            spans = [VersionSpan(adapter, 0, len(reply.meter.ids))] if reply.meter.ids else []
        stop = reply.last.get("stop_reason")  # of an end token it is the id
        yield FinishEvent(reason, message, spans, reply.meter.findings, stop if isinstance(stop, str) else None)

    async def _message(
        self, chat: dict[str, Any], prompt_ids: list[int], ids_in: bool, reply: _Reply
    ) -> dict[str, Any]:
        """The whole reply as the engine's own parsers read it; without parsers that is the text."""
        stop, reason = reply.last.get("stop_reason"), reply.last.get("finish_reason")
        # The end token is no part of what was said; a stop string leaves no such token.
        ids = reply.meter.ids[:-1] if reason == "stop" and not isinstance(stop, str) else reply.meter.ids
        plain = {"role": "assistant", "content": "".join(reply.text) or None}
        if not ids or not (reply.reasoning or reply.tools):
            return plain
        choice = {"index": 0, "finish_reason": reason, "token_ids": ids}
        generated: dict[str, Any] = {"request_id": "derender", "choices": [choice]}
        if reply.reasoning:  # only these parsers look at the prompt, to see whether it left the reasoning open
            # Of a prompt that came as ids, the header is what they may see: it holds reasoning of earlier replies.
            prompt_ids = (await self._frames.of(chat))["token_ids"] if ids_in else prompt_ids
            generated["prompt_token_ids"] = prompt_ids
        body = {"generate_response": generated, "prompt_token_ids": prompt_ids[-32:], "chat_request": chat}
        try:
            parsed = await self._http.ask("POST", DERENDER, body)
            message = tidy(parsed["choices"][0]["message"], strip_content=reply.reasoning)
        except EngineUnreachable:
            raise
        except (CaptureError, KeyError, IndexError, TypeError) as error:
            # The tokens are captured whole; a parser that fails on a weak model's output must not end the rollout.
            detail = f"shown as plain text: {type(error).__name__}: {error}"[:300]
            reply.meter.findings.append(Finding(Severity.WARN, "unparsed", detail))
            return plain
        return _without_stop(message, stop)


async def _read(reader: ReplyReader, request: ChatRequest, prompt_ids: list[int], reply: _Reply) -> dict[str, Any]:
    """The whole reply as a family's reader reads it."""
    try:
        message, findings = await reader.read(prompt_ids, reply.meter.ids, request.tools)
    except CaptureError as error:
        message = {"role": "assistant", "content": "".join(reply.text) or None}
        findings = [Finding(Severity.WARN, "unparsed", f"shown as plain text: {error}"[:300])]
    reply.meter.findings += findings
    return _without_stop(message, reply.last.get("stop_reason"))


def _without_stop(message: dict[str, Any], stop: Any) -> dict[str, Any]:
    """The text before the stop string: its tokens were sampled, the agent asked not to see it."""
    if isinstance(stop, str) and message["content"]:
        head, found, _ = message["content"].rpartition(stop)
        message["content"] = (head or None) if found else message["content"]
    return message


class _Reply:
    """What has arrived of one reply. `last` is the choice of the final chunk, {} until it comes."""

    def __init__(self, splitter: TextSplitter, *, tools: bool, reasoning: bool) -> None:
        self.tools, self.reasoning = tools, reasoning
        self.meter = wire.Meter()
        self.text: list[str] = []
        self.last: dict[str, Any] = {}
        self.usage: Any = None
        self.model: str | None = None  # as the engine names what answered; None = it does not say
        self._splitter = splitter

    def take(self, events: list[dict[str, Any]]) -> DeltaEvent | None:
        """What these events add, None for nothing. Raises EngineError for a malformed one."""
        ids: list[int] = []
        logprobs: list[float | None] = []
        content, reasoning = "", ""
        try:
            for event in events:
                self.usage = event.get("usage") or self.usage
                self.model = event.get("model") or self.model
                for choice in event.get("choices") or []:
                    if choice.get("finish_reason"):
                        self.last = choice
                    entries = (choice.get("logprobs") or {}).get("content")
                    new_ids, new_logprobs = self.meter.take(choice.get("token_ids"), entries)
                    ids += new_ids
                    logprobs += new_logprobs
                    if text := choice.get("text") or "":
                        self.text.append(text)
                        said, thought = self._splitter.feed(text)
                        content += said
                        reasoning += thought
        except (AttributeError, TypeError) as error:
            raise EngineError(f"the engine sent a malformed event: {error}") from error
        return DeltaEvent(ids, logprobs, content, reasoning) if ids or content or reasoning else None


def chat_body(request: ChatRequest, model: str) -> dict[str, Any]:
    """The request as vLLM's chat schema has it, without an output cap (the render step says what the window leaves)."""
    body: dict[str, Any] = {
        **{key: value for key, value in request.sampling.items() if value is not None},
        "model": model,
        "messages": [_history(message) for message in request.messages],
        "logprobs": True,
        "top_logprobs": 0,  # the sampled token's alone
    }
    if request.tools:
        body["tools"] = request.tools
        body["tool_choice"] = request.tool_choice if request.tool_choice is not None else "auto"
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.chat_template_kwargs:
        body["chat_template_kwargs"] = request.chat_template_kwargs
    return body


def tidy(raw: dict[str, Any], *, strip_content: bool) -> dict[str, Any]:
    """An engine's message in our form: absent instead of null or empty, every tool call with id and JSON arguments."""
    content = raw.get("content") or ""
    # After reasoning, parsers strip this white space or not depending on what follows; the stream cannot wait for it.
    content = content.lstrip() if strip_content else content
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    reasoning = raw.get("reasoning") or raw.get("reasoning_content")
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [
        {
            "id": call.get("id") or f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": _json(call["function"].get("arguments") or "{}"),
            },
        }
        for call in raw.get("tool_calls") or []
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _json(arguments: Any) -> str:
    """Arguments as JSON text. Raises EngineError when they are none."""
    if not isinstance(arguments, str):
        return orjson.dumps(arguments).decode()
    wire.loads(arguments.encode())
    return arguments


def _cap(wanted: int | None, room: Any) -> tuple[int | None, bool]:
    """(the cap to sample with, whether the window made it lower than asked)."""
    if not isinstance(room, int):
        return wanted, False
    if room < 1:
        raise PromptTooLong("the prompt fills the model's context length and leaves no room for a reply")
    if wanted is None:
        return room, False
    return min(wanted, room), room < wanted


def _history(message: dict[str, Any]) -> dict[str, Any]:
    """vLLM reads earlier reasoning from `reasoning` alone and gives templates both names."""
    if "reasoning_content" not in message:
        return message
    return {**message, "reasoning": message["reasoning_content"]}

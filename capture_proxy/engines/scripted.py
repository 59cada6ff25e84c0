"""An engine that says what it is told to, token by token.

Owns a toy tokenizer (one id per UTF-8 byte, role markers above 255, so a history that is echoed extends the prompt by
prefix) and a script of replies with delays and faults. Ships with the product: tests and benchmarks run the gateway on
it, and so can anyone who writes an agent. Never trains anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from capture_proxy.engines.base import ChatRequest, DeltaEvent, FinishEvent, PromptEvent, ReplyReader, SampleEvent
from capture_proxy.errors import EngineUnreachable, PromptTooLong
from capture_proxy.types import Finding, VersionSpan

ROLE_IDS = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
END = 260  # ends a message; the engine samples it itself, as a model samples its end token
TOOLS = 261  # starts the block of tool descriptions


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted reply.

    Example: Reply("I will look.", tool_calls=[("bash", {"command": "ls"})]) streams the text in one piece, then the
    call. `logprobs=None` means the toy formula; a list is used as is, also when it is wrong.
    """

    content: str | Sequence[str] = ""  # pieces are sent one by one
    tool_calls: Sequence[tuple[str, dict[str, Any]]] = ()
    reasoning: str = ""
    finish_reason: str | None = None  # None = "tool_calls" or "stop"
    logprobs: Sequence[float | None] | None = None
    findings: Sequence[Finding] = ()
    die_after: int | None = None  # pieces sent before the connection to the engine is lost
    stall: bool = False  # never finish after the last piece
    stop_sequence: str | None = None  # ends on this stop string: its ids are sampled, its text is not shown, no END


Script: TypeAlias = Sequence[Reply | str] | Callable[[ChatRequest], Reply | str]


@dataclass
class ScriptedEngine:
    """Deterministic engine. A list is used in order, its last reply for ever; a callable sees each request.

    `version` may be set at any time, also in the middle of a reply: tokens sampled later carry the new one.
    """

    script: Script = "ok"
    model: str = "scripted"
    version: str = "v0"
    max_model_len: int | None = None  # tokens
    first_delay_s: float = 0.0
    piece_delay_s: float = 0.0
    faults: Mapping[int, Exception] = field(default_factory=dict)  # call number (from 0) -> what it raises
    hold: Callable[[int], Awaitable[None]] | None = None  # awaited before the k-th piece of each reply
    up: bool = True

    def __post_init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.in_flight = 0
        self.num_aborted = 0

    async def sample(self, request: ChatRequest) -> AsyncGenerator[SampleEvent, None]:
        call = len(self.requests)
        self.requests.append(request)
        self.in_flight += 1
        finished = False
        try:
            if call in self.faults:
                raise self.faults[call]
            async for event in self._events(request, self._reply(call, request)):
                finished = isinstance(event, FinishEvent)
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            self.num_aborted += not finished
            raise
        finally:
            self.in_flight -= 1

    async def render(self, request: ChatRequest) -> list[int]:
        return render(request)

    async def takes_ids(self) -> bool:
        return True

    def read_with(self, reader: ReplyReader) -> None:
        pass  # its replies are scripted, there is nothing to read

    async def models(self) -> list[dict[str, Any]]:
        return [{"id": self.model, "max_model_len": self.max_model_len}]

    async def healthy(self) -> bool:
        return self.up

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    def _reply(self, call: int, request: ChatRequest) -> Reply:
        if callable(self.script):
            reply = self.script(request)
        elif isinstance(self.script, str):
            reply = self.script
        else:
            reply = self.script[min(call, len(self.script) - 1)]
        return Reply(reply) if isinstance(reply, str) else reply

    async def _events(self, request: ChatRequest, reply: Reply) -> AsyncIterator[SampleEvent]:
        prompt_ids = request.prompt_ids_P or render(request)
        room = None if self.max_model_len is None else self.max_model_len - len(prompt_ids)
        if room is not None and room < 1:
            detail = f"the prompt has {len(prompt_ids)} tokens, the window {self.max_model_len}"
            raise PromptTooLong(detail, len(prompt_ids), self.max_model_len)
        caps = [cap for cap in (request.max_tokens, room) if cap is not None]
        cap = min(caps, default=None)
        clamped = room is not None and request.max_tokens is not None and room < request.max_tokens
        await asyncio.sleep(self.first_delay_s)
        yield PromptEvent(prompt_ids, cap, clamped, dict(request.sampling))
        sampled: list[int] = []
        spans: list[VersionSpan] = []
        cut = False
        pieces = list(_pieces(reply))
        for k, (kind, text, ids) in enumerate(pieces):
            if reply.die_after is not None and k >= reply.die_after:
                raise EngineUnreachable("the scripted engine went away in the middle of a reply")
            if self.hold is not None:
                await self.hold(k)
            if self.piece_delay_s:
                await asyncio.sleep(self.piece_delay_s)
            if cap is not None and len(sampled) + len(ids) > cap:
                ids, cut = ids[: cap - len(sampled)], True
                text = _cut_text(kind, ids)
            logprobs = [self._logprob(reply, len(sampled) + i, token) for i, token in enumerate(ids)]
            _extend_spans(spans, self.version, len(sampled), len(sampled) + len(ids))
            sampled += ids
            content, reasoning = (text if kind == "content" else ""), (text if kind == "reasoning" else "")
            yield DeltaEvent(ids, logprobs, content, reasoning)
            if cut:
                break
        if reply.stall:
            await asyncio.Event().wait()
        message = _message(reply, len(self.requests)) if not cut else _cut_message(sampled)
        reason = "length" if cut else reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")
        yield FinishEvent(reason, message, spans, list(reply.findings), None if cut else reply.stop_sequence)

    @staticmethod
    def _logprob(reply: Reply, position: int, token: int) -> float | None:
        if reply.logprobs is not None:
            return reply.logprobs[position] if position < len(reply.logprobs) else None
        return -(token % 7 + 1) / 10


def render(request: ChatRequest) -> list[int]:
    """The prompt ids of a request: tools, then each message as role id, bytes, END; last the assistant's role id."""
    ids: list[int] = []
    if request.tools:
        ids += [TOOLS, *json.dumps(request.tools, sort_keys=True).encode(), END]
    for message in request.messages:
        ids += [ROLE_IDS[message["role"]], *_message_text(message).encode(), END]
    return [*ids, ROLE_IDS["assistant"]]


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    reasoning = message.get("reasoning_content") or ""
    calls = [
        _call_text(call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return (f"<think>{reasoning}</think>" if reasoning else "") + content + "".join(calls)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}  # as vLLM does: what is malformed in a history must not fail every later turn


def _call_text(name: str, arguments: Any) -> str:
    # Compact and sorted, so that an agent which re-serialises the arguments still extends the prefix.
    body = json.dumps({"name": name, "arguments": arguments}, sort_keys=True, separators=(",", ":"))
    return f"<tool_call>{body}</tool_call>"


def _pieces(reply: Reply) -> Iterator[tuple[str, str, list[int]]]:
    """(kind, text for the agent, ids) of each piece; the end token comes last, alone."""
    if reply.reasoning:
        yield "reasoning", reply.reasoning, list(f"<think>{reply.reasoning}</think>".encode())
    for text in [reply.content] if isinstance(reply.content, str) else reply.content:
        if text:
            yield "content", text, list(text.encode())
    for name, arguments in reply.tool_calls:
        yield "call", "", list(_call_text(name, arguments).encode())
    yield "end", "", [END] if reply.stop_sequence is None else list(reply.stop_sequence.encode())


def _message(reply: Reply, call: int) -> dict[str, Any]:
    content = reply.content if isinstance(reply.content, str) else "".join(reply.content)
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{call}_{i}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for i, (name, arguments) in enumerate(reply.tool_calls)
        ]
    return message


def _cut_text(kind: str, ids: list[int]) -> str:
    text = bytes(i for i in ids if i < 256).decode("utf-8", "ignore")
    if kind == "reasoning":
        return text.removeprefix("<think>").partition("</think>")[0]
    return text if kind == "content" else ""


def _cut_message(sampled: list[int]) -> dict[str, Any]:
    text = bytes(i for i in sampled if i < 256).decode("utf-8", "ignore")
    head, mark, rest = text.partition("</think>")
    if text.startswith("<think>"):
        reasoning = head.removeprefix("<think>")
        return {"role": "assistant", "content": rest or None if mark else None, "reasoning_content": reasoning}
    return {"role": "assistant", "content": text.partition("<tool_call>")[0] or None}


def _extend_spans(spans: list[VersionSpan], version: str, start: int, end: int) -> None:
    if spans and spans[-1].version == version:
        start = spans.pop().start
    if end > start:
        spans.append(VersionSpan(version, start, end))

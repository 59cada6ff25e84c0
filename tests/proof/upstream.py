"""A vLLM of the wire alone: its routes and its bytes, with a plan for each reply that says where they break.

Owns the wire form of generate, derender and chat replies (streamed and not) and the faults a server can show: an error
status, a stream that ends or is torn at any byte, bytes that arrive one by one. One byte of text is one token, as in
`capture_proxy.engines.scripted`. Used in process by tests, and as a process of its own by the soak.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from capture_proxy.engines.base import ChatRequest
from capture_proxy.engines.scripted import END, render

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
VERSION = "v1"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one reply is. Example: Plan("I look.", [("bash", {"command": "ls"})], cut=120, torn=True)."""

    text: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_pieces: int = 2  # the sampled bytes arrive in this many chunks
    status: int = 200  # another one is an error body instead of a reply
    cut: int | None = None  # bytes of the reply's body that are sent before it ends; None = all
    torn: bool = False  # a cut is a dropped connection, not an end of the body
    step: int | None = None  # bytes per write; None = an event per write
    delay_s: float = 0.0  # between two writes

    @property
    def sampled(self) -> str:
        calls = [json.dumps({"name": n, "arguments": a}, sort_keys=True, separators=(",", ":")) for n, a in self.calls]
        return self.text + "".join(f"<tool_call>{call}</tool_call>" for call in calls)


Script = Callable[[str, int], Plan]  # (the prompt as text, how often this prompt was asked before) -> plan


class _TornResponse(StreamingResponse):
    """A body without an end: the server then drops the connection."""

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self.body_iterator:
            await send({"type": "http.response.body", "body": piece, "more_body": True})


class Upstream:
    """The server. `streaming` is the number of replies under way."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.streaming = 0
        self._asked: dict[str, int] = {}

    def app(self) -> Starlette:
        post = ["POST"]
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions/render", self._render, methods=post),
                Route("/v1/chat/completions/derender", self._derender, methods=post),
                Route("/inference/v1/generate", self._generate, methods=post),
                Route("/v1/chat/completions", self._chat, methods=post),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "wire", "max_model_len": 10_000_000}]})

    async def _render(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        if not body:
            return JSONResponse({"error": {"message": "messages: missing", "code": 400}}, 400)
        ids = _prompt_ids(body)
        params = {"temperature": body.get("temperature", 1.0), "max_tokens": 10_000_000 - len(ids), "logprobs": 0}
        return _json({"request_id": "r", "token_ids": ids, "sampling_params": params, "model": body["model"]})

    async def _derender(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        text = _text(body["generate_response"]["choices"][0]["token_ids"])
        calls = [_tool_call(i, json.loads(call)) for i, call in enumerate(_CALL.findall(text))]
        message = {"role": "assistant", "content": _CALL.sub("", text), "reasoning": None, "tool_calls": calls}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async def _generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        plan = self._plan(_text(body["token_ids"]))
        return self._answer(
            plan,
            _generate_events(plan, body["token_ids"])
            if body.get("stream")
            else [orjson.dumps(_generate_whole(plan, body["token_ids"]))],
            body.get("stream"),
        )

    async def _chat(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        ids = _prompt_ids(body)
        plan = self._plan(_text(ids))
        stream = body.get("stream")
        whole = [orjson.dumps(_chat_whole(plan, ids))]
        return self._answer(plan, _chat_events(plan, ids) if stream else whole, stream)

    def _plan(self, prompt: str) -> Plan:
        asked = self._asked.get(prompt, 0)
        self._asked[prompt] = asked + 1
        return self.script(prompt, asked)

    def _answer(self, plan: Plan, events: list[bytes], stream: Any) -> Response:
        if plan.status != 200:
            return JSONResponse({"error": {"message": "planned", "type": "x", "code": plan.status}}, plan.status)
        media_type = "text/event-stream" if stream else "application/json"
        kind = _TornResponse if plan.torn and plan.cut is not None else StreamingResponse
        return kind(self._bytes(plan, events), media_type=media_type)

    async def _bytes(self, plan: Plan, events: list[bytes]) -> AsyncIterator[bytes]:
        whole = b"".join(events)[: plan.cut]
        self.streaming += 1
        try:
            start = 0
            for event in (
                events if plan.step is None else [whole[i : i + plan.step] for i in range(0, len(whole), plan.step)]
            ):
                piece = event[: len(whole) - start]
                start += len(piece)
                if piece:
                    yield piece
                if plan.delay_s:
                    await asyncio.sleep(plan.delay_s)
        finally:
            self.streaming -= 1


def _json(data: dict[str, Any]) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")


def stream_bytes(plan: Plan, *, transport: str) -> int:
    """The length of the streamed reply in bytes, for a prompt of no tokens."""
    return len(b"".join(_generate_events(plan, []) if transport == "generate" else _chat_events(plan, [])))


def _prompt_ids(body: dict[str, Any]) -> list[int]:
    tools = body.get("tools") or []
    return render(ChatRequest("", body["messages"], tools, None, {}, None))


def _text(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def _tool_call(index: int, call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": f"call_{index}", "type": "function", "function": function}


def _pieces(plan: Plan) -> list[tuple[str, list[int]]]:
    """(text, ids) of each chunk; the text of a character that a chunk cuts comes with its last byte."""
    data = plan.sampled.encode()
    size = max(1, -(-len(data) // plan.num_pieces))
    pieces, begun = [], b""
    for start in range(0, len(data), size):
        begun += data[start : start + size]
        text = begun.decode("utf-8", "ignore")
        begun = begun[len(text.encode()) :]
        pieces.append((text, list(data[start : start + size])))
    return pieces


def _logprobs(ids: list[int]) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": -(i % 7 + 1) / 10} for i in ids]}


def _usage(plan: Plan, prompt: list[int]) -> dict[str, int]:
    num_ids = len(plan.sampled.encode()) + 1
    return {"prompt_tokens": len(prompt), "completion_tokens": num_ids, "total_tokens": len(prompt) + num_ids}


def _sse(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _generate_choice(text: str, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"index": 0, "text": text, "token_ids": ids, "logprobs": _logprobs(ids), **more}


def _generate_last(plan: Plan) -> dict[str, Any]:
    spans = [{"version": VERSION, "start": 0, "end": len(plan.sampled.encode()) + 1}]
    return {"finish_reason": "stop", "weight_versions": spans, "stop_reason": None}


def _generate_events(plan: Plan, prompt: list[int]) -> list[bytes]:
    choices = [_generate_choice(text, ids) for text, ids in _pieces(plan)]
    choices.append(_generate_choice("", [END], **_generate_last(plan)))
    usage = {"request_id": "r", "choices": [], "usage": _usage(plan, prompt)}
    return [*(_sse({"request_id": "r", "choices": [c]}) for c in choices), _sse(usage), b"data: [DONE]\n\n"]


def _generate_whole(plan: Plan, prompt: list[int]) -> dict[str, Any]:
    ids = [*plan.sampled.encode(), END]
    choice = _generate_choice(plan.sampled, ids, **_generate_last(plan))
    return {"request_id": "r", "output_mode": "text", "choices": [choice], "usage": _usage(plan, prompt)}


def _chat_events(plan: Plan, prompt: list[int]) -> list[bytes]:
    """Text with its ids, then the calls as a parser emits them (name first, arguments in halves), then the end."""
    first = {"prompt_token_ids": prompt, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    out = [first]
    for text, ids in _pieces(Plan(plan.text, num_pieces=plan.num_pieces)):
        out.append({"choices": [_chat_choice({"content": text}, ids)]})
    rest = plan.sampled.encode()[len(plan.text.encode()) :]
    for i, (name, arguments) in enumerate(plan.calls):
        written = json.dumps(arguments)
        middle = len(written) // 2
        opening = {"index": i, "id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": ""}}
        out.append({"choices": [_chat_choice({"tool_calls": [opening]}, list(rest) if i == 0 else [])]})
        for half in (written[:middle], written[middle:]):
            delta = {"tool_calls": [{"index": i, "function": {"arguments": half}}]}
            out.append({"choices": [_chat_choice(delta, [])]})
    finish = _chat_choice({}, [END]) | {"finish_reason": "tool_calls" if plan.calls else "stop", "stop_reason": None}
    out += [{"choices": [finish]}, {"choices": [], "usage": _usage(plan, prompt)}]
    return [*map(_sse, out), b"data: [DONE]\n\n"]


def _chat_choice(delta: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "token_ids": ids, "logprobs": _logprobs(ids) if ids else None}


def _chat_whole(plan: Plan, prompt: list[int]) -> dict[str, Any]:
    ids = [*plan.sampled.encode(), END]
    calls = [_tool_call(i, {"name": n, "arguments": a}) for i, (n, a) in enumerate(plan.calls)]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": plan.text, "tool_calls": calls},
        "token_ids": ids,
        "logprobs": _logprobs(ids),
        "finish_reason": "tool_calls" if calls else "stop",
        "stop_reason": None,
    }
    return {"prompt_token_ids": prompt, "choices": [choice], "usage": _usage(plan, prompt)}

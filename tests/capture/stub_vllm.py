"""A stand-in that speaks vLLM's routes: render, generate, derender, chat, models, weights. One byte is one token.

Only the wire format is real. What a reply looks like, chunk by chunk, is the test's to say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

END = 260


def chunk(text: str, ids: list[int] | None = None, logprobs: list[Any] | None = None, **more: Any) -> str:
    """One SSE event of /inference/v1/generate, `output_mode: "text"`."""
    ids = list(text.encode()) if ids is None else ids
    logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
    content = [{"token": "x", "logprob": x} for x in logprobs]
    choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": {"content": content}, **more}
    return f"data: {json.dumps({'request_id': 'r', 'choices': [choice]})}\n\n"  # NaN stays a bare literal


def final(num_ids: int, *, reason: str = "stop", spans: Any = None, end: bool = True, stop: Any = None) -> list[str]:
    """The last chunk (with the end token) and the usage chunk; `num_ids` counts the end token."""
    spans = [{"version": "v1", "start": 0, "end": num_ids}] if spans is None else spans
    last = chunk("", [END] if end else [], finish_reason=reason, weight_versions=spans, stop_reason=stop)
    usage = {"prompt_tokens": 1, "completion_tokens": num_ids, "total_tokens": num_ids + 1}
    return [last, f"data: {json.dumps({'request_id': 'r', 'choices': [], 'usage': usage})}\n\n", "data: [DONE]\n\n"]


def reply(*texts: str, **options: Any) -> list[str]:
    """A whole, well-formed stream of these text chunks."""
    return [chunk(text) for text in texts] + final(sum(len(t.encode()) for t in texts) + 1, **options)


@dataclass
class StubVllm:
    """Set what the next replies are; look at what was asked."""

    chunks: list[str | asyncio.Event] = field(default_factory=lambda: reply("hello"))
    message: dict[str, Any] | None = None  # what derender says; None = the text
    room: int = 1000
    rendered: dict[str, Any] = field(default_factory=dict)  # what render says otherwise
    whole: dict[str, Any] | None = None  # what a caller that does not stream gets; None = the chunks put together
    reasoning: bool = False  # a reasoning parser is configured
    scale_out: bool = True
    errors: dict[str, tuple[int, Any]] = field(default_factory=dict)  # path -> (status, body)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    streaming: int = 0

    def bodies(self, path: str) -> list[Any]:
        return [body for where, body in self.asked if where == path]

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions/render", self._render, methods=["POST"]),
                Route("/v1/chat/completions/derender", self._derender, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
            ]
        )

    async def _take(self, request: Request) -> tuple[Any, Response | None]:
        body = await request.json()
        path = request.url.path
        scale_out = path not in ("/v1/chat/completions", "/tokenize")
        if scale_out and not self.scale_out:
            return body, JSONResponse({"error": {"message": "disabled", "code": 403}}, 403)
        if scale_out and not body:
            return body, JSONResponse({"error": {"message": "messages: missing", "code": 400}}, 400)
        self.asked.append((path, body))
        if path in self.errors:
            status, content = self.errors[path]
            if isinstance(content, str):
                return body, Response(content, status)
            return body, JSONResponse({"error": {"message": "", "type": "x", "code": status} | content}, status)
        return body, None

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stub", "max_model_len": 4096}]})

    async def _render(self, request: Request) -> Response:
        body, error = await self._take(request)
        if error:
            return error
        ids = [i for m in body["messages"] for i in (m.get("content") or "").encode()]
        return JSONResponse(
            {
                "request_id": "chatcmpl-1",
                "token_ids": ids,
                "token_offsets": None,
                "sampling_params": {
                    "temperature": body.get("temperature", 1.0),
                    "top_p": body.get("top_p", 1.0),
                    "max_tokens": self.room,
                    "logprobs": body["top_logprobs"] if body["logprobs"] else None,
                },
                "reasoning_parser_kwargs": {"chat_template_kwargs": {}} if self.reasoning else None,
                "reasoning_ended": False if self.reasoning else None,
                "model": body["model"],
                "stream": False,
            }
            | self.rendered
        )

    async def _tokenize(self, request: Request) -> Response:
        body, error = await self._take(request)
        ids = [] if error else [i for m in body["messages"] for i in (m.get("content") or "").encode()]
        return error or JSONResponse({"count": len(ids), "max_model_len": 4096, "tokens": ids})

    async def _generate(self, request: Request) -> Response:
        body, error = await self._take(request)
        if error:
            return error
        if body.get("stream") is False:
            whole = await self._whole()
            return Response(json.dumps(whole), media_type="application/json")  # NaN stays a bare literal
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _whole(self) -> dict[str, Any]:
        """The chunks as one reply, which is what is sent to a caller that does not stream."""
        if self.whole is not None:
            return self.whole
        out: dict[str, Any] = {"request_id": "r", "usage": None}
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": [], "logprobs": {"content": []}}
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        async for item in self._stream():
            data = item.removeprefix("data:").strip()
            event = {} if data == "[DONE]" else json.loads(data)
            out |= {k: v for k, v in event.items() if k in ("usage", "prompt_token_ids", "error")}
            for part in event.get("choices") or []:
                choice["text"] += part.get("text") or ""
                message["content"] += (part.get("delta") or {}).get("content") or ""
                choice["token_ids"] += part.get("token_ids") or []
                choice["logprobs"]["content"] += (part.get("logprobs") or {}).get("content") or []
                known = ("finish_reason", "stop_reason", "weight_versions")
                choice |= {k: part[k] for k in known if part.get(k) is not None}
        return {**out, "choices": [{**choice, "message": message}]}

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request)

    async def _stream(self) -> AsyncIterator[str]:
        self.streaming += 1
        try:
            for item in self.chunks:
                if isinstance(item, asyncio.Event):
                    await item.wait()
                else:
                    yield item
        finally:
            self.streaming -= 1

    async def _derender(self, request: Request) -> Response:
        body, error = await self._take(request)
        if error:
            return error
        ids = body["generate_response"]["choices"][0]["token_ids"]
        text = bytes(i for i in ids if i < 256).decode("utf-8", "replace")
        message = self.message or {"role": "assistant", "content": text, "reasoning": None, "tool_calls": []}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

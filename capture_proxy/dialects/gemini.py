"""Google's Gemini API, as gemini-cli and other agents send it.

Owns its paths, where its clients put their key, and its model lists; what a request means is in `gemini_request`, what
a reply looks like in `gemini_stream`. Called by `gateway` through the contract in `dialects.base`.
"""

from __future__ import annotations

from typing import Any

import orjson

from capture_proxy.dialects.base import Call, Head, Route
from capture_proxy.dialects.gemini_request import Notes, parse
from capture_proxy.dialects.gemini_stream import GeminiStream, encode, error_object, whole
from capture_proxy.dialects.openai_chat import bearer
from capture_proxy.errors import CaptureError, NotFound
from capture_proxy.types import Turn

_METHODS = ("generateContent", "streamGenerateContent", "countTokens")


def _routes(version: str) -> tuple[Route, ...]:
    return (
        # A model's name may hold slashes and colons; the method is what follows the last colon.
        Route("POST", f"/{version}/models/{{model:path}}:countTokens", "count"),
        Route("POST", f"/{version}/models/{{model:path}}:{{method}}", "call"),
        Route("GET", f"/{version}/models", "models"),
        Route("GET", f"/{version}/models/{{model:path}}", "model"),
    )


class Gemini:
    name = "gemini"
    routes = _routes("v1beta") + _routes("v1")

    def speaks(self, head: Head) -> bool:
        return "x-goog-api-key" in head.headers or "x-goog-api-client" in head.headers or "key" in head.query

    def token(self, head: Head) -> str | None:
        return head.headers.get("x-goog-api-key") or head.query.get("key") or bearer(head)

    def parse(self, head: Head, body: bytes) -> Call:
        method = head.path.get("method", "countTokens")
        if method not in _METHODS:
            raise NotFound(f"models.{method} is not served here, only {', '.join(_METHODS)}")
        return parse(head, body, stream=method == "streamGenerateContent")

    def reply(self, call: Call, turn: Turn) -> bytes:
        head = {"modelVersion": call.model, "responseId": turn.turn_id}
        return encode(whole(turn, _notes(call), None, head))

    def stream(self, turn_id: str, call: Call) -> GeminiStream:
        return GeminiStream(turn_id, call.model, _notes(call))

    def count(self, num_tokens: int) -> bytes:
        return orjson.dumps({"totalTokens": num_tokens})

    def error(self, error: CaptureError) -> bytes:
        return orjson.dumps(error_object(error))

    def models(self, models: list[dict[str, Any]]) -> bytes:
        return orjson.dumps({"models": [_model(m) for m in models]})

    def model(self, model: dict[str, Any]) -> bytes:
        return orjson.dumps(_model(model))


def _notes(call: Call) -> Notes:
    return call.context if isinstance(call.context, Notes) else Notes()


def _model(model: dict[str, Any]) -> dict[str, Any]:
    name = str(model.get("id", ""))
    shown: dict[str, Any] = {
        "name": f"models/{name}",
        "version": "001",
        "displayName": name,
        "supportedGenerationMethods": list(_METHODS),
    }
    if isinstance(limit := model.get("max_model_len"), int):
        shown["inputTokenLimit"] = shown["outputTokenLimit"] = limit
    return shown

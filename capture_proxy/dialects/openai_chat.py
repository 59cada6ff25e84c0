"""OpenAI chat completions, as coding agents really send it.

Owns `POST /v1/chat/completions` (stream and not) and `GET /v1/models`. Lenient where agents differ (unknown keys,
content parts, both names of the reasoning field), strict where a guess would corrupt a capture (`n`, types).
Called by `gateway` through the contract in `dialects.base`.
"""

from __future__ import annotations

import time
from typing import Any

import orjson

from capture_proxy.dialects.base import Call, Head, Route
from capture_proxy.dialects.body import parse_object, settle_system
from capture_proxy.errors import BadRequest, CaptureError
from capture_proxy.types import Turn

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "logit_bias",
    "response_format",
)
_NUMBERS = frozenset(SAMPLING_FIELDS) - {"stop", "logit_bias", "response_format"}
_INTEGERS = {"seed", "top_k"}
_ROLES = {"system", "user", "assistant", "tool"}


class OpenAIChat:
    name = "openai_chat"
    routes = (
        Route("POST", "/v1/chat/completions", "call"),
        Route("POST", "/chat/completions", "call"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1/models/{model:path}", "model"),
    )

    def speaks(self, head: Head) -> bool:
        return True

    def token(self, head: Head) -> str | None:
        return bearer(head)

    def parse(self, head: Head, body: bytes) -> Call:
        return call_of(parse_object(body))

    def reply(self, call: Call, turn: Turn) -> bytes:
        message = {"content": None, **turn.message, "role": "assistant"}
        return orjson.dumps(
            {
                "id": f"chatcmpl-{turn.turn_id}",
                "object": "chat.completion",
                "created": int(turn.started_at),
                "model": turn.request.get("model", ""),
                "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": turn.finish_reason}],
                "usage": _usage(turn),
            }
        )

    def stream(self, turn_id: str, call: Call) -> _ChatStream:
        return _ChatStream(turn_id, call.model, call.include_usage)

    def count(self, num_tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": num_tokens})

    def error(self, error: CaptureError) -> bytes:
        return orjson.dumps({"error": error_object(error)})

    def models(self, models: list[dict[str, Any]]) -> bytes:
        return orjson.dumps({"object": "list", "data": [_model(m) for m in models]})

    def model(self, model: dict[str, Any]) -> bytes:
        return orjson.dumps(_model(model))


class _ChatStream:
    """Server-sent chunks of one reply: role first, text as it comes, whole tool calls, finish, usage, [DONE]."""

    media_type = "text/event-stream"

    def __init__(self, turn_id: str, model: str, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._sent_content = 0  # characters of the message that are out already
        self._sent_reasoning = 0
        self._head = {
            "id": f"chatcmpl-{turn_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    def start(self, num_prompt_tokens: int | None) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def keepalive(self) -> bytes:
        return b": keep-alive\n\n"

    def delta(self, content: str, reasoning: str) -> bytes:
        self._sent_content += len(content)
        self._sent_reasoning += len(reasoning)
        out = self._chunk({"reasoning_content": reasoning}) if reasoning else b""
        return out + self._chunk({"content": content}) if content else out

    def finish(self, turn: Turn) -> bytes:
        content = (turn.message.get("content") or "")[self._sent_content :]
        reasoning = (turn.message.get("reasoning_content") or "")[self._sent_reasoning :]
        out = [self.delta(content, reasoning)]
        for index, call in enumerate(turn.message.get("tool_calls") or []):
            out.append(self._chunk({"tool_calls": [{"index": index, **call}]}))
        out.append(self._chunk({}, turn.finish_reason))
        if self._include_usage:
            out.append(_event({**self._head, "choices": [], "usage": _usage(turn)}))
        out.append(b"data: [DONE]\n\n")
        return b"".join(out)

    def error(self, error: CaptureError) -> bytes:
        # No [DONE]: a client that misses the error object must still see a broken stream, not a complete one.
        return _event({"error": error_object(error)})

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event({**self._head, "choices": [choice]})


def call_of(data: dict[str, Any]) -> Call:
    """What a request's JSON object asks. Raises BadRequest. Also for calls that are made in process."""
    n = data.get("n")
    if n is not None and (isinstance(n, bool) or n != 1):
        raise BadRequest(f"n={n!r} is not supported: ask for one completion a request")
    tools = _tools(data.get("tools"))
    max_tokens = _max_tokens(data)
    sampling = read_sampling(data)
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    options = data.get("stream_options")
    kwargs = data.get("chat_template_kwargs")
    model = data.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model must be a string")
    messages, findings = settle_system(_messages(data.get("messages")))
    parallel = data.get("parallel_tool_calls")
    return Call(
        model=model or "",
        messages=messages,
        tools=tools,
        # Several engines refuse a choice among no tools, and some clients always send one.
        tool_choice=data.get("tool_choice") if tools else None,
        sampling=sampling,
        max_tokens=max_tokens,
        stream=data.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        chat_template_kwargs=kwargs if isinstance(kwargs, dict) else {},
        parallel_tool_calls=parallel if isinstance(parallel, bool) and tools else None,
        findings=findings,
    )


def bearer(head: Head) -> str | None:
    """The token of an Authorization header; None = there is none."""
    scheme, _, token = head.headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _messages(raw: Any) -> list[dict[str, Any]]:
    if not isinstance(raw, list) or not raw:
        raise BadRequest("messages must be a non-empty list")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(raw)]


def _message(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise BadRequest(f"{where} must be an object")
    role = "system" if raw.get("role") == "developer" else raw.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{where}.role must be one of system, developer, user, assistant, tool, not {role!r}")
    message: dict[str, Any] = {"role": role, "content": _content(raw.get("content"), where)}
    if message["content"] is None and role != "assistant":
        message["content"] = ""
    for key in ("name", "tool_call_id"):
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    if role == "assistant":
        reasoning = raw.get("reasoning_content") or raw.get("reasoning")
        if isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
        if calls := raw.get("tool_calls"):
            if not isinstance(calls, list):
                raise BadRequest(f"{where}.tool_calls must be a list")
            message["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return message


def _content(raw: Any, where: str) -> str | list[dict[str, Any]] | None:
    """Text, or a list of parts; a lone text part becomes its text, so both spellings render alike."""
    if raw is None or isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise BadRequest(f"{where}.content must be a string or a list of parts")
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(raw):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise BadRequest(f"{where}.content[{i}] must be an object with a type")
        if (part["type"] == "text" or "text" in part) and not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}.content[{i}].text must be a string")
        # Cache marks move from request to request and would make equal histories differ.
        parts.append({k: v for k, v in part.items() if k != "cache_control"})
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def _tool_call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = orjson.dumps(arguments).decode()
    if not isinstance(arguments, str) or not arguments.strip():
        arguments = "{}"
    call_id = raw.get("id") if isinstance(raw.get("id"), str) else ""
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(raw: Any) -> list[dict[str, Any]]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise BadRequest("tools must be a list")
    for i, tool in enumerate(raw):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{i}] must be a function tool with a name")
    return raw


def _max_tokens(data: dict[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens"):
        value = data.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadRequest(f"{key} must be a positive integer, not {value!r}")
            return value
    return None


def read_sampling(data: dict[str, Any]) -> dict[str, Any]:
    """The sampling fields of a body that uses chat-completions names. Raises BadRequest."""
    sampling = {key: data[key] for key in SAMPLING_FIELDS if data.get(key) is not None}
    for key in _NUMBERS & sampling.keys():
        if isinstance(sampling[key], bool) or not isinstance(sampling[key], int | float):
            raise BadRequest(f"{key} must be a number, not {sampling[key]!r}")
        if key in _INTEGERS and not isinstance(sampling[key], int):
            raise BadRequest(f"{key} must be an integer of at most 64 bits, not {sampling[key]!r}")
    return sampling


def _usage(turn: Turn) -> dict[str, int]:
    prompt, completion = len(turn.prompt_ids_P), len(turn.completion_ids_T)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_object(error: CaptureError) -> dict[str, Any]:
    # "server_error" beside a 4xx makes several agents retry for ever, so no error of ours is called that.
    kinds = {401: "authentication_error", 403: "permission_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"message": str(error), "type": kind, "param": None, "code": error.code}


def _model(model: dict[str, Any]) -> dict[str, Any]:
    return {"object": "model", "created": 0, "owned_by": "engine", **model}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"

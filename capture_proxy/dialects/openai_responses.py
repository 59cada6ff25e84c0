"""OpenAI Responses, as codex and other coding agents really send it.

Owns `POST /v1/responses` (stream and not) and the counting of its input tokens. Conversations live with the agent, or
are continued by `previous_response_id`; kept conversations, background runs and retrieval are not served. Items are
read by `openai_responses_items`, tools by `openai_responses_tools`; replies are written by `openai_responses_stream`.
Called by `gateway` through the contract in `dialects.base`.
"""

from __future__ import annotations

from typing import Any

import orjson

from capture_proxy.dialects.base import Call, Head, Route
from capture_proxy.dialects.body import parse_object, settle_system
from capture_proxy.dialects.openai_chat import OpenAIChat, bearer, error_object, read_sampling
from capture_proxy.dialects.openai_responses_items import read_input
from capture_proxy.dialects.openai_responses_stream import Notes, ResponseStream, explain, whole
from capture_proxy.dialects.openai_responses_tools import Toolbox, read_choice, read_tools
from capture_proxy.errors import BadRequest, CaptureError
from capture_proxy.types import Finding, Severity, Turn

_CHAT = OpenAIChat()  # answers the paths that both APIs share
_NOT_SERVED = {
    "background": "background responses are not served: send the request without background",
    "conversation": "kept conversations are not served: send the whole input, or previous_response_id",
    "prompt": "stored prompt templates are not served: send instructions and input",
}


class OpenAIResponses:
    name = "openai_responses"
    routes = (
        Route("POST", "/v1/responses", "call"),
        Route("POST", "/responses", "call"),
        Route("POST", "/v1/responses/input_tokens", "count"),
        Route("POST", "/responses/input_tokens", "count"),
    )

    def speaks(self, head: Head) -> bool:
        return False

    def token(self, head: Head) -> str | None:
        return bearer(head)

    def parse(self, head: Head, body: bytes) -> Call:
        data = parse_object(body)
        for key, advice in _NOT_SERVED.items():
            if data.get(key):
                raise BadRequest(advice)
        if data.get("n") not in (None, 1) or isinstance(data.get("n"), bool):
            raise BadRequest(f"n={data['n']!r} is not supported: ask for one reply a request")
        box = read_tools(data.get("tools"))
        choice = read_choice(data.get("tool_choice"), box)
        continues = _continues(data.get("previous_response_id"))
        messages, instructions, findings = _messages(data, continues is not None)
        sampling, max_tokens = _sampling(data)
        kwargs, parallel = data.get("chat_template_kwargs"), data.get("parallel_tool_calls")
        return Call(
            model=_string(data, "model") or "",
            messages=messages,
            tools=box.tools,
            tool_choice=choice,
            sampling=sampling,
            max_tokens=max_tokens,
            stream=data.get("stream") is True,
            include_usage=True,
            chat_template_kwargs=kwargs if isinstance(kwargs, dict) else {},
            parallel_tool_calls=parallel if isinstance(parallel, bool) and box.tools else None,
            findings=(*findings, *box.findings, *_not_applied(data)),
            continues=continues,
            instructions=instructions,
            store=data.get("store") is not False,
            context=Notes(box.names, _echo(data, box)),
        )

    def reply(self, call: Call, turn: Turn) -> bytes:
        return orjson.dumps(whole(call.context, call.model, turn))

    def stream(self, turn_id: str, call: Call) -> ResponseStream:
        return ResponseStream(turn_id, call.model, call.context)

    def count(self, num_tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": num_tokens})

    def error(self, error: CaptureError) -> bytes:
        return orjson.dumps({"error": {**error_object(error), "message": explain(error)}})

    def models(self, models: list[dict[str, Any]]) -> bytes:
        return _CHAT.models(models)

    def model(self, model: dict[str, Any]) -> bytes:
        return _CHAT.model(model)


def _messages(data: dict[str, Any], continued: bool) -> tuple[list[dict[str, Any]], bool, list[Finding]]:
    """(all messages, whether the first is this request's instructions, findings)."""
    instructions = _string(data, "instructions")
    messages, findings = read_input(data.get("input"))
    if not messages:
        raise BadRequest("input holds nothing that can be shown to the model")
    if instructions:
        # Kept apart from system items of the input: they are not part of what a later request continues.
        messages = [{"role": "system", "content": instructions}, *messages]
    max_leading = 1 if instructions else 0 if continued else None
    messages, settled = settle_system(messages, max_leading)
    return messages, bool(instructions), [*findings, *settled]


def _continues(raw: Any) -> str | None:
    if raw is None:
        return None
    if not isinstance(raw, str) or not raw:
        raise BadRequest("previous_response_id must be the id of an earlier response")
    return raw.removeprefix("resp_")


def _sampling(data: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    sampling = read_sampling({k: v for k, v in data.items() if k != "response_format"})
    text = data.get("text")
    if isinstance(text, dict) and (form := _response_format(text.get("format"))) is not None:
        sampling["response_format"] = form
    cap = data.get("max_output_tokens")
    if cap is not None:
        if isinstance(cap, bool) or not isinstance(cap, int) or cap < 1:
            raise BadRequest(f"max_output_tokens must be a positive integer, not {cap!r}")
        sampling["max_tokens"] = cap
    return sampling, cap


def _response_format(form: Any) -> dict[str, Any] | None:
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema" and isinstance(form.get("schema"), dict):
        schema = {k: form[k] for k in ("name", "description", "schema", "strict") if form.get(k) is not None}
        return {"type": "json_schema", "json_schema": {"name": "reply", **schema}}
    raise BadRequest("text.format must be text, json_object, or a json_schema with a schema")


def _not_applied(data: dict[str, Any]) -> list[Finding]:
    """Notes on what was asked and is deliberately not done."""
    notes = []
    reasoning = data.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        # Some agents change it between turns, which would change the start of the prompt.
        notes.append(f"reasoning.effort={reasoning['effort']}: the session's chat_template_kwargs decide")
    if data.get("truncation") not in (None, "disabled"):
        notes.append(f"truncation={data['truncation']}: a prompt that is too long is refused, never cut")
    if data.get("top_logprobs"):
        notes.append("top_logprobs: replies carry none")
    return [Finding(Severity.INFO, "not_applied", note) for note in notes]


def _echo(data: dict[str, Any], box: Toolbox) -> dict[str, Any]:
    """What a Response object repeats of its request, with the API's defaults. Large parts are encoded once."""
    reasoning, text, choice = data.get("reasoning"), data.get("text"), data.get("tool_choice")
    kept = ("max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key")
    metadata = data.get("metadata")
    return {
        **{key: data.get(key) for key in kept},
        "background": False,
        "instructions": orjson.Fragment(orjson.dumps(data.get("instructions"))),
        "metadata": metadata if isinstance(metadata, dict) else {},
        "parallel_tool_calls": data.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": None, "summary": None, **(reasoning if isinstance(reasoning, dict) else {})},
        "service_tier": "default",
        "store": data.get("store") is not False,
        "temperature": data.get("temperature"),
        "text": {"format": {"type": "text"}, **(text if isinstance(text, dict) else {})},
        "tool_choice": "auto" if choice is None else choice,
        "tools": orjson.Fragment(orjson.dumps(box.echo)),
        "top_logprobs": 0,
        "top_p": data.get("top_p"),
        "truncation": "disabled",
        "user": None,
    }


def _string(data: dict[str, Any], key: str) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{key} must be a string")
    return value

"""Anthropic Messages, as coding agents really send it.

Owns `POST /v1/messages` (stream and not), `count_tokens` and the model list in Anthropic's shape: the fields of a
request beside its messages, whole replies, errors. Content blocks are `anthropic_content`'s, streams
`anthropic_stream`'s. Called by `gateway` through the contract in `dialects.base`.

What the agent asks of thinking (`thinking`, `output_config.effort`) is recorded and not obeyed: how a model reasons is
the trainer's decision (`SessionPolicy.chat_template_kwargs`), and reasoning is always shown, since only what comes back
in the next request can extend the prompt.
"""

from __future__ import annotations

import datetime
from typing import Any

import orjson

from capture_proxy.dialects.anthropic_content import dump, read_messages, signature
from capture_proxy.dialects.anthropic_stream import MessageStream, error_body, message_head, stop, tool_input, usage
from capture_proxy.dialects.base import Call, Head, Route
from capture_proxy.dialects.body import parse_object
from capture_proxy.dialects.openai_chat import bearer
from capture_proxy.errors import BadRequest, CaptureError, NotFound
from capture_proxy.types import Finding, Severity, Turn

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Fields that ask a provider to do something we do not; harmless ones (metadata, service_tier, ...) are not listed.
_UNSERVED = ("mcp_servers", "container", "compaction", "fallbacks")


class Anthropic:
    name = "anthropic"
    routes = (
        Route("POST", "/v1/messages", "call"),
        Route("POST", "/messages", "call"),
        Route("POST", "/v1/messages/{action}", "count"),
        Route("POST", "/messages/{action}", "count"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1/models/{model:path}", "model"),
    )

    def speaks(self, head: Head) -> bool:
        return "anthropic-version" in head.headers or "x-api-key" in head.headers

    def token(self, head: Head) -> str | None:
        return head.headers.get("x-api-key", "").strip() or bearer(head)

    def parse(self, head: Head, body: bytes) -> Call:
        """Raises BadRequest; NotFound for a path below `messages` that is not `count_tokens`."""
        action = head.path.get("action")
        if action not in (None, "count_tokens"):
            raise NotFound(f"/v1/messages/{action} is not served here")
        data = parse_object(body)
        model = data.get("model")
        if model is not None and not isinstance(model, str):
            raise BadRequest("model: must be a string")
        thread = data.get("thread")
        if isinstance(thread, dict) and thread.get("type") == "continue":
            raise BadRequest("thread: conversations are not kept here, send the whole history in messages")
        max_tokens = _max_tokens(data.get("max_tokens"), required=action is None)
        messages, found = read_messages(data.get("system"), data.get("messages"))
        tools, dropped = _tools(data.get("tools"))
        tool_choice, parallel = _tool_choice(data.get("tool_choice"), tools, dropped)
        return Call(
            model=model or "",
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            sampling=_sampling(data, max_tokens),
            max_tokens=max_tokens,
            stream=data.get("stream") is True,
            include_usage=True,
            parallel_tool_calls=parallel,
            findings=(*found, *_dropped_tools(dropped), *_wishes(data)),
        )

    def reply(self, call: Call, turn: Turn) -> bytes:
        message = message_head(turn.turn_id, call.model)
        return orjson.dumps({**message, "content": _blocks(turn), **stop(turn), "usage": usage(turn)})

    def stream(self, turn_id: str, call: Call) -> MessageStream:
        return MessageStream(turn_id, call.model)

    def count(self, num_tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": num_tokens})

    def error(self, error: CaptureError) -> bytes:
        return orjson.dumps(error_body(error))

    def models(self, models: list[dict[str, Any]]) -> bytes:
        data = [_model(m) for m in models]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return orjson.dumps({"data": data, "has_more": False, **ends})

    def model(self, model: dict[str, Any]) -> bytes:
        return orjson.dumps(_model(model))


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    message = turn.message
    blocks: list[dict[str, Any]] = []
    if thinking := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": signature(thinking)})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or []:
        function = call["function"]
        text, _ = tool_input(function["arguments"])
        # As text: what a model nests deeper than a writer goes must not cost the agent its reply.
        given = orjson.Fragment(text)
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _max_tokens(value: Any, *, required: bool) -> int | None:
    if value is None:
        if required:
            raise BadRequest("max_tokens: field required")
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"max_tokens: must be a positive integer, not {value!r}")
    return value


def _sampling(data: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """The sampling fields as sent, under their chat-completions names."""
    sampling: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k"):
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f"{name}: must be a number, not {value!r}")
        if name == "top_k" and not isinstance(value, int):
            raise BadRequest(f"top_k: must be an integer, not {value!r}")
        sampling[name] = value
    stops = data.get("stop_sequences")
    if stops is not None:
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise BadRequest("stop_sequences: must be a list of non-empty strings")
        if stops:
            sampling["stop"] = stops
    config = data.get("output_config")
    form = data.get("output_format") or (config.get("format") if isinstance(config, dict) else None)
    if form is not None:
        sampling["response_format"] = _response_format(form)
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    return sampling


def _response_format(form: Any) -> dict[str, Any]:
    schema = form.get("schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise BadRequest("output_config.format: must be a json_schema with a schema")
    dump(schema, "output_config.format.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _tools(raw: Any) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """(tools with a schema, as functions; (name, type) of those that only Anthropic's own models and servers know)."""
    if raw is None:
        return [], []
    if not isinstance(raw, list):
        raise BadRequest("tools: must be a list")
    tools, dropped = [], []
    for i, tool in enumerate(raw):
        if not isinstance(tool, dict):
            raise BadRequest(f"tools.{i}: must be an object")
        name, kind, schema = tool.get("name"), tool.get("type"), tool.get("input_schema")
        if kind is not None and not isinstance(kind, str):
            raise BadRequest(f"tools.{i}.type: must be a string")
        if kind not in (None, "custom") and not isinstance(schema, dict):
            dropped.append((str(name or tool.get("mcp_server_name") or kind), str(kind)))
            continue
        if not isinstance(name, str) or not name:
            raise BadRequest(f"tools.{i}.name: must be a non-empty string")
        if not isinstance(schema, dict):
            raise BadRequest(f"tools.{i}.input_schema: must be an object")
        dump(schema, f"tools.{i}.input_schema")
        function: dict[str, Any] = {"name": name}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": {**function, "parameters": schema}})
    return tools, dropped


def _tool_choice(raw: Any, tools: list[dict[str, Any]], dropped: list[tuple[str, str]]) -> tuple[Any, bool | None]:
    """(the choice in chat-completions terms, whether calls may be parallel); None = not said."""
    if raw is None:
        return None, None
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind not in (*_CHOICES, "tool"):
        raise BadRequest(f"tool_choice.type: must be auto, any, tool or none, not {kind!r}")
    serial = raw.get("disable_parallel_tool_use")
    parallel = not serial if isinstance(serial, bool) and tools else None
    if kind == "tool":
        name = raw.get("name")
        if name in (n for n, _ in dropped):
            raise BadRequest(f"tool_choice.name: the tool {name!r} runs at the provider and is not served here")
        if all(tool["function"]["name"] != name for tool in tools):
            raise BadRequest(f"tool_choice.name: no tool is called {name!r}")
        return {"type": "function", "function": {"name": name}}, parallel
    if not tools:
        if kind == "any" and dropped:
            raise BadRequest("tool_choice: a tool is demanded, but none of the tools offered is served here")
        return None, None  # several engines refuse a choice among no tools, and some clients always send one
    return _CHOICES[str(kind)], parallel


def _dropped_tools(dropped: list[tuple[str, str]]) -> list[Finding]:
    return [
        Finding(Severity.WARN, "tool_dropped", f"the tool {name!r} of type {kind} is not served here")
        for name, kind in dropped
    ]


def _wishes(data: dict[str, Any]) -> list[Finding]:
    """What the request asks of the provider beyond one reply; recorded, not done."""
    found = []
    thinking, config = data.get("thinking"), data.get("output_config")
    asked = {
        "thinking": thinking.get("type") if isinstance(thinking, dict) else None,
        "budget_tokens": thinking.get("budget_tokens") if isinstance(thinking, dict) else None,
        "effort": config.get("effort") if isinstance(config, dict) else None,
    }
    said = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
    if said:
        found.append(Finding(Severity.INFO, "thinking_asked", f"{said}: recorded, the session's policy decides"))
    unserved = [name for name in _UNSERVED if data.get(name)]
    management = data.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else None
    if edits and edits != [{"type": "clear_thinking_20251015", "keep": "all"}]:
        unserved.append("context_management")  # the one edit let through keeps everything, as we do
    if unserved:
        found.append(Finding(Severity.WARN, "not_served", f"{', '.join(unserved)}: not served here, left out"))
    return found


def _model(model: dict[str, Any]) -> dict[str, Any]:
    created, length = model.get("created"), model.get("max_model_len")
    moment = datetime.datetime.fromtimestamp(created if isinstance(created, int) else 0, datetime.UTC)
    return {
        "type": "model",
        "id": model.get("id"),
        "display_name": model.get("id"),
        "created_at": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),  # an unknown date is the epoch, by Anthropic's own rule
        "lifecycle": "active",
        **({"max_input_tokens": length} if isinstance(length, int) else {}),
    }

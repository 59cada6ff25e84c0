"""What a Responses reply looks like, whole and as a stream: the writing half of the dialect.

Owns output items, the Response object around them, and the order of the events. `openai_responses` makes the `Notes`
that say how the agent called its tools and what to repeat of its request.

Reasoning goes out as `reasoning_text` in the item's `content`, not as a summary: it is the model's own text, which is
what the field is for, and codex, pi and copilot echo the item as they got it. Its `encrypted_content` holds the same
for clients that keep nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from capture_proxy.dialects.body import parse_json
from capture_proxy.dialects.openai_responses_items import item_id, seal_reasoning
from capture_proxy.dialects.openai_responses_tools import ToolName
from capture_proxy.errors import BadRequest, CaptureError, PromptTooLong
from capture_proxy.types import Turn


@dataclass(frozen=True, slots=True)
class Notes:
    """What a reply must know of its request, e.g. Notes({}, orjson.Fragment(b'"store":true'), "resp_s1-0003")."""

    names: Mapping[str, ToolName]  # by the model's name for a tool
    echo: Mapping[str, Any]  # fields of the request that every Response object repeats; large ones are encoded already


def response_id(turn_id: str) -> str:
    """The id by which `previous_response_id` finds this turn again."""
    return f"resp_{turn_id}"


def whole(notes: Notes, model: str, turn: Turn) -> dict[str, Any]:
    """The Response object of a finished turn."""
    message, items = turn.message, []
    if reasoning := message.get("reasoning_content"):
        items.append(_reasoning(item_id("rs", turn.turn_id, 0), reasoning))
    calls = message.get("tool_calls") or []
    if message.get("content") or not (items or calls):
        items.append(_message(item_id("msg", turn.turn_id, len(items)), message.get("content") or ""))
    items[-1:] = [{**item, "status": _last_status(turn)} for item in items[-1:]]
    for call in calls:
        items.append(call_item(notes.names, turn.turn_id, len(items), call))
    return _finished(_head(notes, turn.turn_id, model, int(turn.started_at)), turn, items)


class ResponseStream:
    """Events of one reply. Text leaves as it comes; calls, and the events that end the reply, come with `finish`."""

    media_type = "text/event-stream"

    def __init__(self, turn_id: str, model: str, notes: Notes) -> None:
        self._turn_id, self._notes = turn_id, notes
        self._head = _head(notes, turn_id, model, int(time.time()))
        self._number = 0  # events sent
        self._items: list[dict[str, Any]] = []  # finished items, in the order of their index
        self._open: _OpenText | None = None
        self._late = ""  # reasoning that came while the message was open; it follows when that is closed
        self._sent_content = 0  # characters
        self._sent_reasoning = 0

    def start(self, num_prompt_tokens: int | None) -> bytes:
        response = {**self._head, "status": "in_progress"}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def keepalive(self) -> bytes:
        return b": keep-alive\n\n"

    def delta(self, content: str, reasoning: str) -> bytes:
        out = b""
        if reasoning:
            self._sent_reasoning += len(reasoning)
            if self._open is not None and self._open.kind == "message":
                self._late += reasoning
            else:
                out += self._text("reasoning", reasoning)
        if content:
            self._sent_content += len(content)
            out += self._text("message", content)
        return out

    def finish(self, turn: Turn) -> bytes:
        content, calls = turn.message.get("content") or "", turn.message.get("tool_calls") or []
        reasoning = turn.message.get("reasoning_content") or ""
        last = _last_status(turn)
        out = self.delta(content[self._sent_content :], reasoning[self._sent_reasoning :])
        if self._open is None and not self._items and not calls:
            out += self._add("message")
        if self._late:
            out += self._close() + self._text("reasoning", self._late)
        out += self._close(last)
        for call in calls:
            out += self._call(call)
        response = _finished(self._head, turn, self._items)
        return out + self._event(f"response.{response['status']}", response=response)

    def error(self, error: CaptureError) -> bytes:
        out = b"" if self._number else self.start(None)
        fault = {"code": _stream_code(error), "message": explain(error)}
        return out + self._event("response.failed", response={**self._head, "status": "failed", "error": fault})

    def _text(self, kind: str, text: str) -> bytes:
        out = b"" if self._open is not None and self._open.kind == kind else self._close() + self._add(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        if kind == "message":
            return out + self._part_event("response.output_text.delta", delta=text, logprobs=[])
        return out + self._part_event("response.reasoning_text.delta", delta=text)

    def _add(self, kind: str) -> bytes:
        """Open a text item and its one part."""
        blank = _message if kind == "message" else _reasoning
        self._open = _OpenText(kind, item_id(_PREFIX[kind], self._turn_id, len(self._items)), [])
        empty = {**blank(self._open.id, ""), "status": "in_progress", "content": []}
        empty.pop("encrypted_content", None)
        out = self._event("response.output_item.added", output_index=len(self._items), item=empty)
        return out + self._part_event("response.content_part.added", part=_part(kind, ""))

    def _close(self, status: str = "completed") -> bytes:
        if self._open is None:
            return b""
        kind, text = self._open.kind, "".join(self._open.pieces)
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        name = "output_text" if kind == "message" else "reasoning_text"
        out = self._part_event(f"response.{name}.done", text=text, **extra)
        out += self._part_event("response.content_part.done", part=_part(kind, text))
        item = (_message if kind == "message" else _reasoning)(self._open.id, text)
        self._open = None
        return out + self._done({**item, "status": status})

    def _call(self, call: dict[str, Any]) -> bytes:
        item = call_item(self._notes.names, self._turn_id, len(self._items), call)
        kind, key = ("function_call_arguments", "arguments")
        if item["type"] == "custom_tool_call":
            kind, key = ("custom_tool_call_input", "input")
        where = {"item_id": item["id"], "output_index": len(self._items)}
        out = self._event(
            "response.output_item.added",
            output_index=where["output_index"],
            item={**item, key: "", "status": "in_progress"},
        )
        out += self._event(f"response.{kind}.delta", **where, delta=item[key])
        name = {"name": item["name"]} if key == "arguments" else {}
        out += self._event(f"response.{kind}.done", **where, **{key: item[key]}, **name)
        return out + self._done(item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        where = {"item_id": self._open.id, "output_index": len(self._items), "content_index": 0}
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


@dataclass(slots=True)
class _OpenText:
    kind: str  # "reasoning" or "message"
    id: str
    pieces: list[str]


_PREFIX = {"reasoning": "rs", "message": "msg"}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _message(own_id: str, text: str) -> dict[str, Any]:
    content = [_part("message", text)]
    return {"id": own_id, "type": "message", "role": "assistant", "status": "completed", "content": content}


def _reasoning(own_id: str, text: str) -> dict[str, Any]:
    return {
        "id": own_id,
        "type": "reasoning",
        "summary": [],
        "content": [_part("reasoning", text)],
        "encrypted_content": seal_reasoning(text),
        "status": "completed",
    }


def call_item(names: Mapping[str, ToolName], turn_id: str, index: int, call: dict[str, Any]) -> dict[str, Any]:
    """A tool call of the model, as an item of the kind that the agent declared the tool to be."""
    name, arguments = call["function"]["name"], call["function"]["arguments"] or "{}"
    tool = names.get(name) or ToolName(name, None, custom=False)
    kind, prefix = ("custom_tool_call", "ctc") if tool.custom else ("function_call", "fc")
    item = {"id": item_id(prefix, turn_id, index), "type": kind, "call_id": call["id"], "name": tool.name}
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    return {
        **item,
        **({"input": raw_text(arguments)} if tool.custom else {"arguments": arguments}),
        "status": "completed",
    }


def raw_text(arguments: str) -> str:
    """The raw text in the arguments of a custom tool's call, e.g. '{"input": "a\\n"}' gives "a\n".

    A model that misses the form meant the one string it wrote; failing that, the tool is given the arguments as they
    are, so that its own complaint reaches the model.
    """
    try:
        given = parse_json(arguments.encode())
    except BadRequest:
        return arguments
    if isinstance(given, dict):
        given = given.get("input", next(iter(given.values())) if len(given) == 1 else None)
    return given if isinstance(given, str) else arguments


def _head(notes: Notes, turn_id: str, model: str, created: int) -> dict[str, Any]:
    return {
        "id": response_id(turn_id),
        "object": "response",
        "created_at": created,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **notes.echo,
    }


def _finished(head: dict[str, Any], turn: Turn, items: list[dict[str, Any]]) -> dict[str, Any]:
    response = {**head, "status": "completed", "output": items, "usage": _usage(turn), "completed_at": int(time.time())}
    if turn.finish_reason in _INCOMPLETE:
        response |= {"status": "incomplete", "incomplete_details": {"reason": _INCOMPLETE[turn.finish_reason]}}
    return response


_INCOMPLETE: dict[str | None, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}


def _last_status(turn: Turn) -> str:
    """How the last text of a reply ended; whole calls after it prove that the text was whole."""
    return "incomplete" if turn.finish_reason in _INCOMPLETE and not turn.message.get("tool_calls") else "completed"


def _usage(turn: Turn) -> dict[str, Any]:
    prompt, completion = len(turn.prompt_ids_P), len(turn.completion_ids_T)
    # The two details are not counted here, but clients refuse a usage without them.
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def explain(error: CaptureError) -> str:
    """The error's text; where agents look for a sentence of this API's own, that sentence comes first."""
    if isinstance(error, PromptTooLong):
        return f"Your input exceeds the context window of this model. Please shorten it and try again. ({error})"
    return str(error)


def _stream_code(error: CaptureError) -> str:
    """What makes an agent act rightly: codex goes on retrying after any code but a few, these among them."""
    if isinstance(error, PromptTooLong):
        return error.code
    return "invalid_prompt" if error.status < 500 else "server_error"

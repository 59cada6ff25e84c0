"""Responses input items as chat messages.

Owns what an item means to the model, and the ids and sealed reasoning by which items of our replies are known again
when an agent echoes them. `openai_responses` calls it for each request; `openai_responses_stream` writes the items of a
reply.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from capture_proxy.dialects.body import parse_json
from capture_proxy.dialects.openai_responses_tools import flat_name, read_name
from capture_proxy.errors import BadRequest
from capture_proxy.types import Finding, Severity

# Reasoning travels in `encrypted_content` too: clients that drop or rewrite the readable text still echo this field,
# which they must treat as opaque. The mark tells ours from another provider's.
_SEALED = "plain1."
_OUR_ITEM = re.compile(r"[a-z]+_([0-9a-f]{16})_\d+")
_TEXT_PARTS = {"input_text", "output_text", "text", "summary_text", "reasoning_text"}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_REASONING, _TEXT, _CALL = range(3)  # the order of one reply's items


def item_id(kind: str, turn_id: str, index: int) -> str:
    """The id of a turn's output item, e.g. "fc_90c1a4f0b2d39e11_2"; it says which turn the item is of."""
    return f"{kind}_{hashlib.blake2b(turn_id.encode(), digest_size=8).hexdigest()}_{index}"


def seal_reasoning(text: str) -> str:
    """`text` in the form that `read_input` finds again in an echoed `encrypted_content`."""
    return _SEALED + base64.b64encode(text.encode("utf-8", "replace")).decode()


@dataclass(slots=True)
class _Slot:
    """A message, and the outputs that answer its calls, which follow it in the order of the calls."""

    message: dict[str, Any]
    turn: str | None = None  # which of our replies it is, as far as an item's id says
    reached: int = -1  # the last kind of item taken into an assistant message
    outputs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by call id


_NOTHING_SAID = {"role": "assistant", "content": None}


class _History:
    """Puts the items of one model turn back into the one message that they were.

    Item ids say which turn an item is of where agents kept ours; where they made up their own, or none, the order that
    replies are written in (reasoning, text, calls) tells turns apart.
    """

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._open: _Slot | None = None  # the assistant message that may still grow
        self._by_turn: dict[str, _Slot] = {}
        self._by_call: dict[str, _Slot] = {}
        self.dropped: dict[str, list[int]] = {}  # item type -> where

    def messages(self) -> list[dict[str, Any]]:
        out = []
        for slot in self._slots:
            if slot.message == _NOTHING_SAID:
                continue  # reasoning of which only an empty shell came back
            out.append(slot.message)
            for call in slot.message.get("tool_calls") or []:
                if waiting := slot.outputs.get(call["id"]):
                    out.append(waiting.pop(0))
            for waiting in slot.outputs.values():
                out += waiting
        return out

    def take(self, item: Any, index: int) -> None:
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{where} must be an object")
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"  # the short form of a message has no type
        if not isinstance(kind, str):
            raise BadRequest(f"{where} must have a type")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, index)
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            self._call(kind, item, where)
        elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
            self._output(item, where)
        elif kind == "item_reference":
            raise BadRequest(f"{where}: item references are not kept: send whole items (store: false)")
        elif "compaction" in kind:
            raise BadRequest(f"{where}: a {kind} item can only be read by the provider that made it")
        else:
            self.dropped.setdefault(kind, []).append(index)

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = _ROLES.get(item["role"]) if isinstance(item.get("role"), str) else None
        if role is None:
            raise BadRequest(
                f"{where}.role must be one of user, assistant, system, developer, not {item.get('role')!r}"
            )
        content = _content(item.get("content"), f"{where}.content", join=role == "assistant")
        if role != "assistant":
            self._open = None
            self._slots.append(_Slot({"role": role, "content": content}))
            return
        if isinstance(content, list):
            raise BadRequest(f"{where}.content of an assistant must be text")
        message = self._assistant(item, _TEXT).message
        message["content"] = (message["content"] or "") + content

    def _reasoning(self, item: dict[str, Any], index: int) -> None:
        message = self._assistant(item, _REASONING).message
        if text := _reasoning_text(item):
            message["reasoning_content"] = message.get("reasoning_content", "") + text
        elif item.get("encrypted_content"):
            self.dropped.setdefault("reasoning of another provider", []).append(index)

    def _call(self, kind: str, item: dict[str, Any], where: str) -> None:
        call_id = _call_id(item, where)
        if kind == "function_call":
            name = flat_name(read_name(item, where), item.get("namespace"))
            arguments = _arguments(item.get("arguments"), f"{where}.arguments")
        elif kind == "custom_tool_call":
            name = flat_name(read_name(item, where), item.get("namespace"))
            if not isinstance(item.get("input"), str):
                raise BadRequest(f"{where}.input must be a string")
            arguments = orjson.dumps({"input": item["input"]}).decode()
        else:
            name, arguments = "local_shell", orjson.dumps(item.get("action")).decode()
        slot = self._assistant(item, _CALL)
        function = {"name": name, "arguments": arguments}
        slot.message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._by_call[call_id] = slot

    def _output(self, item: dict[str, Any], where: str) -> None:
        self._open = None
        call_id = _call_id(item, where)
        raw = item.get("output")
        if isinstance(raw, dict | int | float):
            raw = orjson.dumps(raw).decode()
        message = {"role": "tool", "content": _content(raw, f"{where}.output"), "tool_call_id": call_id}
        slot = self._by_call.get(call_id)
        if slot is None:  # its call is in the history that `previous_response_id` continues, or was compacted away
            self._slots.append(_Slot(message))
        else:
            slot.outputs.setdefault(call_id, []).append(message)

    def _assistant(self, item: dict[str, Any], kind: int) -> _Slot:
        ours = _OUR_ITEM.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
        turn = ours[1] if ours else None
        slot = self._by_turn.get(turn) if turn else None
        if slot is None:
            slot = self._open
            follows = slot is not None and (slot.reached < kind or slot.reached == kind == _CALL)
            if slot is None or not follows or (turn and slot.turn):
                slot = _Slot(dict(_NOTHING_SAID))
                self._slots.append(slot)
            if turn:
                slot.turn, self._by_turn[turn] = turn, slot
        slot.reached = max(slot.reached, kind)
        self._open = slot
        return slot


def read_input(raw: Any) -> tuple[list[dict[str, Any]], list[Finding]]:
    """`input` as chat messages, system messages still where they were sent. Raises BadRequest."""
    if isinstance(raw, str) and raw:
        return [{"role": "user", "content": raw}], []
    if not isinstance(raw, list) or not raw:
        raise BadRequest("input must be a string or a non-empty list of items")
    history = _History()
    for index, item in enumerate(raw):
        history.take(item, index)
    findings = [
        Finding(Severity.WARN, "item_dropped", f"{kind}: not shown to the model (input {', '.join(map(str, where))})")
        for kind, where in history.dropped.items()
    ]
    return history.messages(), findings


def _content(raw: Any, where: str, join: bool = False) -> str | list[dict[str, Any]]:
    """Text, or a list of chat parts when there is more than one; a lone text part is its text, as are joined ones."""
    if raw is None or isinstance(raw, str):
        return raw or ""
    if not isinstance(raw, list):
        raise BadRequest(f"{where} must be a string or a list of parts")
    parts = [_part(part, f"{where}[{i}]") for i, part in enumerate(raw)]
    if all(part["type"] == "text" for part in parts) and (len(parts) < 2 or join):
        return "".join(part["text"] for part in parts)
    return parts


def _part(raw: Any, where: str) -> dict[str, Any]:
    if isinstance(raw, str):
        return {"type": "text", "text": raw}
    kind = raw.get("type") if isinstance(raw, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(f"{where} must be an object with a type")
    if kind in _TEXT_PARTS or kind == "refusal":
        text = raw.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise BadRequest(f"{where} must have a text")
        return {"type": "text", "text": text}
    if kind == "input_image":
        url = raw.get("image_url")
        if not isinstance(url, str):
            raise BadRequest(f"{where}: an image must come as image_url: uploaded files are not kept here")
        detail = {"detail": raw["detail"]} if isinstance(raw.get("detail"), str) else {}
        return {"type": "image_url", "image_url": {"url": url, **detail}}
    raise BadRequest(f"{where}: parts of type {kind!r} cannot be shown to this model: send text or an image_url")


def _reasoning_text(item: dict[str, Any]) -> str:
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(_SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
        except ValueError:  # cut or altered on the way: the readable text is next best
            sealed = None
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, str):
            return parts
        if isinstance(parts, list):
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            if text := "".join(t for t in texts if isinstance(t, str)):
                return text
    return ""


def _call_id(item: dict[str, Any], where: str) -> str:
    call_id = item.get("call_id") or (item.get("id") if item.get("type") == "local_shell_call_output" else None)
    if not isinstance(call_id, str) or not call_id:
        raise BadRequest(f"{where} must have a call_id")
    return call_id


def _arguments(raw: Any, where: str) -> str:
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return "{}"
    if isinstance(raw, dict):
        return orjson.dumps(raw).decode()
    if not isinstance(raw, str):
        raise BadRequest(f"{where} must be a JSON object in a string")
    try:
        parse_json(raw.encode())
    except BadRequest:
        raise BadRequest(f"{where} is not valid JSON: send the arguments as the model wrote them") from None
    return raw

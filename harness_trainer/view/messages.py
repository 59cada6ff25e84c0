"""A call's messages as plain text, in parts, and a slice of one that is too long to be shown at once.

Owns how content of whatever form becomes text: a list of parts, a tool call, an image. Nothing is interpreted, because
an agent may send anything. Called by `traces`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from capture_proxy.types import Turn
from harness_trainer.view.visible import as_text, visible
from jobs.masking import Mask

SHOWN = 2_000  # characters of a text that are shown before a person asks for more
SLICE = 200_000  # characters of one answer to that
REPLY = "reply"  # the key of the assistant's message; the others have their place in the request


@dataclass(frozen=True, slots=True)
class Message:
    """Example: Message("3", "tool", "file.txt ...", total=1048576). Text is `visible`, and cut to SHOWN."""

    key: str  # place in the request's messages, or REPLY
    role: str
    text: str
    total: int  # characters of the whole text
    calls: list[tuple[str, str]] = field(default_factory=list)  # tool calls: name, and the start of the arguments

    @property
    def is_cut(self) -> bool:
        return self.total > len(self.text)


def messages_of(turn: Turn) -> list[Any]:
    messages = turn.request.get("messages")
    return messages if isinstance(messages, list) else []


def num_repeated(turn: Turn, parent: Turn | None) -> int:
    """How many leading messages the parent's request had too; its reply comes after them."""
    count = 0
    for own, earlier in zip(messages_of(turn), messages_of(parent) if parent else [], strict=False):
        if own is not earlier and own != earlier:
            break
        count += 1
    return count


def message(turn: Turn, key: str, mask: Mask) -> Message:
    """Raises KeyError for one that the turn does not have."""
    value = _value(turn, key)
    text = visible(mask(whole_text(value)))
    role = value.get("role") if isinstance(value, Mapping) else None
    return Message(key, visible(str(role or "unknown")), text[:SHOWN], len(text), _calls(value, mask))


def part(turn: Turn, key: str, mask: Mask, offset: int) -> dict[str, Any]:
    """Characters from `offset` on. Raises KeyError."""
    text = visible(mask(whole_text(_value(turn, key))))
    start = min(max(0, offset), len(text))
    end = min(len(text), start + SLICE)
    return {"text": text[start:end], "start": start, "end": end, "total": len(text)}


def whole_text(value: Any) -> str:
    """Reasoning, content and tool calls of a message, one after the other."""
    if not isinstance(value, Mapping):
        return as_text(value)
    texts = []
    for name in ("reasoning_content", "reasoning"):
        if value.get(name):
            texts.append(f"[{name}]\n{_content(value[name])}")
            break
    if value.get("content") is not None:
        texts.append(_content(value["content"]))
    calls = value.get("tool_calls")
    texts += [
        f"[tool call] {name} {arguments}" for name, arguments in map(_call, calls if isinstance(calls, list) else [])
    ]
    return "\n".join(texts)


def _value(turn: Turn, key: str) -> Any:
    if key == REPLY:
        return turn.message
    messages = messages_of(turn)
    if not key.isdecimal() or len(key) > 9 or int(key) >= len(messages):
        raise KeyError(key)
    return messages[int(key)]


def _content(content: Any) -> str:
    if not isinstance(content, list):
        return as_text(content)
    texts = []
    for piece in content:
        text = piece.get("text") if isinstance(piece, Mapping) else None
        texts.append(text if isinstance(text, str) else as_text(piece))
    return "\n".join(texts)


def _calls(value: Any, mask: Mask) -> list[tuple[str, str]]:
    calls = value.get("tool_calls") if isinstance(value, Mapping) else None
    found = [_call(call) for call in calls] if isinstance(calls, list) else []
    return [(visible(mask(name)), visible(mask(arguments))[:200]) for name, arguments in found]


def _call(call: Any) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "unknown", as_text(call)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return str(function.get("name") or "unknown"), text

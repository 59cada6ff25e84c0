"""What ORS says, in blocks, as the messages and contents of OpenAI's chat API.

Owns the mapping, from the wire's JSON and not from the SDK's types, which leave out blocks that they do not know: here
each becomes a note, so that the model knows that something is missing. Text alone becomes text, joined by newlines as
TRL joins it; images stay parts, which the tool loop replaces by a note where the model reads text only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness_trainer.loops.base import Content, Message

NOTHING_SAID = "(no output)"  # of a tool, as TRL words it
Mask = Callable[[str], str]


def as_content(blocks: Any, mask: Mask = str) -> Content:
    """Blocks as text, or as parts where there is an image among them."""
    listed = [block for block in blocks or () if isinstance(block, Mapping)]
    parts = [part for block in listed if (part := _part(block, mask)) is not None]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def as_messages(messages: Sequence[Mapping[str, Any]], mask: Mask = str) -> list[Message]:
    """A conversation as ORS has it (blocks placed as Anthropic does) as OpenAI's: each tool result is a message."""
    told: list[Message] = []
    for message in messages:
        blocks = [block for block in message.get("blocks") or () if isinstance(block, Mapping)]
        if message.get("role") == "assistant":
            told.append(_assistant(blocks, mask))
            continue
        rest = []
        for block in blocks:
            if block.get("type") != "tool_result":
                rest.append(block)
                continue
            content = as_content(block.get("blocks"), mask)
            told.append({"role": "tool", "tool_call_id": str(block.get("tool_call_id")), "content": content})
        if rest:
            told.append({"role": str(message.get("role")), "content": as_content(rest, mask)})
    return told


def text_of(content: Content) -> str:
    """What of a content is text; of each image a note."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else "[an image is left out]" for part in content)


def _assistant(blocks: Sequence[Mapping[str, Any]], mask: Mask) -> Message:
    kinds = ("reasoning", "tool_call")
    visible = as_content([block for block in blocks if block.get("type") not in kinds], mask)
    message: Message = {"role": "assistant", "content": visible}
    if reasoning := [mask(str(block.get("text", ""))) for block in blocks if block.get("type") == "reasoning"]:
        message["reasoning_content"] = "\n\n".join(reasoning)
    calls = [
        {
            "id": str(block.get("id")),
            "type": "function",
            "function": {"name": str(block.get("name")), "arguments": json.dumps(block.get("input") or {})},
        }
        for block in blocks
        if block.get("type") == "tool_call"
    ]
    return {**message, "tool_calls": calls} if calls else message


def _part(block: Mapping[str, Any], mask: Mask) -> dict[str, Any] | None:
    kind = block.get("type")
    if kind == "text":
        text = mask(str(block.get("text") or ""))
        return {"type": "text", "text": text} if text else None
    if kind == "image":
        url = f"data:{block.get('mimeType') or 'image/png'};base64,{block.get('data') or ''}"
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": f"[a block of type {kind} is left out]"}

"""What a tool returned, as the model is told it: text, or content parts.

Owns the forms. Text is what TRL makes of it (`str`), so that a policy that was trained there sees the same; bytes are
read as text, because their Python spelling is of use to nobody. Called by environments for what their tools return, and
by `tool_loop` for its bounds.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from harness_trainer.loops.base import Content

_NO_IMAGES = "[an image is left out: the model reads text only]"


def as_content(value: Any) -> Content:
    """Any object as the content of a tool's message. Raises whatever its `str` raises."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, list) and value and all(_is_part(part) for part in value):
        return [_as_openai(part) for part in value]
    return str(value)


def error_content(error: BaseException | str) -> str:
    """How the model is told that a call failed: TRL's form."""
    return str({"error": str(error) or type(error).__name__})


def bounded(content: Content, *, max_chars: int, images: bool) -> Content:
    """Within a rollout's limits; where something is left out, the text says so."""
    if isinstance(content, str):
        return _cut(content, max_chars)
    parts: list[dict[str, Any]] = []
    left = max_chars
    for part in content:
        if part.get("type") == "text":
            text = _cut(str(part.get("text", "")), max(0, left))
            left -= len(text)
            parts.append({"type": "text", "text": text})
        else:
            parts.append(part if images else {"type": "text", "text": _NO_IMAGES})
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[{len(text) - max_chars} more characters are left out]"


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _as_openai(part: dict[str, Any]) -> dict[str, Any]:
    """TRL's image part has the image itself: {"type": "image", "image": a PIL image or an address}."""
    if part["type"] != "image" or "image" not in part:
        return dict(part)
    image = part["image"]
    if isinstance(image, bytes):
        return _image_url(image)
    if hasattr(image, "save"):
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return _image_url(buffer.getvalue())
    return {"type": "image_url", "image_url": {"url": str(image)}}


def _image_url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}

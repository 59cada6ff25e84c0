"""Untrusted text made fit to be looked at: what is invisible, or changes what stands beside it, is shown as a sign.

Owns characters and numbers, not markup: templates escape. Used by every page and by every answer in JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

# All that changes the order in which a line is read, or takes part in no line: U+200B..F, the embeddings and isolates,
# the Arabic letter mark, the tag characters, a byte order mark inside a text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
                       "\U000e0000-\U000e007f]")  # fmt: skip


def visible(text: str) -> str:
    """Example: visible("a\\0b\\u202ec") == "a␀b⟨U+202E⟩c"; lone surrogates become encodable too."""
    return _CONTROLS.sub(lambda match: _sign(ord(match[0])), text)


def _sign(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def as_text(value: Any) -> str:
    """Any JSON value as a person reads it: strings as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


def to_json(value: Any) -> bytes:
    """Standard JSON, whatever the strings hold: all that is not ASCII is escaped, what is no number is null."""
    return json.dumps(_finite(value), ensure_ascii=True, allow_nan=False).encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string in it changed, keys excepted."""
    if isinstance(value, dict):
        return {key: each_text(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [each_text(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def number(value: Any) -> float | None:
    """A finite number as such; anything else, None and truth values included, is None: unknown."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None

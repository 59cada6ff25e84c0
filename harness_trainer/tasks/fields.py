"""Typed access to a raw task: each error names the file, the field, what it holds and what it should hold.

Owns checking single values; what a field means is `config`'s and `jsonl`'s.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness_trainer.errors import TaskError
from harness_trainer.tasks.base import DEFAULT_TIMEOUT_S


class Fields:
    """Reads a task.toml or a JSONL line. Methods raise TaskError; an absent field reads as None or empty."""

    def __init__(self, where: Path | str, raw: dict[str, Any]) -> None:
        self.where = where
        self._raw = raw

    def get(self, *path: str) -> Any:
        value: Any = self._raw
        for number, key in enumerate(path):
            if not isinstance(value, dict):
                raise self.wrong(path[:number], value, "a table")
            value = value.get(key)
            if value is None:
                return None
        return value

    def wrong(self, path: Sequence[str], value: object, wanted: str) -> TaskError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return TaskError(f"{self.where}: `{'.'.join(path)}` must be {wanted}, not {shown}")

    def refuse(self, reason: str) -> TaskError:
        return TaskError(f"{self.where}: {reason}")

    def table(self, *path: str) -> dict[str, Any]:
        value = self.get(*path)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(path, value, "a table")
        return value

    def list(self, *path: str) -> list[Any]:
        value = self.get(*path)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(path, value, "a list")
        return value

    def text(self, *path: str) -> str:
        value = self.get(*path)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(path, value, "a text that is not empty")
        return value

    def optional_text(self, *path: str) -> str | None:
        return None if self.get(*path) is None else self.text(*path)

    def texts(self, *path: str) -> tuple[str, ...]:
        value = self.list(*path)
        if not all(isinstance(item, str) and item.strip() for item in value):
            raise self.wrong(path, value, "a list of texts")
        return tuple(value)

    def choice(self, *path: str, among: Sequence[str]) -> str | None:
        value = self.get(*path)
        if value is not None and value not in among:
            raise self.wrong(path, value, f"one of {', '.join(among)}")
        return None if value is None else str(value)

    def flag(self, *path: str) -> bool | None:
        value = self.get(*path)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(path, value, "true or false")
        return value

    def seconds(self, *path: str, default: float = DEFAULT_TIMEOUT_S, least: float | None = None) -> float:
        """A number above 0, or from `least` on."""
        value = self.get(*path)
        if value is None:
            return default
        if not is_number(value) or (value <= 0 if least is None else value < least):
            bound = "above 0" if least is None else f"from {least:g} on"
            raise self.wrong(path, value, f"a number of seconds {bound}")
        return float(value)

    def amount(self, *path: str) -> float | None:
        value = self.get(*path)
        if value is not None and (not is_number(value) or value <= 0):
            raise self.wrong(path, value, "a number above 0")
        return None if value is None else float(value)

    def whole(self, *path: str, least: int = 1) -> int | None:
        value = self.get(*path)
        if value is None:
            return None
        if not is_number(value) or value != int(value) or value < least:
            raise self.wrong(path, value, f"a whole number from {least} on")
        return int(value)

    def size_mb(self, *path: str) -> int | None:
        """Harbor's older form of a size, like "2G" or "512M". Raises TaskError for anything else."""
        value = self.get(*path)
        if value is None:
            return None
        factors = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
        text = value.strip().upper() if isinstance(value, str) else ""
        try:
            size = int(float(text[:-1]) * factors[text[-1:]])
        except (KeyError, ValueError, OverflowError):
            size = 0
        if size <= 0:
            raise self.wrong(path, value, f'a size like "2G", or better {path[-1]}_mb = 2048')
        return size

    def user(self, *path: str) -> str | None:
        """A name or a number."""
        value = self.get(*path)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | str) or str(value).strip() in ("", "-1"):
            raise self.wrong(path, value, "a user's name or number")
        return str(value)

    def folder(self, *path: str) -> str | None:
        value = self.optional_text(*path)
        if value is not None and (not value.startswith("/") or "\0" in value):
            raise self.wrong(path, value, "an absolute path in the sandbox")
        return None if value is None else posixpath.normpath(value)

    def env(self, *path: str) -> dict[str, str]:
        table = self.table(*path)
        for name, value in table.items():
            if not isinstance(value, str):
                raise self.wrong((*path, name), value, "a text in quotes")
            if not name or "=" in name or "\0" in name + value:
                raise self.wrong(path, name, "variables whose names have no `=`")
        return table

    def reward_range(self, metadata: Mapping[str, Any]) -> tuple[float, float]:
        value = metadata.get("reward_range", [0.0, 1.0])
        if not isinstance(value, list) or len(value) != 2 or not all(map(is_number, value)) or value[0] >= value[1]:
            raise self.wrong(("metadata", "reward_range"), value, "two rising numbers like [0.0, 1.0]")
        return float(value[0]), float(value[1])


def is_number(value: object) -> bool:
    """A finite number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False

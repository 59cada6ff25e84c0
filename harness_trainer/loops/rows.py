"""Rows of data as tasks: a JSONL file whose lines are the columns of a dataset, for environments that have no tasks.

Owns the file's form. Each line is an object: `prompt` (messages, or text), which an environment's `reset` may supply
instead, and any other columns; `name` names the task. Called by the environments that `--tasks rows.jsonl` feeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from harness_trainer.loops.base import ROW, EnvironmentFault, Message
from harness_trainer.tasks import Task


def load_rows(path: Path) -> list[Task]:
    """One task per line. Raises EnvironmentFault naming the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EnvironmentFault(f"--tasks {path} cannot be read: {reason}; give a JSONL file, a row per line") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold other line separators raw
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise EnvironmentFault(f"{path}:{number} is not valid JSON: {error}; each line is one row") from error
        if not isinstance(row, dict):
            raise EnvironmentFault(f"{path}:{number} is no object; each line is one row: its columns by name")
        rows.append((f"{path}:{number}", row))
    return tasks_of(rows, path)


def tasks_of(rows: Iterable[tuple[str, dict[str, Any]]], path: Path) -> list[Task]:
    """Rows, each with where it stands, as tasks with names of their own. Raises EnvironmentFault."""
    tasks = []
    for number, (where, row) in enumerate(rows):
        name = row.get("name")
        name = name if isinstance(name, str) and name.strip() else f"row-{number:05d}"
        tasks.append(Task(name, path, _instruction(row, where), metadata={ROW: row}))
    if not tasks:
        raise EnvironmentFault(f"--tasks {path} has no rows: write one JSON object per line")
    twice = [name for name, count in Counter(task.name for task in tasks).items() if count > 1]
    if twice:
        raise EnvironmentFault(f"{path}: several rows are named {twice[0]!r}; give each a name of its own, or none")
    return tasks


def prompt_of(row: dict[str, Any]) -> list[Message]:
    """The row's prompt as messages; a row without one begins with an empty message that `reset` fills, as in TRL."""
    prompt = row.get("prompt", "")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [dict(message) for message in messages]


def _instruction(row: dict[str, Any], where: str) -> str:
    prompt = row.get("prompt", "")
    fits = isinstance(prompt, str) or (
        isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
    )
    if not fits:
        raise EnvironmentFault(
            f'{where}: prompt must be text, or messages such as [{{"role": "user", "content": ...}}]'
        )
    content = prompt if isinstance(prompt, str) else prompt[-1].get("content") or ""
    return content if isinstance(content, str) else " ".join(str(p.get("text", "")) for p in content)

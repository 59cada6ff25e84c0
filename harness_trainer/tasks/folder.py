"""Reads one Harbor task folder: task.toml, instruction.md, environment/, tests/test.sh, solution/solve.sh.

Owns the files of a folder and their checks; task.toml's fields are `config`'s. Called by `spec`.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path

from harness_trainer.errors import TaskError
from harness_trainer.tasks import config
from harness_trainer.tasks.base import Task
from harness_trainer.tasks.fields import Fields

_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)


def load_task(folder: Path) -> Task:
    """Read one Harbor task folder. Raises TaskError that names the file, the field and the fix."""
    folder = folder.resolve()
    toml = folder / "task.toml"
    try:
        raw = tomllib.loads(read_text(toml, "every task folder needs one; a minimal one holds: [metadata]"))
    except tomllib.TOMLDecodeError as e:
        raise TaskError(f"{toml} is not valid TOML: {e}") from e
    fields = Fields(toml, raw)
    config.refuse_unsupported(fields)
    instruction = _strip_canary(read_text(folder / "instruction.md", "write there what the agent shall do")).strip()
    if not instruction:
        raise TaskError(f"{folder / 'instruction.md'} is empty; write there what the agent shall do")
    if not (folder / "tests" / "test.sh").is_file():
        raise TaskError(f"{folder / 'tests' / 'test.sh'} is missing; it must write /logs/verifier/reward.txt")
    if (folder / "trajectory.json").exists():
        raise TaskError(f"{folder / 'trajectory.json'}: agents cannot start with a history; leave the task out")
    for part in ("environment", "tests", "solution"):
        _check_tree(folder / part)
    metadata = fields.table("metadata")
    name = fields.text("task", "name") if "name" in fields.table("task") else folder.name
    return Task(
        name=name,
        path=folder,
        instruction=instruction,
        tests_dir=folder / "tests",
        box=config.read_box(fields, name, folder),
        agent_timeout_s=fields.seconds("agent", "timeout_sec"),
        verifier_timeout_s=fields.seconds("verifier", "timeout_sec"),
        verifier_user=fields.user("verifier", "user"),
        verifier_network=config.read_verifier_network(fields),
        verifier_fresh=config.read_verifier_fresh(fields, folder),
        env_vars=fields.env("verifier", "env"),
        artifacts=config.read_artifacts(fields),
        solution_dir=folder / "solution" if (folder / "solution" / "solve.sh").is_file() else None,
        solution_env=fields.env("solution", "env"),
        metadata=metadata,
        reward_range=fields.reward_range(metadata),
        findings=config.read_findings(fields, folder),
        raw=raw,
    )


def looks_like_task(folder: Path) -> bool:
    return any((folder / part).exists() for part in ("task.toml", "instruction.md", "tests/test.sh"))


def read_text(path: Path, hint: str) -> str:
    """The file's text. Raises TaskError with `hint` when it is missing."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise TaskError(f"{path} is missing; {hint}") from e
    except (OSError, UnicodeDecodeError) as e:
        raise TaskError(f"{path} cannot be read: {e}") from e


def _strip_canary(text: str) -> str:
    """Without the leading lines that mark a benchmark's files against training; Harbor hides them from agents too."""
    lines = text.split("\n")
    while lines and _CANARY.match(lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines)


def _check_tree(folder: Path) -> None:
    """Raises TaskError for what could not be copied into a sandbox, before a run has begun."""
    if folder.is_symlink():
        raise TaskError(f"{folder} is a link; make it a folder of the task")
    for parent, folders, names in os.walk(folder):
        for name in folders + names:
            entry = Path(parent, name)
            if entry.is_symlink():
                target = os.readlink(entry)
                if os.path.isabs(target) or not entry.resolve().is_relative_to(folder):
                    raise TaskError(f"{entry} is a link that leaves {folder.name}/; make it a file")
            elif not stat.S_ISREG(mode := entry.stat().st_mode) and not stat.S_ISDIR(mode):
                raise TaskError(f"{entry} is neither a file nor a folder; remove it")

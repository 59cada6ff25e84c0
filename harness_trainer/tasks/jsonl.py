"""The small form of tasks: a JSONL file in which each line is one task.

    {"name": "hello", "instruction": "Say hello.", "verify": "grep -qi hello ... && echo 1 > ...", "metadata": {}}

`verify` is the text of a shell script or the path of one, relative to the file (a single word that ends in .sh or holds
a slash is a path). Optional: `solution` (a script in the same form, for `tasks check`), `agent_timeout_sec`,
`verifier_timeout_sec`, `env` (for the script), `metadata`, and for the sandbox `image`, `environment_env`, `workdir`,
`user`, `cpus`, `memory_mb`, `storage_mb`, `network_mode` and `allowed_hosts`, which mean what the fields of the same
name in task.toml mean (`image` is its `docker_image`, `environment_env` its [environment.env]).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from harness_trainer.errors import TaskError
from harness_trainer.tasks import config
from harness_trainer.tasks.base import Task
from harness_trainer.tasks.fields import Fields
from harness_trainer.tasks.folder import read_text

_ENVIRONMENT = {"image": "docker_image", "environment_env": "env"} | {
    name: name for name in ("workdir", "cpus", "memory_mb", "storage_mb", "network_mode", "allowed_hosts")
}
_KNOWN = {
    "name",
    "instruction",
    "verify",
    "agent_timeout_sec",
    "verifier_timeout_sec",
    "env",
    "metadata",
    "user",
    "solution",
}


def load_lines(path: Path) -> Iterator[tuple[str, Task | TaskError]]:
    """Each task with where it stands ("tasks.jsonl:3"), or what is wrong with it. Raises TaskError for the file."""
    for number, line in enumerate(read_text(path, "").splitlines(), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                yield where, _load_line(line, path, where)
            except TaskError as error:
                yield where, error


def _load_line(line: str, path: Path, where: str) -> Task:
    try:
        raw = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        raise TaskError(f"{where} is not valid JSON: {e}; each line is one task") from e
    if not isinstance(raw, dict):
        raise TaskError(f"{where} is not an object; each line is one task with name, instruction and verify")
    fields = Fields(where, raw)
    metadata = fields.table("metadata")
    name = fields.text("name")
    asked = Fields(where, _as_toml(raw))
    return Task(
        name=name,
        path=path.resolve(),
        instruction=fields.text("instruction"),
        verify_script=_script(fields, "verify", path),
        solution_script=None if fields.get("solution") is None else _script(fields, "solution", path),
        box=config.read_box(asked, name, path.parent / "no-such-folder"),
        verifier_network=config.read_verifier_network(asked),
        agent_timeout_s=fields.seconds("agent_timeout_sec"),
        verifier_timeout_s=fields.seconds("verifier_timeout_sec"),
        env_vars=fields.env("env"),
        metadata=metadata,
        reward_range=fields.reward_range(metadata),
        findings=tuple(
            f"unknown_field: `{field}` is not a field of a task and is ignored"
            for field in sorted(set(raw) - _KNOWN - set(_ENVIRONMENT))
        ),
        raw=raw,
    )


def _as_toml(raw: dict[str, Any]) -> dict[str, Any]:
    """The line's sandbox fields where task.toml has them."""
    environment = {there: raw[here] for here, there in _ENVIRONMENT.items() if here in raw}
    return {"environment": environment, "agent": {"user": raw.get("user")}}


def _script(fields: Fields, name: str, path: Path) -> str:
    text = fields.text(name).strip()
    if len(text.split()) > 1 or not (text.endswith(".sh") or "/" in text):
        return text
    return read_text(path.parent / text, f"`{name}` of {fields.where} names it")

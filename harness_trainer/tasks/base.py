"""The types of a task, and the ${VAR} templates that are filled in when it is used.

Owns data only. Values that may be secrets stay templates in a `Task`; `resolve_env`, `resolve_box` and
`resolve_solution_env` take them from the environment at the moment of use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness_trainer.errors import TaskError
from sandboxes.base import BoxSpec, Network

DEFAULT_TIMEOUT_S = 600.0  # Harbor's for the verifier; Harbor sets none for the agent, but a run needs an end
_UNNAMED = BoxSpec("")  # takes the task's name
_ENV_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")  # Harbor's: ${VAR} or ${VAR:-default}, the whole value


@dataclass(frozen=True, slots=True)
class Artifact:
    """Files that a task declares as its result. Example: Artifact("/app/out", exclude=("*.tmp",))."""

    source: str  # file or folder in the sandbox; relative = below the working directory
    destination: str | None = None  # relative path below the rollout's artifacts; None = the source's own path
    exclude: tuple[str, ...] = ()  # patterns of names left out of a folder


@dataclass(frozen=True, slots=True)
class Task:
    """One task. Exactly one of `tests_dir` and `verify_script` is set.

    Example: Task("short-reply", Path("examples/tasks/short-reply"), "Write one ...", tests_dir=Path(".../tests")).
    """

    name: str  # unique in a run
    path: Path  # the task folder, or the JSONL file
    instruction: str
    tests_dir: Path | None = None  # copied to /tests when the agent is done; holds test.sh
    verify_script: str | None = None  # becomes /tests/test.sh
    box: BoxSpec = _UNNAMED  # what the agent's sandbox is made of; its ${VAR} are filled in by `resolve_box`
    agent_timeout_s: float = DEFAULT_TIMEOUT_S
    verifier_timeout_s: float = DEFAULT_TIMEOUT_S
    verifier_user: str | None = None  # name or uid that tests run as; None = not asked for
    verifier_network: Network | None = None  # while tests run; None = not asked for
    verifier_fresh: bool = False  # tests must run in a sandbox of their own
    env_vars: dict[str, str] = field(default_factory=dict)  # [verifier.env] as written: ${VAR} is not resolved
    artifacts: tuple[Artifact, ...] = ()  # beside /logs/artifacts, which is always one
    solution_dir: Path | None = None  # holds solve.sh; copied to /solution by `tasks check`, never for an agent
    solution_script: str | None = None  # becomes /solution/solve.sh, for tasks that are no folder
    solution_env: dict[str, str] = field(default_factory=dict)  # [solution.env] as written
    metadata: dict[str, Any] = field(default_factory=dict)
    reward_range: tuple[float, float] = (0.0, 1.0)  # inclusive; [metadata] reward_range = [low, high]
    findings: tuple[str, ...] = ()  # what was read and has no effect here: "code: explanation"
    raw: dict[str, Any] = field(default_factory=dict)  # the whole task.toml, or the JSONL line

    def __post_init__(self) -> None:
        if not self.box.name:
            object.__setattr__(self, "box", replace(self.box, name=self.name))


def resolve_env(task: Task, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """`env_vars` with ${VAR} and ${VAR:-default} taken from `environ` (None = this process's), as Harbor does.

    Raises TaskError when a variable without default is not set.
    """
    return _resolved(task, "verifier", task.env_vars, environ)


def resolve_box(task: Task, environ: Mapping[str, str] | None = None) -> BoxSpec:
    """The task's box with the templates of its environment filled in. Raises TaskError like `resolve_env`."""
    return replace(task.box, env=_resolved(task, "environment", task.box.env, environ)) if task.box.env else task.box


def resolve_solution_env(task: Task, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """`solution_env`, filled in. Raises TaskError like `resolve_env`."""
    return _resolved(task, "solution", task.solution_env, environ)


def _resolved(task: Task, part: str, env: Mapping[str, str], environ: Mapping[str, str] | None) -> dict[str, str]:
    environ = os.environ if environ is None else environ
    resolved = {}
    for name, value in env.items():
        if template := _ENV_TEMPLATE.fullmatch(value):
            found = environ.get(template[1], template[2])
            if found is None:
                raise TaskError(f"task {task.name!r}: its {part} needs {template[1]}; set it: export {template[1]}=...")
            value = found
        resolved[name] = value
    return resolved

"""What an agent is asked to do, and how it is scored: Harbor task folders, local or from the Hub, and JSONL files.

Owns finding, reading and checking tasks. Does not run anything: `rollouts` gives the instruction to an agent, `rewards`
runs the tests. `base` holds the types, `spec` finds what `--tasks` names, `folder` and `jsonl` read the two forms,
`config` reads task.toml, `hub` downloads.
"""

from __future__ import annotations

from harness_trainer.tasks.base import DEFAULT_TIMEOUT_S, Artifact, Task, resolve_box, resolve_env, resolve_solution_env
from harness_trainer.tasks.folder import load_task
from harness_trainer.tasks.spec import EXAMPLES, Found, find_tasks, load_tasks, pin_tasks

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "EXAMPLES",
    "Artifact",
    "Found",
    "Task",
    "find_tasks",
    "load_task",
    "load_tasks",
    "pin_tasks",
    "resolve_box",
    "resolve_env",
    "resolve_solution_env",
]

"""Finds the tasks that `--tasks` names: folders, files, examples, dataset repositories of the Hub.

Owns what a spec means. One broken task among many is an entry with a problem, so that `tasks check` can show all of
them; `load_tasks`, which runs use, raises the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness_trainer.errors import TaskError
from harness_trainer.tasks import hub
from harness_trainer.tasks.base import Task, resolve_box, resolve_env
from harness_trainer.tasks.folder import load_task, looks_like_task
from harness_trainer.tasks.grading import grading_rules
from harness_trainer.tasks.jsonl import load_lines

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"


@dataclass(frozen=True, slots=True)
class Found:
    """One place where a task should be. Exactly one of `task` and `problem` is set.

    Example: Found("tasks.jsonl:3", None, TaskError("tasks.jsonl:3 is not valid JSON: ..."))
    """

    name: str  # the task's, else where it stands
    task: Task | None
    problem: TaskError | None


def load_tasks(spec: str | Path) -> list[Task]:
    """The tasks that `spec` names, in order.

    `spec` is a task folder, a folder of task folders (sorted by name), a JSONL file, `examples`, the name of one
    example, a dataset repository of the Hub (`hf:owner/name[@revision][/subfolder]`, or `owner/name` where no such path
    exists), or several of these with commas between. Raises TaskError, also when a task needs a variable that is not
    set.
    """
    tasks = []
    for found in find_tasks(spec):
        if found.problem is not None:
            raise found.problem
        if found.task is not None:
            tasks.append(found.task)
    return tasks


def find_tasks(spec: str | Path) -> list[Found]:
    """Like `load_tasks`, but a task that cannot be used is an entry with its problem.

    Raises TaskError when the spec names nothing.
    """
    entries = [found for word in _words(spec) for found in _find(word)]
    if not entries:
        raise TaskError(
            "no tasks given; name a task folder, a JSONL file, a dataset of the Hub (hf:owner/name), or: examples"
        )
    seen: dict[str, Task] = {}
    for number, found in enumerate(entries):
        if found.task is None:
            continue
        try:
            if (other := seen.setdefault(found.task.name, found.task)) is not found.task:
                both = f"{other.path} and {found.task.path}"
                raise TaskError(f"two tasks are called {found.task.name!r}: {both}; rename one")
            resolve_env(found.task)  # a missing variable must not surface in the middle of a run
            resolve_box(found.task)
            grading_rules(found.task)
        except TaskError as error:
            entries[number] = Found(found.name, None, error)
    return entries


def pin_tasks(spec: str | Path) -> str:
    """The spec with every dataset's revision replaced by its commit, and every path absolute.

    So all parts of a run read the same tasks, wherever they work.
    """
    return ",".join(_pin(word) for word in _words(spec))


def _pin(word: str) -> str:
    path = Path(word).expanduser()
    if word != "examples" and path.exists():
        return str(path.absolute())
    dataset = None if _is_local(word) else hub.as_dataset(word)
    return word if dataset is None else hub.pin(dataset)


def _words(spec: str | Path) -> list[str]:
    text = str(spec)
    return [text] if Path(text).exists() else [word.strip() for word in text.split(",") if word.strip()]


def _is_local(word: str) -> bool:
    path = Path(word).expanduser()
    return word == "examples" or path.exists() or (word == path.name and (EXAMPLES / word).is_dir())


def _find(word: str) -> Iterator[Found]:
    path = Path(word).expanduser()
    if word == "examples":  # before paths: a clone of the repository has a folder of that name, without tasks in it
        if not EXAMPLES.is_dir():
            raise TaskError(f"the example tasks are not installed (no {EXAMPLES}); run from a clone of the repository")
        yield from _find_in_folder(EXAMPLES)
    elif path.is_dir():
        yield from _find_in_folder(path)
    elif path.is_file():
        for where, task in load_lines(path):
            yield Found(where, None, task) if isinstance(task, TaskError) else Found(task.name, task, None)
    elif _is_local(word):
        yield _found(EXAMPLES / word)
    elif dataset := hub.as_dataset(word):
        yield from _find_in_folder(hub.download(dataset))
    else:
        raise TaskError(
            f"no tasks at {word!r}: it is no folder, no file, not `examples` and no example task"
            f" ({', '.join(sorted(p.name for p in EXAMPLES.glob('*'))) or 'none here'})"
        )


def _find_in_folder(folder: Path) -> Iterator[Found]:
    if looks_like_task(folder):
        yield _found(folder)
        return
    children = [child for child in sorted(folder.iterdir()) if child.is_dir() and looks_like_task(child)]
    if not children:
        raise TaskError(f"{folder} holds no task; a task folder has task.toml, instruction.md and tests/test.sh")
    yield from map(_found, children)


def _found(folder: Path) -> Found:
    try:
        task = load_task(folder)
    except TaskError as error:
        return Found(folder.name, None, error)
    return Found(task.name, task, None)

"""Files between the runner's host and a node: a task's folders on their way there, what is kept of a rollout back.

Owns what is packed and where it lies on a node. Archives are read by `sandboxes.archive`, which follows no link out of
the target: what comes back was made beside a stranger's code.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from harness_trainer.errors import TaskError
from harness_trainer.tasks import Task
from sandboxes.archive import unpack

CHUNK = 4_000_000  # bytes of one message


@dataclass(frozen=True, slots=True)
class Bundle:
    """A task's folders. Example: Bundle("moon", {"tests": b".."}); {} = all of it is in the `Task`."""

    task: str
    folders: dict[str, bytes] = field(default_factory=dict)  # tests, environment -> uncompressed tar


def bundle(task: Task) -> Bundle:
    """Blocking. Raises TaskError."""
    return Bundle(task.name, {name: _packed(task, folder) for name, folder in _folders(task).items()})


def moved(task: Task, home: Path) -> Task:
    """The task with its folders where `unbundle` puts them on a node."""
    there = {name: home / name for name in _folders(task)}
    box = replace(task.box, build_dir=there.get("environment"))
    return replace(
        task, path=home, tests_dir=there.get("tests"), box=box, solution_dir=None, solution_script=None, raw={}
    )


def unbundle(sent: Bundle, home: Path) -> None:
    """Blocking. Raises SandboxError and OSError."""
    for name, archive in sent.folders.items():
        unpack(io.BytesIO(archive), home / name)


def _folders(task: Task) -> dict[str, Path]:
    wanted = {"tests": task.tests_dir, "environment": task.box.build_dir}
    return {name: folder for name, folder in wanted.items() if folder is not None}


def _packed(task: Task, folder: Path) -> bytes:
    archive = io.BytesIO()
    try:
        _pack(folder, archive)
    except (OSError, tarfile.TarError) as error:
        raise TaskError(f"task {task.name!r}: its folder {folder} cannot be sent to another node: {error}") from error
    return archive.getvalue()


def _pack(folder: Path, archive: IO[bytes]) -> None:
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(folder.resolve(), arcname="folder")


def pieces(folder: Path) -> Iterator[bytes]:
    """The folder as an archive, bit by bit; nothing when there is none. Blocking. Raises OSError.

    It is a worker's own: what an agent left unreadable in it is made readable.
    """
    if not folder.is_dir():
        return
    _make_readable(folder)
    with tempfile.TemporaryFile(dir=folder.parent) as archive:
        try:
            _pack(folder, archive)
        except tarfile.TarError as error:
            raise OSError(f"{folder} cannot be packed: {error}") from error
        archive.seek(0)
        while piece := archive.read(CHUNK):
            yield piece


def _make_readable(folder: Path) -> None:
    """Files keep the modes that they had in a sandbox (folders can always be entered, see `unpack`)."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and not mode & stat.S_IRUSR:
                path.chmod(stat.S_IMODE(mode) | stat.S_IRUSR)

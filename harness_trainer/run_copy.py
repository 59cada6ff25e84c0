"""Which files of a run folder make a copy that another machine can go on with, all of one moment.

Owns the choice and its order: a complete checkpoint first, then the store, which is thus never behind it; then what
tells people of the run. Where a copy goes is `jobs.copies`'. Called by the process in a job.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness_trainer.errors import RunDirError
from harness_trainer.learner.checkpoints import last_checkpoint
from harness_trainer.rundir import RunDir, filesystem_errors

_TRIES = 3  # a learner that writes faster than files can be linked


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Example: Snapshot(20, {"store.sqlite": Path(".../internal/copy/store.sqlite"), ...})."""

    step: int  # of its checkpoint
    files: dict[str, Path]  # path in the run folder -> where its content lies now

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())


@contextmanager
def snapshot(run: RunDir) -> Iterator[Snapshot | None]:
    """What the run has come to, as files that nobody changes inside the context; None = there is no checkpoint yet.

    Checkpoints are linked, not copied, where the disk can do that. Raises RunDirError.
    """
    stage = run.internal / "copy"
    with filesystem_errors(run.path):
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True)
    try:
        checkpoint = _staged_checkpoint(run, stage)
        if checkpoint is None:
            yield None
            return
        with filesystem_errors(run.path):
            _copy_store(run.store, stage / run.store.name)
            for file in (run.metrics, run.events, run.config):
                if file.exists():
                    shutil.copyfile(file, stage / file.name)
        files = {str(path.relative_to(stage)): path for path in sorted(stage.rglob("*")) if path.is_file()}
        yield Snapshot(int(checkpoint.name.rpartition("-")[2]), files)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def newest_step(run: RunDir) -> int | None:
    """Of the newest complete checkpoint; None = there is none."""
    checkpoint = last_checkpoint(run.checkpoints)
    return None if checkpoint is None else int(checkpoint.name.rpartition("-")[2])


def _staged_checkpoint(run: RunDir, stage: Path) -> Path | None:
    """The newest complete checkpoint under the stage; the learner may remove its own meanwhile."""
    for _ in range(_TRIES):
        source = last_checkpoint(run.checkpoints)
        if source is None:
            return None
        target = stage / "checkpoints" / source.name
        with filesystem_errors(run.path):
            try:
                shutil.copytree(source, target, copy_function=_link)
            except (FileNotFoundError, shutil.Error) as error:
                if last_checkpoint(source.parent) == source:  # else it was being removed: a newer one is there
                    raise OSError(f"{source.name} cannot be copied: {_first(error)}") from error
            else:
                if last_checkpoint(target.parent) == target:
                    return target
            shutil.rmtree(target.parent, ignore_errors=True)
    raise RunDirError(
        f"the checkpoints in {run.checkpoints} come and go faster than they can be copied: raise save_steps"
    )


def _first(error: OSError) -> str:
    """`shutil` collects what went wrong with each file."""
    found = error.args[0] if isinstance(error, shutil.Error) else None
    return str(found[0][-1]) if isinstance(found, list) and found else str(error)


def _link(source: str, target: str) -> None:
    """A second name for the same bytes: nobody rewrites a checkpoint's file in place."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without links
        shutil.copyfile(source, target)


def _copy_store(source: Path, target: Path) -> None:
    """One moment of it, while others write. Raises RunDirError."""
    try:
        with closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as there:
            with closing(sqlite3.connect(target)) as here:
                there.backup(here)
    except sqlite3.Error as error:
        raise RunDirError(f"the run's store {source} cannot be copied: {error}; free some space") from error

"""The run folder: every path below it, the lock that keeps a second run out, and the config it belongs to.

Owns names and checks, not contents: each file is written by the room that owns it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from harness_trainer.errors import HarnessTrainerError, RunDirError

MIN_FREE_BYTES = 200_000_000
_LOCK_TRIES, _LOCK_AGAIN_S = 4, 0.05


class RunDir:
    """Paths of one run. Creating the object touches nothing; `opened` does."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config = self.path / "config.yaml"
        self.store = self.path / "store.sqlite"
        self.checkpoints = self.path / "checkpoints"
        self.artifacts = self.path / "artifacts"
        self.weights = self.path / "weights"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.logs = self.path / "logs"
        self.internal = self.path / "internal"  # hand-over files between our own processes

    @contextmanager
    def opened(self, config: dict[str, Any], *, may_change: frozenset[str] = frozenset()) -> Iterator[None]:
        """Hold the run folder for one live run, creating it or continuing it with the same config.

        `may_change` names dotted fields that a continued run may give another value.
        Raises RunDirError when the folder cannot be written, is in use, or belongs to another config.
        """
        with filesystem_errors(self.path):
            for folder in (self.path, self.checkpoints, self.artifacts, self.logs, self.internal):
                folder.mkdir(parents=True, exist_ok=True)
            lock = (self.internal / "lock").open("w")
        with lock:
            self._take_lock(lock)
            self._check_space()
            self._check_config(config, may_change)
            try:
                yield
            except HarnessTrainerError as error:
                with suppress(RunDirError):  # what ended the run is to be told, not that it cannot be noted
                    self.event("failed", reason=str(error))
                raise

    def is_held(self) -> bool:
        """Whether a live run has the folder. It takes the lock for a moment, shared; nothing is written."""
        try:
            with (self.internal / "lock").open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go at once, with the file
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    def _take_lock(self, lock: IO[str]) -> None:
        for is_last in (*[False] * _LOCK_TRIES, True):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if is_last:
                    raise RunDirError(
                        f"another run is using {self.path}: wait for it, or give another --run-dir"
                    ) from error
            time.sleep(_LOCK_AGAIN_S)  # it may be somebody who only looks (`is_held`)

    def _check_space(self) -> None:
        free = shutil.disk_usage(self.path).free
        if free < MIN_FREE_BYTES:
            raise RunDirError(
                f"only {free / 1e6:.0f} MB are free for {self.path}, a run needs {MIN_FREE_BYTES / 1e6:.0f} MB: "
                "free some space, or give a --run-dir on another disk"
            )

    def _check_config(self, config: dict[str, Any], may_change: frozenset[str]) -> None:
        import yaml

        if self.config.exists():
            try:
                old = yaml.safe_load(self.config.read_text(encoding="utf-8"))
            except (OSError, yaml.YAMLError) as error:
                raise RunDirError(f"{self.config} cannot be read ({error}): give another --run-dir") from error
            differences = [d for d in _differences(old, config) if d.split(":")[0] not in may_change]
            if differences:
                raise RunDirError(
                    f"{self.path} belongs to a run with another config ({'; '.join(differences[:5])}): "
                    "use the same settings to continue it, or give another --run-dir"
                )
        with filesystem_errors(self.path):
            write_atomically(self.config, yaml.safe_dump(config, sort_keys=False))

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event for people and programs that watch the run.

        It has a line of its own also where a full disk or a power cut left a part of an earlier one.
        """
        line = json.dumps({"time": time.time(), "kind": kind, **fields}).encode() + b"\n"
        with filesystem_errors(self.path), self.events.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)


@contextmanager
def filesystem_errors(path: Path) -> Iterator[None]:
    """Map an OSError of the run folder to one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "the disk is full: free some space and run the same command again to continue"
        elif error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            advice = "it may not be written: give a --run-dir that you own"
        else:
            advice = "check the path and the disk"
        raise RunDirError(f"run folder {path}: {error.strerror or error}; {advice}") from error


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one, also after a kill or a power cut; it is on the disk on return."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def append_line(path: Path, line: str) -> None:
    """It is on the disk on return; a power cut before that leaves a part of it, without the newline."""
    is_new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync(path.parent)


def sync(path: Path) -> None:
    """A file's bytes, or a folder's names, are on the disk on return. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Everything below `folder` is on the disk on return; its own name is its parent's business. Raises OSError."""
    for path, _, files in os.walk(folder, topdown=False):
        for name in files:
            if not os.path.islink(os.path.join(path, name)):  # what it leads to is somebody else's
                sync(Path(path, name))
        sync(Path(path))


def _differences(old: Any, new: Any, at: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in sorted({*old, *new}):
            found += _differences(old.get(key), new.get(key), f"{at}.{key}" if at else str(key))
        return found
    if old != new and _are_named(old) and _are_named(new):  # `sources.code.weight`, whatever their order
        return _differences({one["name"]: one for one in old}, {one["name"]: one for one in new}, at)
    return [] if old == new else [f"{at}: {old!r} there, {new!r} now"]


def _are_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in value)

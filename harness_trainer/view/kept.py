"""Files that a run kept of a rollout, and the logs of its parts: which there are, and a part of one as text.

Owns that nothing outside the folder is ever reached: an agent may have left links there. Every name is opened step by
step from the folder, and no link is followed. Called by `app`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

MOST_FILES = 300  # listed of one folder
MOST_BYTES = 200_000  # of one answer
_DEEPEST = 6


@dataclass(frozen=True, slots=True)
class KeptFile:
    """Example: KeptFile("verifier.log", 1204)."""

    name: str  # below the folder, with slashes
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [start, end) of a file as text. `end` < `size`: there is more."""

    text: str
    start: int
    end: int
    size: int


def files_in(folder: Path) -> list[KeptFile]:
    """Regular files only, by name, at most MOST_FILES; an absent folder has none."""
    try:
        return list(islice(_files(folder), MOST_FILES))
    except OSError:  # there is no such folder, or it went away meanwhile
        return []


def _files(folder: Path) -> Iterator[KeptFile]:
    for path, names, files, descriptor in os.fwalk(folder, follow_symlinks=False):
        below = os.path.relpath(path, folder)
        names.sort()
        if below.count("/") >= _DEEPEST:
            names.clear()
        for name in sorted(files):
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield KeptFile(name if below == "." else f"{below}/{name}", status.st_size)


def read_part(folder: Path, name: str, start: int | None = None) -> Part:
    """From byte `start` on, or the end of the file (None). Raises FileNotFoundError for what is not a file in there."""
    try:
        with _opened(folder, name) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(name)
            at = max(0, status.st_size - MOST_BYTES) if start is None else min(max(0, start), status.st_size)
            data = os.pread(descriptor, MOST_BYTES, at)
            if start is None and at > 0:  # whole lines: whoever masks a secret must have it in one piece
                cut = data.find(b"\n") + 1
                at, data = at + cut, data[cut:]
            if at + len(data) < status.st_size:
                data = data[: data.rfind(b"\n") + 1] or data
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        why = error.strerror if isinstance(error, OSError) and error.strerror else "there is no such file"
        raise FileNotFoundError(f"{name}: {why}; the page before this one lists what was kept") from error
    return Part(data.decode("utf-8", "replace"), at, at + len(data), max(status.st_size, at + len(data)))


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[int]:
    """A descriptor of the file, reached through no link and no `..`."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise FileNotFoundError(name)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        # Not blocking: a pipe that an agent left would wait for a writer for ever.
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
    try:
        yield file
    finally:
        os.close(file)

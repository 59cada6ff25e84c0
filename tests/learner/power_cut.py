"""What a disk would hold if the power went off: a model of it beside the real one, for tests.

A file has the bytes of its last fsync, or none; a folder has the names of its last fsync (`strict`), or those of now: a
file system may write names early. The model looks before every fsync, rename and removal that Python makes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Below `root`. `moments` calls back before each event, and after the last one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bytes: dict[int, bytes] = {}  # by inode
        self._names: dict[int, dict[str, int]] = {}  # of a folder, by inode; name -> inode
        self._held: list[int] = []  # open files: an inode that is held is not given to another file
        self.num_events = 0

    @contextmanager
    def moments(self, look: Callable[[], None]) -> Iterator[None]:
        """While the block runs, every event is watched; `look` may call `view`."""
        looking = False

        def watched(call: Callable[..., Any], synced: bool = False) -> Callable[..., Any]:
            def event(*args: Any, **kwargs: Any) -> Any:
                nonlocal looking
                if looking:
                    return call(*args, **kwargs)
                looking = True
                look()
                looking = False
                self.num_events += 1
                result = call(*args, **kwargs)
                if synced:
                    self._note(args[0])
                return result

            return event

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", watched(os.fsync, synced=True))
            for name in ("replace", "rename", "unlink", "rmdir"):
                patch.setattr(os, name, watched(getattr(os, name)))
            yield
            looking = True
            look()

    def _note(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self.root):
            return
        inode = os.fstat(descriptor).st_ino
        if path.is_dir():
            self._names[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._bytes[inode] = path.read_bytes()
        self._held.append(os.dup(descriptor))

    def view(self, target: Path, *, strict: bool) -> Path:
        """Make `target` what would be found below `root`."""
        shutil.rmtree(target, ignore_errors=True)
        now: dict[int, tuple[dict[str, int], Path]] = {}
        for path, _, _ in os.walk(self.root):
            entries = {entry.name: entry.inode() for entry in os.scandir(path)}
            now[os.stat(path).st_ino] = (entries, Path(path))
        folders = {*now, *self._names}

        def build(inode: int, to: Path) -> None:
            to.mkdir(parents=True)
            current = now[inode][0] if inode in now else {}
            for name, child in (self._names.get(inode, {}) if strict else current).items():
                if child in folders:
                    build(child, to / name)
                else:
                    (to / name).write_bytes(self._bytes.get(child, b""))

        build(os.stat(self.root).st_ino, target)
        return target

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)

"""The file half of a local sandbox's contract: what goes in and comes out, off the event loop.

Owns which paths may be written and how errors are told; the walk itself is `files`'. `local_box` is the other half.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from sandboxes import bubblewrap
from sandboxes.base import LeftOut, SandboxError
from sandboxes.files import Tree, parts_of
from sandboxes.local_plan import Plan
from sandboxes.processes import LifecycleError

P = ParamSpec("P")
R = TypeVar("R")


class LocalFiles(abc.ABC):
    """See `sandboxes.base.Sandbox`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @abc.abstractmethod
    def _tree(self) -> Tree:
        """The sandbox's files. Raises SandboxError while there are none."""

    def _writable(self, path: str) -> str:
        inside = "/" + "/".join(parts_of(path))
        mounted = any(inside == m.target or inside.startswith(f"{m.target}/") for m in self._plan.mounts)
        if self._plan.sealed and (mounted or bubblewrap.is_system(inside)):
            raise SandboxError(f"cannot write {path}: it is this machine's own, and read-only in the sandbox")
        return inside

    async def put_dir(self, source: Path, target: str) -> None:
        await in_thread(self._tree().copy_in, source, self._writable(target))

    async def put_file(self, source: Path, target: str) -> None:
        await in_thread(self._tree().put_file, source, self._writable(target))

    async def put_text(self, text: str, target: str, mode: int = 0o644) -> None:
        data = text.encode(errors="backslashreplace")
        await in_thread(self._tree().write, self._writable(target), data, mode)

    async def get_dir(self, path: str, target: Path, *, cap: int | None = None) -> tuple[LeftOut, ...]:
        return await in_thread(self._tree().copy_out, path, target, cap)

    async def get_file(self, path: str, target: Path, *, cap: int | None = None) -> None:
        await in_thread(self._tree().copy_file_out, path, target, cap)

    async def get_text(self, path: str, cap: int = 1_000_000) -> str | None:
        data = await in_thread(self._tree().read, path, cap)
        return None if data is None else data.decode(errors="backslashreplace")

    async def reset_dir(self, path: str, *, private: bool = False) -> None:
        await in_thread(self._tree().reset_dir, self._writable(path))  # there is one user: nothing is private


async def in_thread(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What the machine refuses is the sandbox's failure."""
    try:
        return await asyncio.to_thread(call, *args, **kwargs)
    except OSError as e:
        raise SandboxError(f"file access in the sandbox failed: {e}") from e
    except LifecycleError as e:
        raise SandboxError(str(e)) from e

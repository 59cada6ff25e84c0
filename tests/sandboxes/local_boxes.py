"""Looking at a local sandbox from outside: its files on this machine, and what runs in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes import bubblewrap
from sandboxes.base import Access, Sandbox
from sandboxes.local import LocalBackend, LocalConfig
from sandboxes.processes import Traces, find_all, find_below, read_proc

_NOWHERE = Access()


def need_bubblewrap() -> None:
    if problem := bubblewrap.find().problem:
        pytest.skip(problem)


def backend(isolation: str, root: Path, registry: Path, access: Access = _NOWHERE, **settings: object) -> LocalBackend:
    """Not open; skips the test when bubblewrap is asked for and does not work here."""
    if isolation == "bubblewrap":
        need_bubblewrap()
    config = LocalConfig.model_validate({"root": root, "isolation": isolation, **settings})
    return LocalBackend(config, run_id="test", registry=registry, access=access)


def folder_of(root: Path, sandbox: Sandbox) -> Path:
    return root / sandbox.sandbox_id


def running(root: Path, sandbox_id: str) -> list[str]:
    """Command lines of everything in the sandbox, without what holds a sealed one together."""
    monitor = root / sandbox_id / "control" / "monitor.json"
    ours: set[int] = set()
    found = set(find_all(sandbox_id, Traces(folder=root / sandbox_id)))
    if monitor.exists():
        pid, ticks = json.loads(monitor.read_text())
        below = find_below(pid)
        proc = read_proc(pid)
        assert proc is None or proc.start_ticks == ticks
        found |= set(below)
        ours = {pid, *(child for child in below if _is_ours(child))}
    return sorted(line for pid in found - ours if (line := _command_line(pid)))


async def soon(check: Callable[[], bool], limit_s: float = 5.0) -> None:
    end = asyncio.get_running_loop().time() + limit_s
    while not check():
        assert asyncio.get_running_loop().time() < end, "it did not come true in time"
        await asyncio.sleep(0.01)


def _is_ours(pid: int) -> bool:
    return "-I -S /proc/self/fd/" in _command_line(pid)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""

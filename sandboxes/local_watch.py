"""The limits of a local sandbox: those that the kernel holds for each process, and those that are looked at.

Needs no right on control groups: memory and processes of the whole sandbox are counted, so a short burst can pass a
limit. `local_launch` puts the first kind before each command, `local_box` keeps the watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from sandboxes.base import Limits

_LOOK_S = 1.0  # between looks at memory and processes
ENFORCED = frozenset({"cpu_s", "memory_mb", "file_mb", "processes", "deadline_s"})


def ulimits(limits: Limits) -> str:
    """Shell text; a limit the host already keeps lower is left as it is."""
    settings = ["-c 0"]
    if limits.cpu_s is not None:
        settings.append(f"-t {limits.cpu_s}")
    if limits.file_mb is not None:
        settings.append(f"-f {limits.file_mb * 2048}")  # blocks of 512 bytes
    return "".join(f"ulimit {setting} 2>/dev/null; " for setting in settings)


class Watched(Protocol):
    """What a watch needs to know of a sandbox."""

    @property
    def ends_at(self) -> float | None:
        """The deadline in seconds of CLOCK_MONOTONIC; it may move. None = never."""
        ...

    def busy(self) -> bool:
        """Whether commands or jobs may be running."""
        ...

    def pids(self) -> tuple[list[int], int]:
        """The processes in the sandbox, and how many of them are not the agent's. Blocking."""
        ...

    async def end_all(self, reason: str) -> None: ...


async def watch(limits: Limits, sandbox: Watched) -> None:
    """End everything in the sandbox when a limit of the whole is passed. Returns when there is nothing to watch for.

    After the memory or process limit the sandbox goes on, so that the verifier still runs; not after the deadline.
    """
    polled = limits.memory_mb is not None or limits.processes is not None
    while polled or sandbox.ends_at is not None:
        left = float("inf") if sandbox.ends_at is None else sandbox.ends_at - time.monotonic()
        if left <= 0:
            await sandbox.end_all(f"deadline of {limits.deadline_s:g} s")
            return
        await asyncio.sleep(min(left, _LOOK_S if polled else left))
        if polled and sandbox.busy():
            broken = await asyncio.to_thread(_broken_limit, limits, sandbox)
            if broken:
                await sandbox.end_all(broken)


def _broken_limit(limits: Limits, sandbox: Watched) -> str | None:
    """The limit that is passed at this moment, None = none. Blocking."""
    pids, ours = sandbox.pids()
    if limits.processes is not None and len(pids) - ours > limits.processes:
        return f"limit of {limits.processes} processes"
    if limits.memory_mb is not None and _memory_mb(pids) > limits.memory_mb:
        return f"memory limit of {limits.memory_mb} MB"
    return None


def _memory_mb(pids: Iterable[int]) -> float:
    """Resident memory of the processes, pages they may share counted once."""
    private, shared = 0, 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile
            resident, common = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
            private += resident - common
            shared = max(shared, common)
    return (private + shared) * os.sysconf("SC_PAGE_SIZE") / 2**20

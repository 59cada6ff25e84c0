"""What a running process takes of its machine: memory, processor time, open files. Through psutil; Linux.

Owns the figures' definitions and the table's wording; who is looked at, and when, is `scale`'s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import psutil

MB = 1e6


@dataclass(frozen=True, slots=True)
class Use:
    """One look at a process, or at several added up. Memory in MB of 10^6 bytes.

    `rss` counts pages that other processes share in full, `pss` their part, `uss` none of them.
    """

    rss: float
    pss: float
    uss: float
    cpu_s: float  # user and system time since it started
    num_files: int  # open file descriptors, sockets among them
    num_sockets: int
    at: float  # monotonic seconds

    @classmethod
    def of(cls, *pids: int) -> Self:
        """Processes that end while they are looked at are left out."""
        rss = pss = uss = cpu_s = 0.0
        num_files = num_sockets = 0
        for pid in pids:
            try:
                process = psutil.Process(pid)
                memory, times = process.memory_full_info(), process.cpu_times()
                files = _open_files(pid)
            except (psutil.NoSuchProcess, FileNotFoundError):
                continue
            rss, pss, uss = rss + memory.rss / MB, pss + memory.pss / MB, uss + memory.uss / MB
            cpu_s += times.user + times.system
            num_files += len(files)
            num_sockets += sum(name.startswith("socket:") for name in files)
        return cls(rss, pss, uss, cpu_s, num_files, num_sockets, time.monotonic())

    def share_since(self, earlier: Use) -> float:
        """Of one core, between the two looks."""
        return (self.cpu_s - earlier.cpu_s) / (self.at - earlier.at)


def _open_files(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(folder):
        try:
            found.append(os.readlink(f"{folder}/{name}"))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown, so that a page can take it over as it is."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] + ["---:"] * (len(lines[0]) - 1))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """Example: "2 cores, load 1.3, 2026-11-30 16:40 UTC"."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    niced = f", nice {os.nice(0)}" if os.nice(0) else ""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}{niced}, {when}"

"""Finding and killing every process of an owned thing, wherever it went.

Owns the marker variable and the reading of /proc. Does not know owners, records or folders to remove: `lifecycle` does
and is the main caller; the local sandbox calls it too. Linux only.

Every process of an owned thing inherits the variable `HARNESS_TRAINER_OWNED`, a path of ids (`runner-../sandbox-..`),
so children that left the process group with setsid or became daemons are still found.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MARKER = "HARNESS_TRAINER_OWNED"


class LifecycleError(Exception):
    """Something could not be started, recorded or ended; one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Proc:
    """One line of /proc/<pid>/stat: what is needed to know a process again after its pid was reused."""

    pid: int
    state: str
    ppid: int
    session: int
    has_tty: bool
    start_ticks: int  # clock ticks since boot


def read_proc(pid: int) -> Proc | None:
    """The process, or None when it is gone. A zombie is a process with state "Z"."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rfind(")") + 2 :].split()  # the name in parentheses may itself hold spaces and parentheses
    return Proc(pid, fields[0], int(fields[1]), int(fields[3]), fields[4] != "0", int(fields[19]))


def is_running(pid: int, start_ticks: int) -> bool:
    proc = read_proc(pid)
    return proc is not None and proc.start_ticks == start_ticks and proc.state not in "ZX"


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _pattern(*owned_ids: str) -> re.Pattern[bytes]:
    """An id as a whole: in the marker, or in a path such as HOME, since folders are named after it."""
    ids = b"|".join(re.escape(owned_id.encode()) for owned_id in owned_ids)
    return re.compile(rb"(?<![\w.-])(?:" + ids + rb")(?![\w.-])")


def _marked(pid: int, pattern: re.Pattern[bytes]) -> bool:
    try:
        return pattern.search(Path(f"/proc/{pid}/environ").read_bytes()) is not None
    except OSError:  # gone, or another user's
        return False


def _inside(pid: int, *folders: Path) -> bool:
    try:
        cwd = Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return False
    return any(cwd.is_relative_to(folder) for folder in folders)


def _writes_to(pid: int, log: Path) -> bool:
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{fd}").removesuffix(" (deleted)") == str(log):
                return True
    return False


@dataclass(frozen=True, slots=True)
class Traces:
    """How to know a process of an owned thing when its environment no longer tells (`env -i`, setproctitle).

    Each is None when it does not apply.
    """

    folder: Path | None = None  # working directory below it, and no terminal (a person's shell has one)
    log: Path | None = None  # standard output or error is this file
    session: int | None = None  # only while the session's leader is not reaped, else the id may be another's
    parent: int | None = None  # descendants of this process


def find_near(owned_id: str, folder: Path) -> list[int]:
    """Pids that carry the id or work below `folder`; one cheap pass over /proc, meant for polling."""
    me, pattern = os.getpid(), _pattern(owned_id)
    return [pid for pid in _pids() if pid != me and (_marked(pid, pattern) or _inside(pid, folder))]


def find_below(ancestor: int) -> list[int]:
    """Pids of the living descendants of a process; one cheap pass over /proc, meant for polling."""
    procs = [p for p in map(read_proc, _pids()) if p is not None and p.state not in "ZX"]
    found = {ancestor}
    grown = True
    while grown:
        children = {p.pid for p in procs if p.ppid in found} - found
        found |= children
        grown = bool(children)
    return sorted(found - {ancestor})


@dataclass(frozen=True, slots=True)
class Spared:
    """A thing in an owned one that outlives it. Example: Spared("sandbox-412-98213-0a1b2c3d", (Path("/tmp/.."),))."""

    id: str
    folders: tuple[Path, ...] = ()  # its own; see `Traces.folder`


def find_all(owned_id: str, traces: Traces, spared: Sequence[Spared] = ()) -> list[int]:
    """Pids that belong to an owned thing: by the marker, by `traces`, or as a descendant of one. Never this process.

    Nor anything of what is `spared`, though it may descend from the thing.
    """
    me, pattern = os.getpid(), _pattern(owned_id)
    procs = [p for p in map(read_proc, _pids()) if p is not None and p.state not in "ZX" and p.pid != me]
    if kept := _kept(procs, spared):
        procs = [p for p in procs if p.pid not in kept]
    found = {p.pid for p in procs if _marked(p.pid, pattern) or _has_trace(p, traces)}
    return sorted(_with_descendants(procs, found, traces.parent))


def _kept(procs: Sequence[Proc], spared: Sequence[Spared]) -> set[int]:
    if not spared:
        return set()
    pattern = _pattern(*(thing.id for thing in spared))
    folders = [folder for thing in spared for folder in thing.folders]
    roots = {p.pid for p in procs if _marked(p.pid, pattern) or (not p.has_tty and _inside(p.pid, *folders))}
    return _with_descendants(procs, roots, None)


def _with_descendants(procs: Sequence[Proc], found: set[int], parent: int | None) -> set[int]:
    """`found` and all below them, and below `parent`."""
    grown = True
    while grown:
        children = {p.pid for p in procs if p.ppid in found or p.ppid == parent} - found
        found = found | children
        grown = bool(children)
    return found


def _has_trace(proc: Proc, traces: Traces) -> bool:
    return (
        (traces.session is not None and proc.session == traces.session)
        or (traces.log is not None and _writes_to(proc.pid, traces.log))
        or (traces.folder is not None and not proc.has_tty and _inside(proc.pid, traces.folder))
    )


def kill_owned(owned_id: str, traces: Traces = Traces(), *, spared: Sequence[Spared] = (), limit_s: float = 3.0) -> int:
    """SIGKILL everything `find_all` finds until nothing is left; returns how many were killed. Blocking.

    Nothing is left when two looks in a row find nothing: one may fall between a daemon's fork and its parent's end.
    Raises LifecycleError if something survives `limit_s` (another user's, or in uninterruptible sleep).
    """
    killed: set[tuple[int, int]] = set()
    end = time.monotonic() + limit_s
    num_empty = 0
    while num_empty < 2:
        pids = find_all(owned_id, traces, spared)
        num_empty = 0 if pids else num_empty + 1
        for pid in pids:
            proc = read_proc(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                if proc is not None:
                    killed.add((pid, proc.start_ticks))
        if pids and time.monotonic() > end:
            named = " ".join(map(str, pids))
            raise LifecycleError(f"processes of {owned_id} survived SIGKILL; look at them with: ps -fp '{named}'")
        if num_empty < 2:
            time.sleep(0.01)
    return len(killed)

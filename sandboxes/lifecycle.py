"""How what a run starts ends, also after `kill -9` of the owner: processes, temp folders, things in a Docker engine.

Owns reaping, and long-lived children that end with their owner. The records are `ownership`'s, finding and killing
processes is `processes`', things in a Docker engine or in E2B are `docker_reaping`'s and `e2b_reaping`'s (loaded only
when there are some). Called by the sandbox backends, by whoever starts the engine, the gateway or a rollout runner, and
by the command line (`reap` at the start of each run). Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sandboxes.ownership import Claim, Keeper, Owner, adopt, claim, default_registry, locked, read_record, records
from sandboxes.processes import MARKER, LifecycleError, Spared, Traces, find_all, kill_owned

if TYPE_CHECKING:
    from sandboxes import docker_reaping, e2b_reaping

__all__ = [
    "Claim",
    "LifecycleError",
    "OwnedProcess",
    "Owner",
    "Reaped",
    "adopt",
    "claim",
    "default_registry",
    "kept",
    "reap",
    "remove_tree",
    "start_process",
]

_SUPERVISOR = Path(__file__).with_name("supervisor.py")


def remove_tree(folder: Path) -> None:
    """Remove a folder whatever a stranger did to it (no permissions, very deep); never follows a symlink.

    Raises OSError if something is left.
    """

    def unlock(_: object, path: str, __: object) -> None:
        parent = os.path.dirname(path)
        for shut in (parent, path):
            if not os.path.islink(shut):
                with contextlib.suppress(OSError):
                    os.chmod(shut, stat.S_IRWXU)

    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        folder.unlink()
        return
    for _ in range(3):
        try:
            shutil.rmtree(folder, onerror=unlock)
        except (OSError, RecursionError):
            continue
        if not folder.exists():
            return
    if folder.exists():  # deeper than Python's recursion or path limits
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)
    if folder.exists():
        raise OSError(f"could not remove {folder}")


# --- reaping -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reaped:
    """What `reap` ended. Example: Reaped("sandbox-412-98213-0a1b2c3d", "sandbox", 3, ["/tmp/sandbox-.."], "")."""

    id: str
    kind: str
    num_processes: int
    folders: list[str]
    problem: str  # "" = all gone; else what is left and why, and the record stays
    objects: list[str] = field(default_factory=list)  # removed from an engine, e.g. "container sandbox-412-98213-0a1b"

    def __str__(self) -> str:
        """For people: "sandbox-412-98213-0a1b2c3d: 3 processes, folder /tmp/sandbox-..; PROBLEM: .."."""
        parts = [f"{self.num_processes} processes"] if self.num_processes else []
        parts += [f"folder {folder}" for folder in self.folders]
        parts += self.objects
        return f"{self.id}: {', '.join(parts) or 'its record'}" + (f"; PROBLEM: {self.problem}" if self.problem else "")


def kept(registry: Path) -> list[Spared]:
    """What waits for its owner's successor: whoever ends the owner's processes must let it be."""
    here = Owner.current()
    return [Spared(r.id, tuple(map(Path, r.folders))) for r in records(registry, here) if r.is_kept(here)]


def reap(registry: Path, *, dry_run: bool = False, given_up: Keeper | None = None) -> list[Reaped]:
    """End what dead owners left: kill its processes, remove its folders and what it made in engines, drop its records.

    Touches nothing of a living owner, of another host or of another container, and nothing that is kept for a dead
    owner's successor, unless its keeper is the one that has `given_up`. Safe to run at the same time as other reapers,
    and at every start: without records of dead owners it costs a look into a folder. Blocking. `dry_run` only tells.
    """
    here = Owner.current()
    reaped: list[Reaped] = []
    in_engines: list[Claim] = []
    with contextlib.ExitStack() as locks:
        for path in sorted(registry.glob("*.json")) if registry.is_dir() else []:
            with contextlib.ExitStack() as lock:
                record = read_record(path, here) if lock.enter_context(locked(path)) else None
                if record is None or record.owner.alive(here) is not False:
                    continue
                if record.is_kept(here) and record.keeper != given_up:
                    continue
                if dry_run:
                    reaped.append(_describe(record))
                elif record.engine:
                    in_engines.append(record)
                    locks.push(lock.pop_all())
                else:
                    reaped.append(_reap_one(record))
        reaped += _reap_in_engines(in_engines)
    for temp in registry.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - temp.stat().st_mtime > 3600 and not dry_run:
                temp.unlink()
    return reaped


def _reap_one(record: Claim, objects: Sequence[str] = (), problem: str = "") -> Reaped:
    """End the record's processes and folders on this machine. With a `problem` elsewhere the record stays."""
    removed: list[str] = []
    killed = 0
    try:
        killed = kill_owned(record.id, Traces(log=Path(record.log) if record.log else None))
        for folder in _folders(record):
            killed += kill_owned(record.id, Traces(folder=folder))
            remove_tree(folder)
            removed.append(str(folder))
        if not problem:
            record.release()
    except (OSError, LifecycleError) as e:
        problem = problem or str(e)
    return Reaped(record.id, record.kind, killed, removed, problem, list(objects))


def _folders(record: Claim) -> list[Path]:
    """A damaged record must never make us remove a stranger's folder: ours carry the id as their name."""
    return [f for f in map(Path, record.folders) if f.name == record.id and os.path.lexists(f)]


def _reap_in_engines(records: Sequence[Claim]) -> list[Reaped]:
    """First what is in the engine: it may use the folders of this machine."""
    reaped: list[Reaped] = []
    for engine in sorted({record.engine for record in records}):
        of_engine = [record for record in records if record.engine == engine]
        try:
            with contextlib.closing(_engine(engine)) as opened:
                ended = opened.end(of_engine)
        except LifecycleError as e:
            reaped += [_reap_one(record, problem=str(e)) for record in of_engine]
            continue
        for record in of_engine:
            objects = [str(thing) for thing in ended[record.id].things]
            reaped.append(_reap_one(record, objects, ended[record.id].problem))
    return reaped


def _engine(engine: str) -> docker_reaping.Engine | e2b_reaping.Engine:
    kind, _, address = engine.partition(":")
    if kind not in ("docker", "e2b"):
        raise LifecycleError(f"this version cannot end things in {engine}; use the one that made them")
    if "site" not in sys.modules:  # the supervisor starts without it
        import site

        site.main()
    try:
        if kind == "e2b":
            from sandboxes import e2b_reaping

            return e2b_reaping.Engine(address)
        from sandboxes import docker_reaping
    except ImportError as e:
        raise LifecycleError(
            f"things are left in {address}, but {e.name} is not installed here: pip install 'harness-trainer[{kind}]'"
        ) from e
    return docker_reaping.Engine(address)


def _describe(record: Claim) -> Reaped:
    """What reaping the record would end."""
    pids = set(find_all(record.id, Traces(log=Path(record.log) if record.log else None)))
    folders = _folders(record)
    for folder in folders:
        pids |= set(find_all(record.id, Traces(folder=folder)))
    objects, problem = [], ""
    if record.engine:
        try:
            with contextlib.closing(_engine(record.engine)) as opened:
                objects = [str(thing) for thing in opened.find_claim(record.id)]
        except LifecycleError as e:
            problem = str(e)
    return Reaped(record.id, record.kind, len(pids), [str(f) for f in folders], problem, objects)


# --- long-lived children -----------------------------------------------------------------------------------------


class OwnedProcess:
    """A long-lived child (engine, gateway, runner) that ends with its owner. Made by `start_process`.

    `pid` is the supervisor's: the leader of the child's session and process group. The child's own exit code (negative
    = signal) is passed on as `returncode`. Methods may be called from any thread.
    """

    def __init__(self, popen: subprocess.Popen[bytes], owned: Claim, log_path: Path) -> None:
        self._popen = popen
        self._claim = owned
        self._lock = threading.Lock()
        self._ended = False
        self.log_path = log_path  # absolute
        self.kind = owned.kind
        self.owned_id = owned.id
        self.pid = popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def alive(self) -> bool:
        return self._popen.poll() is None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code, or None when it still runs after `timeout_s`."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace_s: float = 5.0, *, successor: bool = False) -> int | None:
        """SIGTERM to the group, wait, SIGKILL for whatever is left, drop the record. Idempotent; blocking.

        Also reaps what the child itself owned (a runner's sandboxes). `successor` = another of its kind is started
        next: what the child has put by for it (`Claim.keep`) goes on. Returns the exit code.
        """
        with self._lock:
            if not self._ended:
                if self.alive():
                    self._popen.send_signal(signal.SIGTERM)  # the supervisor passes it to the whole group, once
                    self.wait(grace_s)
                session = self.pid if self.alive() else None
                registry = self._claim.registry
                spared = kept(registry) if successor else ()
                kill_owned(self.owned_id, Traces(log=self.log_path, session=session), spared=spared)
                self._popen.wait()
                self._claim.release()
                self._ended = True
            # Also when it had ended before: a successor that was waited for then may never have come.
            reap(self._claim.registry, given_up=None if successor else Keeper(self._claim.owner, self.kind))
        return self._popen.returncode

    async def stop_async(self, grace_s: float = 5.0) -> int | None:
        """`stop` off the event loop; goes on to the end even when the caller is cancelled."""
        return await asyncio.shield(asyncio.to_thread(self.stop, grace_s))


def start_process(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    log_path: Path,
    registry: Path,
    kind: str,
    pass_fds: Sequence[int] = (),
    run_id: str = "",
    grace_s: float = 5.0,
) -> OwnedProcess:
    """Start a long-lived child in its own session: stdin /dev/null, output appended to `log_path`.

    When this process dies, however it dies, the child gets SIGTERM and after `grace_s` SIGKILL, with all its
    descendants. (A supervisor watches the owner's pidfd; PR_SET_PDEATHSIG would fire when the *thread* that started
    the child ends.) `env` is the child's whole environment. Raises LifecycleError when it cannot be started.
    """
    program = shutil.which(argv[0], path=env.get("PATH", os.defpath))
    if program is None:
        raise LifecycleError(f"cannot start the {kind}: {argv[0]} is not an executable file")
    log_path = log_path.resolve()
    owned = claim(registry, kind, run_id=run_id)
    order = {
        "id": owned.id,
        "owner": [owned.owner.pid, owned.owner.start_ticks],
        "registry": str(registry),
        "grace_s": grace_s,
        "pass_fds": list(pass_fds),
        "argv": [program, *argv[1:]],
    }
    try:
        owned.log = str(log_path)
        owned.save()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), json.dumps(order)],
                env={**env, MARKER: owned.marker},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )
    except OSError as e:
        owned.release()
        raise LifecycleError(f"cannot start the {kind}: {e}") from e
    return OwnedProcess(popen, owned, log_path)

"""Who owns what a run starts: owners, and the records of owned things.

Owns the registry: a folder with one JSON record per owned thing, written before the thing exists and removed when it is
gone. Ends nothing itself: `lifecycle` does, and re-exports what callers of both need. Linux only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandboxes.namespaces import has_ended
from sandboxes.processes import MARKER, LifecycleError, is_running, read_proc

__all__ = [
    "Claim",
    "Keeper",
    "LifecycleError",
    "Owner",
    "adopt",
    "claim",
    "default_registry",
    "has_record",
    "keeper_of_this_process",
    "locked",
    "read_record",
    "recorded",
    "records",
]

SCHEMA = 3  # 2 added `engine` and `unlabelled`, 3 `keeper` and `kept_until`; older records are still read
_RECORD_NAME = re.compile(r"(?P<kind>[a-z0-9_]+)-(?P<pid>\d+)-(?P<ticks>\d+)-[0-9a-f]{8}\.json")


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that must end what it started. Example: Owner(412, 98213, "7afb..", "pid:[40265]", "node3")."""

    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: str
    host: str

    @classmethod
    def current(cls) -> Owner:
        me = read_proc(os.getpid())
        if me is None:
            raise LifecycleError("/proc is not readable; sandboxes and engines need Linux with /proc mounted")
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(me.pid, me.start_ticks, boot_id, os.readlink("/proc/self/ns/pid"), socket.gethostname())

    def alive(self, here: Owner) -> bool | None:
        """Whether the owner still runs; None = cannot be known from here (another host or container)."""
        if self.host != here.host:
            return None
        if self.boot_id != here.boot_id:
            return False
        if self.pid_namespace != here.pid_namespace:
            return False if has_ended(self.pid_namespace) else None
        return is_running(self.pid, self.start_ticks)


@dataclass(frozen=True, slots=True)
class Keeper:
    """The process that will start an owner again when it dies. Example: Keeper(Owner(398, ..), "runner")."""

    owner: Owner
    kind: str  # of the owned process that it starts again


@dataclass(slots=True)
class Claim:
    """One owned thing on record. Write it before the thing exists, `release` it when the thing is gone."""

    id: str  # "<kind>-<owner pid>-<owner start ticks>-<random>", so that even an unreadable record names its owner
    kind: str
    registry: Path
    owner: Owner
    run_id: str = ""
    created_at: float = 0.0  # Unix seconds
    folders: list[str] = field(default_factory=list)  # removed at the end; each is named after the id
    log: str = ""  # absolute path of the file its processes write to; "" = none
    engine: str = ""  # where else it owns things, e.g. "docker:unix:///var/run/docker.sock"; "" = nowhere
    unlabelled: list[str] = field(default_factory=list)  # ids in the engine that cannot carry a label with our id
    keeper: Keeper | None = None  # the thing waits for its owner's successor while this one lives; None = it does not
    kept_until: float = 0.0  # Unix seconds; nobody waits for longer

    @property
    def marker(self) -> str:
        """Value of the marker variable for processes of this thing; keeps the ids of the things we run in."""
        outer = os.environ.get(MARKER)
        return f"{outer}/{self.id}" if outer else self.id

    def make_folder(self, root: Path) -> Path:
        """A private new folder `root/<id>`, on record before it exists. Raises OSError."""
        folder = root / self.id
        self.folders.append(str(folder))
        self.save()
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        return folder

    def save(self) -> None:
        data = {"schema": SCHEMA, **asdict(self), "registry": str(self.registry)}
        temp = self.registry / f".{self.id}.tmp"
        temp.write_text(json.dumps(data))
        temp.replace(self.registry / f"{self.id}.json")

    def keep(self, keeper: Keeper, until: float) -> None:
        """From now on it outlives its owner, for a successor to `adopt`: while the keeper lives, and not after `until`.

        Raises OSError.
        """
        self.keeper, self.kept_until = keeper, until
        self.save()

    def is_kept(self, here: Owner) -> bool:
        """Whether it waits for a successor of its owner, should that one be dead."""
        if self.keeper is None or time.time() > self.kept_until:
            return False
        return self.keeper.owner.alive(here) is not False

    def is_abandoned(self, here: Owner) -> bool:
        """Whether it is a reaper's: its owner is certainly dead, and no successor is waited for."""
        return self.owner.alive(here) is False and not self.is_kept(here)

    def renew(self) -> None:
        """As if made now: something is about to be asked for in its name, which may be under way when we are killed.

        Raises OSError.
        """
        self.created_at = time.time()
        self.save()

    def release(self) -> None:
        (self.registry / f"{self.id}.json").unlink(missing_ok=True)


def default_registry() -> Path:
    """`$XDG_STATE_HOME/harness-trainer/owned`, or the same below ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "harness-trainer" / "owned"


def claim(registry: Path, kind: str, *, run_id: str = "", engine: str = "") -> Claim:
    """Put a new owned thing on record, owned by this process. Raises LifecycleError when that is impossible."""
    owner = Owner.current()
    new = Claim(
        id=f"{kind}-{owner.pid}-{owner.start_ticks}-{secrets.token_hex(4)}",
        kind=kind,
        registry=registry,
        owner=owner,
        run_id=run_id,
        created_at=time.time(),
        engine=engine,
    )
    if not _RECORD_NAME.fullmatch(f"{new.id}.json"):
        raise ValueError(f"kind must be lower-case letters, digits and underscores, not {kind!r}")
    try:
        registry.mkdir(parents=True, exist_ok=True)
        new.save()
    except OSError as e:
        raise LifecycleError(f"cannot write to {registry}: {e.strerror}; free space or set XDG_STATE_HOME") from e
    return new


def adopt(registry: Path, claim_id: str) -> Claim:
    """Make this process the owner of what a dead one owned; from then on no reaper touches it.

    Raises LifecycleError when it is not on record (it was reaped, or never was), when its owner lives, or when that
    cannot be known from here. Of several adopters one succeeds.
    """
    path, here = registry / f"{claim_id}.json", Owner.current()
    with locked(path) as got:
        record = read_record(path, here) if got else None
        if record is None:
            raise LifecycleError(f"{claim_id} is not on record in {registry}, or is being ended this moment")
        if record.owner != here and record.owner.alive(here) is not False:
            raise LifecycleError(f"{claim_id} belongs to process {record.owner.pid} on {record.owner.host}")
        record.owner = here
        record.save()
    return record


def keeper_of_this_process(registry: Path) -> Keeper | None:
    """Whoever started this process as an owned one, and may start it again; None = nobody did, by the records."""
    own_id = os.environ.get(MARKER, "").rpartition("/")[2]
    if not own_id or not has_record(registry, own_id):
        return None
    record = read_record(registry / f"{own_id}.json", Owner.current())
    return None if record is None else Keeper(record.owner, record.kind)


def recorded(registry: Path, claim_id: str, here: Owner) -> Claim | None:
    """The thing by its record; None when there is none."""
    if not has_record(registry, claim_id):
        return None
    return read_record(registry / f"{claim_id}.json", here)


def records(registry: Path, here: Owner) -> Iterator[Claim]:
    """All that are in the folder now."""
    for path in sorted(registry.glob("*.json")) if registry.is_dir() else []:
        if (record := read_record(path, here)) is not None:
            yield record


def has_record(registry: Path, claim_id: str) -> bool:
    """Also where it cannot be looked into: another user's folder of records is for that user to judge by."""
    try:
        return (registry / f"{claim_id}.json").exists()
    except OSError:
        return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether we alone hold the record; False when another process has it or it is already gone."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield _try_lock(fd) and path.exists()
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_record(path: Path, here: Owner) -> Claim | None:
    """The record, as far as it can be read; None when the file's name is not one of ours."""
    name = _RECORD_NAME.fullmatch(path.name)
    if name is None:
        return None  # not ours
    try:
        data = json.loads(path.read_text())
        return Claim(
            path.stem,
            name["kind"],
            path.parent,
            Owner(**data["owner"]),
            run_id=str(data.get("run_id", "")),
            created_at=float(data.get("created_at", 0.0)),
            folders=[str(f) for f in data["folders"]],
            log=str(data["log"]),
            engine=str(data.get("engine", "")),
            unlabelled=[str(i) for i in data.get("unlabelled", [])],
            keeper=_read_keeper(data.get("keeper")),
            kept_until=float(data.get("kept_until", 0.0)),
        )
    except (OSError, ValueError, TypeError, KeyError):
        # The name alone still tells the owner; its folder, if it had one, can only be guessed.
        owner = Owner(int(name["pid"]), int(name["ticks"]), here.boot_id, here.pid_namespace, here.host)
        guess = str(Path(tempfile.gettempdir()) / path.stem)
        return Claim(path.stem, name["kind"], path.parent, owner, folders=[guess])


def _read_keeper(data: dict[str, Any] | None) -> Keeper | None:
    return None if data is None else Keeper(Owner(**data["owner"]), str(data["kind"]))

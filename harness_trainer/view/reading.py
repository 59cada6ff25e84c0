"""A run's store opened to be read: one short transaction per question, nothing written, the run never waits.

Owns how the file is opened and when it is refused; the SQL is the callers'. SQLite's log (WAL) lets readers and writers
pass each other, but a reader that stays keeps the log from being moved into the file, so a question has a time limit.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from capture_proxy.store import SCHEMA_VERSION as CAPTURE_SCHEMA
from harness_trainer.errors import RunDirError
from harness_trainer.rollouts.schema import SCHEMA_VERSION as ROLLOUT_SCHEMA

_LONGEST_S = 15.0  # of one question
_BUSY_S = 1.0  # the moment in which a run that ends takes its log back
_STEPS = 20_000  # of SQLite's machine between two looks at the clock


class Missing(RunDirError):
    """There is no store, or nobody has made the rollouts' tables yet: the run has not begun."""


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """One snapshot of the store. Raises Missing, RunDirError for a file that cannot be read or is of another schema."""
    try:
        if not path.exists():
            raise Missing(f"there is no run in {path.parent} yet (no {path.name})")
        with closing(_opened(path)) as db:
            deadline = time.monotonic() + _LONGEST_S
            db.set_progress_handler(lambda: int(time.monotonic() > deadline), _STEPS)
            _require_schemas(db, path)
            yield db
    except (sqlite3.Error, OSError) as error:
        raise RunDirError(f"the run's store {path} cannot be read: {error}; reload, or give a whole run") from error


def _opened(path: Path) -> sqlite3.Connection:
    """In a transaction. From a mount that may not be written SQLite reads a file with a log only if that is there."""
    name = f"file:{quote(str(path))}"
    try:
        return _begun(f"{name}?mode=ro")
    except sqlite3.OperationalError:
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size:
            raise
        return _begun(f"{name}?mode=ro&immutable=1")  # nothing but this file, which nobody has open for writing


def _begun(uri: str) -> sqlite3.Connection:
    db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_S)
    db.text_factory = lambda text: text.decode("utf-8", "replace")
    try:
        db.execute("PRAGMA query_only = 1")
        db.execute("BEGIN")
        db.execute("SELECT 1 FROM sqlite_master").fetchone()  # the snapshot is taken here
    except BaseException:
        db.close()
        raise
    return db


def _require_schemas(db: sqlite3.Connection, path: Path) -> None:
    tables = {str(name) for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    found = _value(db, "SELECT value FROM run_state WHERE key = 'rollout_schema'") if "run_state" in tables else None
    if found is None:
        raise Missing(f"the run in {path.parent} has not begun: its store has no rollouts' tables yet")
    _require(path, "rollout", found, ROLLOUT_SCHEMA)
    if "meta" in tables:
        capture = _value(db, "SELECT value FROM meta WHERE key = 'capture_schema'")
        if capture is not None:
            _require(path, "capture", capture, CAPTURE_SCHEMA)


def _require(path: Path, what: str, found: str, wanted: int) -> None:
    if found == str(wanted):
        return
    head = f"{path} has {what} schema {found}, this version shows {wanted}"
    if found.isdigit() and int(found) < wanted:
        raise RunDirError(
            f"{head}: `harness-trainer audit {path.parent}` brings it up to date (view changes nothing itself)"
        )
    raise RunDirError(f"{head}: use the harness-trainer that wrote it")


def _value(db: sqlite3.Connection, sql: str) -> str | None:
    row = db.execute(sql).fetchone()
    return None if row is None else str(row[0])


def has_table(db: sqlite3.Connection, name: str) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchone() is not None

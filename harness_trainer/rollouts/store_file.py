"""The run's `store.sqlite` as a file: one connection, short transactions, the key-value state. Knows no group.

`policy_records` and `store` add what is kept in it. Every method may be called from any thread.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from harness_trainer.errors import RunDirError
from harness_trainer.rollouts.schema import migrate


class StoreFile:
    """Raises RunDirError when the file cannot be used or written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with _mapped(path):
            self._db = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            # Runner and learner act on what the other has committed; a power cut must not take it back.
            self._db.execute("PRAGMA synchronous=FULL")
            migrate(self._db, path)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _mapped(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _read(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        with self._lock, _mapped(self._path):
            return self._db.execute(sql, args).fetchall()

    def state(self, key: str) -> str | None:
        rows = self._read("SELECT value FROM run_state WHERE key = ?", key)
        return rows[0][0] if rows else None

    def set_state(self, key: str, value: str) -> None:
        with self._write() as db:
            put_state(db, key, value)


def get_state(db: sqlite3.Connection, key: str) -> str | None:
    """Inside a transaction."""
    found = db.execute("SELECT value FROM run_state WHERE key = ?", (key,)).fetchone()
    return None if found is None else str(found[0])


def put_state(db: sqlite3.Connection, key: str, value: str) -> None:
    """Inside a transaction."""
    db.execute("INSERT OR REPLACE INTO run_state VALUES (?, ?)", (key, storable(value)))


def storable(value: Any) -> Any:
    r"""The value as the file can hold it: what UTF-8 cannot say is escaped, an integer beyond 64 bits is its digits.

    Agents cut texts in the middle of a surrogate pair. Example: storable({"detail": "bad \ud83d"}) is
    {"detail": "bad \\ud83d"}.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {storable(key): storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return storable(asdict(value))
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)  # a float would be another number
    return value


@contextmanager
def _mapped(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RunDirError(
            f"the run's store {path} failed: {error}; free disk space or use another --run-dir"
        ) from error

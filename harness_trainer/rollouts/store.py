"""The durable hand-over between the rollout runner and the learner: groups, rollouts and the policy version.

Owns its own tables of the run's `store.sqlite` (the capture proxy owns others in the same file). Used by the runner
(writes rollouts, reads the version), the learner (takes groups, writes the version) and the command line (reads).
Every method is one short transaction and may be called from any thread; in `async` code call it in a worker thread.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import orjson
import zstandard

from harness_trainer.errors import RunDirError
from harness_trainer.rollouts.types import Outcome, RolloutResult

# Schema 1 kept the trace inside `result`, as plain JSON; such rows are read as they are.
SCHEMA_VERSION = 2

_TABLES = """
CREATE TABLE IF NOT EXISTS run_state (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rollout_groups (
    group_id INTEGER PRIMARY KEY,
    task TEXT NOT NULL,
    harness TEXT NOT NULL,
    state TEXT NOT NULL,           -- running, ready, trained, dropped
    start_version INTEGER NOT NULL,
    created_at REAL NOT NULL,
    ready_at REAL,
    trained_step INTEGER,
    reason TEXT
);
CREATE TABLE IF NOT EXISTS rollouts (
    rollout_id TEXT PRIMARY KEY,
    group_id INTEGER NOT NULL REFERENCES rollout_groups(group_id),
    slot INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL,
    final INTEGER NOT NULL DEFAULT 0, -- 1 = this attempt stands for its slot
    outcome TEXT,
    reward REAL,
    result BLOB                       -- JSON, zstd
);
-- Apart from the result: a list of rollouts is wanted often, and its megabytes of tokens are not.
CREATE TABLE IF NOT EXISTS rollout_traces (rollout_id TEXT PRIMARY KEY, trace BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts(group_id);
"""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as the learner takes it."""

    group_id: int
    task: str
    results: list[RolloutResult]


class RolloutStore:
    """One connection to the run's store. Raises RunDirError when the file cannot be used or written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with _mapped(path):
            self._db = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_TABLES)
        found = self.state("rollout_schema")
        if found in (None, "1"):
            self.set_state("rollout_schema", str(SCHEMA_VERSION))
        elif int(found) != SCHEMA_VERSION:
            raise RunDirError(
                f"{path} was written with rollout schema {found}, this version reads {SCHEMA_VERSION}: "
                "use the harness-trainer that wrote it, or another --run-dir"
            )

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

    # -- run state -----------------------------------------------------------------------------------------------

    def state(self, key: str) -> str | None:
        rows = self._read("SELECT value FROM run_state WHERE key = ?", key)
        return rows[0][0] if rows else None

    def set_state(self, key: str, value: str) -> None:
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO run_state VALUES (?, ?)", (key, value))

    def policy_version(self) -> int:
        """The newest version that was published to the engine; 0 = none yet."""
        return int(self.state("policy_version") or 0)

    # -- the runner's side ---------------------------------------------------------------------------------------

    def open_group(self, group_id: int, task: str, harness: str) -> None:
        with self._write() as db:
            db.execute(
                "INSERT INTO rollout_groups (group_id, task, harness, state, start_version, created_at)"
                " VALUES (?, ?, ?, 'running', ?, ?)",
                (group_id, task, harness, self._version_inside(db), time.time()),
            )

    @staticmethod
    def _version_inside(db: sqlite3.Connection) -> int:
        found = db.execute("SELECT value FROM run_state WHERE key = 'policy_version'").fetchone()
        return int(found[0]) if found else 0

    def next_group_id(self) -> int:
        return int(self._read("SELECT COALESCE(MAX(group_id), -1) + 1 FROM rollout_groups")[0][0])

    def unfinished_groups(self) -> list[tuple[int, str, list[int]]]:
        """After a restart: (group id, task, slots that have a final result) of every group still running."""
        groups = self._read("SELECT group_id, task FROM rollout_groups WHERE state = 'running' ORDER BY group_id")
        return [
            (gid, task, [s for (s,) in self._read("SELECT slot FROM rollouts WHERE group_id = ? AND final = 1", gid)])
            for gid, task in groups
        ]

    def harness_of(self, group_id: int) -> str:
        """Name of the agent that a group was opened with. Raises KeyError."""
        rows = self._read("SELECT harness FROM rollout_groups WHERE group_id = ?", group_id)
        if not rows:
            raise KeyError(group_id)
        return str(rows[0][0])

    def start_rollout(self, rollout_id: str, group_id: int, slot: int, attempt: int) -> None:
        with self._write() as db:
            db.execute(
                "INSERT INTO rollouts (rollout_id, group_id, slot, attempt, started_at) VALUES (?, ?, ?, ?, ?)",
                (rollout_id, group_id, slot, attempt, time.time()),
            )

    def finish_rollout(self, result: RolloutResult, *, final: bool) -> None:
        body = _dump({f.name: getattr(result, f.name) for f in fields(result) if f.name != "trace"})
        trace = None if result.trace is None else _dump(result.trace)
        with self._write() as db:
            db.execute(
                "UPDATE rollouts SET finished_at = ?, final = ?, outcome = ?, reward = ?, result = ?"
                " WHERE rollout_id = ?",
                (time.time(), int(final), result.outcome, result.reward, body, result.rollout_id),
            )
            if trace is not None:
                db.execute("INSERT OR REPLACE INTO rollout_traces VALUES (?, ?)", (result.rollout_id, trace))

    def group_ready(self, group_id: int) -> None:
        with self._write() as db:
            db.execute(
                "UPDATE rollout_groups SET state = 'ready', ready_at = ? WHERE group_id = ?", (time.time(), group_id)
            )

    # -- the learner's side --------------------------------------------------------------------------------------

    def take_ready(self, skip: set[int]) -> StoredGroup | None:
        """The oldest ready group that is not in `skip`; it stays ready until `mark_trained` or `mark_dropped`."""
        for gid, task in self._read(
            "SELECT group_id, task FROM rollout_groups WHERE state = 'ready' ORDER BY group_id"
        ):
            if gid not in skip:
                return StoredGroup(gid, task, self.results(gid))
        return None

    def results(self, group_id: int) -> list[RolloutResult]:
        """The final results of a group, by slot."""
        return [
            _load(*row) for row in self._read(f"{_RESULTS} WHERE group_id = ? AND final = 1 ORDER BY slot", group_id)
        ]

    def mark_trained(self, group_ids: list[int], step: int) -> None:
        with self._write() as db:
            db.executemany(
                "UPDATE rollout_groups SET state = 'trained', trained_step = ? WHERE group_id = ?",
                [(step, gid) for gid in group_ids],
            )

    def mark_dropped(self, group_id: int, reason: str) -> None:
        with self._write() as db:
            db.execute("UPDATE rollout_groups SET state = 'dropped', reason = ? WHERE group_id = ?", (reason, group_id))

    def rewind(self, step: int) -> int:
        """Continue from a checkpoint after `step`: later trained groups wait again. Returns how many."""
        with self._write() as db:
            return db.execute(
                "UPDATE rollout_groups SET state = 'ready', trained_step = NULL"
                " WHERE state = 'trained' AND trained_step > ?",
                (step,),
            ).rowcount

    # -- for people ----------------------------------------------------------------------------------------------

    def outcome_counts(self, step: int | None = None) -> dict[str, int]:
        """Rollout attempts by outcome: of the groups trained at `step`, or of the whole run ("running" included)."""
        if step is None:
            sql, args = "SELECT COALESCE(outcome, 'running'), COUNT(*) FROM rollouts GROUP BY 1", ()
        else:
            sql = (
                "SELECT outcome, COUNT(*) FROM rollouts JOIN rollout_groups USING (group_id)"
                " WHERE trained_step = ? AND outcome IS NOT NULL GROUP BY 1"
            )
            args = (step,)  # type: ignore[assignment]
        return dict(self._read(sql, *args))

    def group_counts(self) -> dict[str, int]:
        return dict(self._read("SELECT state, COUNT(*) FROM rollout_groups GROUP BY state"))

    def trained_results(self, step: int) -> list[RolloutResult]:
        sql = "SELECT group_id FROM rollout_groups WHERE trained_step = ? ORDER BY group_id"
        return [result for (gid,) in self._read(sql, step) for result in self.results(gid)]

    def rollouts(self) -> list[RolloutResult]:
        """Every finished attempt, in order of start, each without its trace (`rollout` gives that)."""
        rows = self._read("SELECT result FROM rollouts WHERE result IS NOT NULL ORDER BY started_at")
        return [replace(_load(blob, None), trace=None) for (blob,) in rows]

    def rollout(self, rollout_id: str) -> RolloutResult:
        """A finished attempt with its trace. Raises KeyError."""
        rows = self._read(f"{_RESULTS} WHERE rollout_id = ? AND result IS NOT NULL", rollout_id)
        if not rows:
            raise KeyError(rollout_id)
        return _load(*rows[0])

    def find_rollout(self, prefix: str) -> list[RolloutResult]:
        """Finished attempts whose id starts with `prefix`."""
        sql = f"{_RESULTS} WHERE result IS NOT NULL AND substr(rollout_id, 1, ?) = ?"
        return [_load(*row) for row in self._read(sql, len(prefix), prefix)]


@contextmanager
def _mapped(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RunDirError(
            f"the run's store {path} failed: {error}; free disk space or use another --run-dir"
        ) from error


_RESULTS = "SELECT result, trace FROM rollouts LEFT JOIN rollout_traces USING (rollout_id)"


def _dump(value: dict[str, Any]) -> bytes:
    return zstandard.compress(orjson.dumps(value))


def _parse(blob: bytes) -> dict[str, Any]:
    data: dict[str, Any] = orjson.loads(blob if blob[:1] == b"{" else zstandard.decompress(blob))
    return data


def _load(body: bytes, trace: bytes | None) -> RolloutResult:
    data = _parse(body)
    data["outcome"] = Outcome(data["outcome"])
    if trace is not None:
        data["trace"] = _parse(trace)
    return RolloutResult(**data)

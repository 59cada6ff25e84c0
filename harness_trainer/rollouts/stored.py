"""Every row of the runner's and the learner's tables as it stands in the file: what an audit reads.

Owns reading them as one snapshot, also while a run writes. It judges nothing and changes nothing; `audit` judges.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_trainer.errors import RunDirError
from harness_trainer.rollouts.lineage import PolicyVersion
from harness_trainer.rollouts.store import RolloutStore, parse_stored


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """A row of `rollouts`. Example: StoredAttempt("g00017-2-5f0c12ab", 17, 2, 0, 1.76e9, None, ...) is under way."""

    rollout_id: str
    group_id: int
    slot: int
    attempt: int  # 0 = first try since the runner's start
    started_at: float  # Unix seconds
    finished_at: float | None
    final: bool
    outcome: str | None
    reward: float | None
    result: dict[str, Any] | None  # fields of `RolloutResult` without the trace; None = it never came to one
    has_trace: bool

    @property
    def has_ended(self) -> bool:
        return self.finished_at is not None or self.outcome is not None


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A row of `rollout_groups`. Groups of evaluations have ids below 0."""

    group_id: int
    task: str
    harness: str
    state: str
    created_at: float  # Unix seconds
    ready_at: float | None
    trained_step: int | None
    reason: str | None
    evaluation: int | None  # the step after which it is run; None = a group to train on


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    step: int
    report: dict[str, Any] | None  # None = it is not finished


@dataclass(frozen=True, slots=True)
class Stored:
    """The whole of the tables, at one moment."""

    attempts: list[StoredAttempt]  # in order of start
    groups: dict[int, StoredGroup]
    evaluations: list[StoredEvaluation]
    quarantined_at: dict[str, float]  # Unix seconds, by task
    versions: dict[int, PolicyVersion]  # the tree of policies; a run of an older version has none, or a part of it
    used_up: int  # the highest version that any engine of the run may have sampled with


def read_stored(path: Path) -> Stored:
    """Raises RunDirError when the file cannot be read, or is of a newer version."""
    store = RolloutStore(path)  # brings an older file to this schema, as every reading command does
    try:
        used_up = store.used_up()
    finally:
        store.close()
    try:
        with closing(_opened(path)) as db:
            db.execute("BEGIN")  # one snapshot, whatever the run writes meanwhile
            return Stored(
                attempts=[_attempt(row) for row in db.execute(_ATTEMPTS)],
                groups={row[0]: StoredGroup(*row) for row in db.execute(_GROUPS)},
                evaluations=[_evaluation(row) for row in db.execute("SELECT step, report FROM evaluations")],
                quarantined_at=dict(
                    db.execute("SELECT task, quarantined_at FROM task_records WHERE quarantined_at IS NOT NULL")
                ),
                versions={
                    row[0]: PolicyVersion(*row)
                    for row in db.execute("SELECT version, step, parent FROM policy_versions")
                },
                used_up=used_up,
            )
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error


def read_trace(path: Path, rollout_id: str) -> dict[str, Any] | None:
    """The trace of an attempt as it is kept; None = it has none. Raises RunDirError like `read_stored`."""
    try:
        with closing(_opened(path)) as db:
            row = db.execute("SELECT trace FROM rollout_traces WHERE rollout_id = ?", (rollout_id,)).fetchone()
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error
    return None if row is None else parse_stored(row[0])


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, timeout=15)


def _unreadable(path: Path, error: sqlite3.Error) -> RunDirError:
    return RunDirError(f"the run's store {path} cannot be read: {error}; give the folder of a whole run")


_ATTEMPTS = (
    "SELECT rollout_id, group_id, slot, attempt, started_at, finished_at, final, outcome, reward, result,"
    " trace IS NOT NULL FROM rollouts LEFT JOIN rollout_traces USING (rollout_id)"
    " ORDER BY rollouts.rowid"  # in which they were begun, whatever the clock said
)
_GROUPS = (
    "SELECT group_id, task, harness, state, created_at, ready_at, trained_step, reason, evaluation"
    " FROM rollout_groups ORDER BY group_id"
)


def _attempt(row: tuple[Any, ...]) -> StoredAttempt:
    rollout_id, group_id, slot, attempt, started_at, finished_at, final, outcome, reward, result, has_trace = row
    data = None if result is None else parse_stored(result)
    kept = (bool(final), outcome, reward, data, bool(has_trace))
    return StoredAttempt(rollout_id, group_id, slot, attempt, started_at, finished_at, *kept)


def _evaluation(row: tuple[Any, ...]) -> StoredEvaluation:
    return StoredEvaluation(row[0], None if row[1] is None else json.loads(row[1]))

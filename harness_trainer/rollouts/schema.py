"""The runner's and the learner's tables of a run's `store.sqlite`, and how a file of an older schema is migrated.

Owns the tables' SQL. A migration is one transaction: a process that is killed in the middle of it leaves the file as it
was. Called by `store_file` whenever a file is opened.

Schema 1 kept the trace inside `result`, as plain JSON; such rows are read as they are. Schema 2 knew no evaluations.
Schema 3 knew no tree of policies, and lost the agents at work when the runner was killed.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from harness_trainer.errors import RunDirError

SCHEMA_VERSION = 4
_OLDER = ("1", "2", "3")
_KEY = "rollout_schema"

_TABLES = (
    "CREATE TABLE IF NOT EXISTS run_state (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    # Groups that are trained on have ids from 0. Those of evaluations have ids below 0, so that they change nothing of
    # what a training group's id means, and states of their own: evaluating, evaluated.
    "CREATE TABLE IF NOT EXISTS rollout_groups ("
    " group_id INTEGER PRIMARY KEY, task TEXT NOT NULL, harness TEXT NOT NULL,"
    " state TEXT NOT NULL,"  # running, ready, trained, dropped
    " start_version INTEGER NOT NULL, created_at REAL NOT NULL, ready_at REAL, trained_step INTEGER, reason TEXT,"
    " evaluation INTEGER)",  # the step after which it is run; NULL = a group to train on
    "CREATE TABLE IF NOT EXISTS rollouts ("
    " rollout_id TEXT PRIMARY KEY, group_id INTEGER NOT NULL REFERENCES rollout_groups(group_id),"
    " slot INTEGER NOT NULL, attempt INTEGER NOT NULL, started_at REAL NOT NULL, finished_at REAL,"
    " final INTEGER NOT NULL DEFAULT 0,"  # 1 = this attempt stands for its slot
    " outcome TEXT, reward REAL, result BLOB)",  # JSON, zstd
    # Apart from the result: a list of rollouts is wanted often, and its megabytes of tokens are not.
    "CREATE TABLE IF NOT EXISTS rollout_traces (rollout_id TEXT PRIMARY KEY, trace BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts(group_id)",
    # What another runner needs to go on with an attempt that is not over, see `takeover`. Holds no secret.
    "CREATE TABLE IF NOT EXISTS agents_at_work ("
    " rollout_id TEXT PRIMARY KEY REFERENCES rollouts(rollout_id),"
    " sandbox_type TEXT NOT NULL, sandbox_id TEXT NOT NULL,"
    " job_id TEXT,"  # of the agent's command in the sandbox; NULL = it was about to be started
    " tested INTEGER NOT NULL DEFAULT 0,"  # 1 = tests were brought into this sandbox
    " facts TEXT NOT NULL)",  # JSON of `at_work.Facts`
    "CREATE TABLE IF NOT EXISTS task_records ("
    " task TEXT PRIMARY KEY,"
    " setup_failures INTEGER NOT NULL,"  # groups in a row that all failed at set-up
    " reason TEXT NOT NULL,"  # of the last failure
    " quarantined_at REAL)",  # NULL = it is still drawn
    "CREATE TABLE IF NOT EXISTS evaluations ("
    " step INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, started_at REAL NOT NULL,"
    " finished_at REAL, report TEXT)",  # JSON; NULL = it is still run
    # The tree of policies, see `lineage`: `parent` is what the learner went on from; 0 = the base model.
    "CREATE TABLE IF NOT EXISTS policy_versions ("
    " version INTEGER PRIMARY KEY, step INTEGER NOT NULL, parent INTEGER CHECK (parent < version))",
    # What the runner has to say to a person; the supervisor shows each once and appends it to events.jsonl.
    "CREATE TABLE IF NOT EXISTS run_notes ("
    " seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL)",
)


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Make or update the tables. Raises RunDirError when a newer version has written the file."""
    db.execute("BEGIN IMMEDIATE")  # several processes open the file at the same time
    try:
        for table in _TABLES:
            db.execute(table)
        row = db.execute("SELECT value FROM run_state WHERE key = ?", (_KEY,)).fetchone()
        found = None if row is None else str(row[0])
        if found in _OLDER and "evaluation" not in _columns(db, "rollout_groups"):
            db.execute("ALTER TABLE rollout_groups ADD COLUMN evaluation INTEGER")
        if found is None or found in _OLDER:
            db.execute("INSERT OR REPLACE INTO run_state VALUES (?, ?)", (_KEY, str(SCHEMA_VERSION)))
        elif found != str(SCHEMA_VERSION):
            raise RunDirError(
                f"{path} was written with rollout schema {found}, this version reads {SCHEMA_VERSION}: "
                "use the harness-trainer that wrote it, or another --run-dir"
            )
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _columns(db: sqlite3.Connection, table: str) -> set[str]:
    return {str(row[1]) for row in db.execute(f"PRAGMA table_info({table})")}

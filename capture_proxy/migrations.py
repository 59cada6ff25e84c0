"""The schema of the store's tables, and how a file of an older one becomes one of this.

Owns the tables' SQL. A migration is one transaction: a process that is killed in the middle of it leaves the file as it
was. Called by `store` whenever a file is opened.

Schema 1 kept every turn whole. Schema 2 keeps a turn in terms of an earlier one, the raw request bodies, and events.
"""

from __future__ import annotations

import math
import sqlite3
from array import array
from pathlib import Path
from typing import Any

import orjson

from capture_proxy import codec
from capture_proxy.errors import StoreError
from capture_proxy.types import Turn

SCHEMA_VERSION = 2
_META = "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
_TABLES = (
    "CREATE TABLE IF NOT EXISTS capture_sessions (session_id TEXT PRIMARY KEY, token TEXT NOT NULL UNIQUE,"
    " created_at REAL NOT NULL, body BLOB NOT NULL)",
    # `base` is the seq of an earlier turn of the session: `prompt_ids` follow `num_shared` ids of its prompt and
    # completion, `body` and `raw` are told in its terms. `raw` comes last: most readers never reach its pages.
    "CREATE TABLE IF NOT EXISTS capture_turns (seq INTEGER PRIMARY KEY, turn_id TEXT NOT NULL UNIQUE,"
    " session_id TEXT NOT NULL, turn_index INTEGER NOT NULL, status TEXT NOT NULL, body_hash BLOB NOT NULL,"
    " base INTEGER, num_shared INTEGER NOT NULL, prompt_ids BLOB NOT NULL, body BLOB NOT NULL,"
    " completion_ids BLOB NOT NULL, logprobs BLOB NOT NULL, raw BLOB, UNIQUE (session_id, turn_index))",
    "CREATE INDEX IF NOT EXISTS capture_turns_by_body ON capture_turns (session_id, body_hash)",
    "CREATE TABLE IF NOT EXISTS capture_events (seq INTEGER PRIMARY KEY, at REAL NOT NULL, session_id TEXT,"
    " kind TEXT NOT NULL, detail TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS capture_events_by_session ON capture_events (session_id)",
)
INSERT_TURN = (
    "INSERT INTO capture_turns (turn_id, session_id, turn_index, status, body_hash, base, num_shared, prompt_ids, body,"
    " completion_ids, logprobs, raw) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables, or bring them to this schema. Raises StoreError for a newer one, sqlite3.Error.

    `db` is in autocommit mode (`isolation_level=None`).
    """
    if _version(db, path) == SCHEMA_VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute(_META)
        version = _version(db, path)  # another process may have been faster
        if version == 1:
            _from_1_to_2(db)
        for statement in _TABLES:
            db.execute(statement)
        db.execute("INSERT OR REPLACE INTO meta VALUES ('capture_schema', ?)", (str(SCHEMA_VERSION),))
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _version(db: sqlite3.Connection, path: Path) -> int | None:
    """The schema of the file; None = it has none of our tables."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'meta'").fetchone():
        return None
    row = db.execute("SELECT value FROM meta WHERE key = 'capture_schema'").fetchone()
    if row is None:
        return None
    if int(row[0]) > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has capture schema {row[0]}, this program knows {SCHEMA_VERSION}: use the newer harness-trainer"
        )
    return int(row[0])


def _from_1_to_2(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE capture_turns RENAME TO capture_turns_1")
    for statement in _TABLES:
        db.execute(statement)
    sessions = db.execute("SELECT DISTINCT session_id FROM capture_turns_1").fetchall()
    for (session_id,) in sessions:
        encoder = codec.Encoder()
        # One turn at a time: schema 1 holds the whole history with each.
        rows = db.execute(
            "SELECT body, prompt_ids, completion_ids, logprobs FROM capture_turns_1"
            " WHERE session_id = ? ORDER BY turn_index",
            (session_id,),
        )
        for row in rows:
            turn = _turn_1(row)
            seq = db.execute(INSERT_TURN, turn_row(turn, encoder.encode(turn))).lastrowid
            assert seq is not None
            encoder.remember(turn, seq)
    db.execute("DROP TABLE capture_turns_1")


def _turn_1(row: tuple[Any, ...]) -> Turn:
    data = orjson.loads(row[0])
    data["prompt_ids_P"] = array("i", row[1]).tolist()
    data["completion_ids_T"] = array("i", row[2]).tolist()
    data["logprobs_T"] = [None if math.isnan(x) else x for x in array("d", row[3])]
    return codec.turn_from_dict(data)


def turn_row(turn: Turn, encoded: codec.Encoded) -> tuple[Any, ...]:
    """The values of `INSERT_TURN`."""
    return (
        turn.turn_id,
        turn.session_id,
        turn.index,
        turn.status.value,
        turn.body_hash,
        encoded.base,
        encoded.num_shared,
        encoded.new_ids.tobytes(),
        orjson.dumps(encoded.body),
        array("i", turn.completion_ids_T).tobytes(),
        array("d", [math.nan if x is None else x for x in turn.logprobs_T]).tobytes(),
        encoded.raw,
    )

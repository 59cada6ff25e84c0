"""When the engine had a call to answer, by the store's account. Read only, for whoever measures how busy a run is.

Owns that one question, so that no other package needs to know how a turn is kept. A call is in the store once it is
over: one that is still running is not seen. The trainer asks after each step.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class CallTime:
    """Example: CallTime(17, 1760000000.0, 1760000002.5). Unix seconds: the request arrived, the reply was complete."""

    seq: int  # order in which calls ended, from 1
    started_at: float
    finished_at: float


def last_seq(store: Path) -> int:
    """Of the newest recorded call; 0 = there is none."""
    rows = _read(store, "SELECT COALESCE(MAX(seq), 0) FROM capture_turns")
    return 0 if rows is None else int(rows[0][0])


def call_times(store: Path, after_seq: int) -> list[CallTime] | None:
    """The calls that were recorded after the one with this `seq`, in that order; None = the file is no capture store.

    Raises sqlite3.Error when the file cannot be read.
    """
    rows = _read(
        store,
        "SELECT seq, json_extract(body, '$.started_at'), json_extract(body, '$.finished_at')"
        " FROM (SELECT seq, CAST(body AS TEXT) AS body FROM capture_turns WHERE seq > ?) ORDER BY seq",
        after_seq,
    )
    return None if rows is None else [CallTime(seq, float(start), float(end)) for seq, start, end in rows]


def _read(store: Path, sql: str, *args: int) -> list[tuple[int, float, float]] | None:
    if not store.exists():
        return None
    with closing(sqlite3.connect(f"file:{quote(str(store))}?mode=ro", uri=True, timeout=30)) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'capture_turns'").fetchone():
            return None
        return db.execute(sql, args).fetchall()

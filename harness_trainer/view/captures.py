"""The model calls of rollouts, decoded: read in one transaction, and kept for the next questions about the same one.

Owns the small cache: pages ask for a rollout's turns one by one, and a turn is told in terms of earlier ones, so that
each needs the whole session. Called by `traces`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture_proxy.graph import Graph, assign_roles
from capture_proxy.store import capture_in
from capture_proxy.types import Capture, Turn
from harness_trainer.errors import RunDirError
from harness_trainer.view.reading import has_table, reading
from jobs.masking import Mask

_NUM_KEPT = 4
_NUM_IDS = 900  # variables of one statement


@dataclass(frozen=True, slots=True)
class Calls:
    """A session with its roles decided. `mask` takes the session's token out of any text: it may still be open."""

    capture: Capture
    graph: Graph
    turns: list[Turn]  # by order of arrival
    mask: Mask


class Captures:
    """Of one store. May be asked from several threads."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Any, Calls]] = OrderedDict()

    def calls(self, rollout_id: str) -> Calls | None:
        """None = the file has no session of this rollout. Raises RunDirError for one that cannot be decoded."""
        with reading(self._store) as db:
            stamp = _stamp(db, rollout_id)
            if stamp is None:
                return None
            with self._lock:
                known = self._kept.get(rollout_id)
                if known is not None and known[0] == stamp:
                    self._kept.move_to_end(rollout_id)
                    return known[1]
            found = _decoded(db, rollout_id)
        if found is not None:
            with self._lock:
                self._kept[rollout_id] = (stamp, found)
                while len(self._kept) > _NUM_KEPT:
                    self._kept.popitem(last=False)
        return found


def masks(db: sqlite3.Connection, rollout_ids: Sequence[str]) -> dict[str, Mask]:
    """What takes the session's token out of a text, of each of these rollouts that has a session."""
    if not has_table(db, "capture_sessions"):
        return {}
    found: dict[str, Mask] = {}
    for start in range(0, len(rollout_ids), _NUM_IDS):
        some = rollout_ids[start : start + _NUM_IDS]
        sql = f"SELECT session_id, token FROM capture_sessions WHERE session_id IN ({', '.join('?' * len(some))})"
        found |= {str(session_id): Mask([token]) for session_id, token in db.execute(sql, tuple(some))}
    return found


def _stamp(db: sqlite3.Connection, rollout_id: str) -> tuple[Any, ...] | None:
    """Another one when the session or its turns are; a turn is never changed once it is there."""
    if not has_table(db, "capture_sessions"):
        return None
    row = db.execute("SELECT body FROM capture_sessions WHERE session_id = ?", (rollout_id,)).fetchone()
    if row is None:
        return None
    counted = db.execute("SELECT COUNT(*), MAX(seq) FROM capture_turns WHERE session_id = ?", (rollout_id,)).fetchone()
    return (row[0], *counted)


def _decoded(db: sqlite3.Connection, rollout_id: str) -> Calls | None:
    try:
        capture = capture_in(db, rollout_id)
    except (ValueError, TypeError, KeyError) as error:
        raise RunDirError(f"the model calls of {rollout_id} cannot be read: {type(error).__name__}: {error}") from error
    if capture is None:
        return None
    graph = assign_roles(capture.turns)
    return Calls(capture, graph, sorted(capture.turns, key=lambda turn: turn.index), Mask([capture.session.token]))

"""One rollout: what it came to, its model calls, one call's messages and tokens, the trained rows.

Owns what of a call is told and how much at once: a rollout may have hundreds of calls and megabytes of tool output, so
a page has the list, and asks for a call's inside when a person opens it. Called by `app`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capture_proxy.trace import is_trained
from capture_proxy.types import Turn
from harness_trainer.learner.rows import BuiltRows, Row, rows_from_trace
from harness_trainer.rollouts.store import parse_stored
from harness_trainer.rundir import RunDir
from harness_trainer.view import kept
from harness_trainer.view.attempts import Condition, attempts_of, stored_result
from harness_trainer.view.captures import Calls, Captures
from harness_trainer.view.messages import REPLY, Message, message, messages_of, num_repeated, part
from harness_trainer.view.reading import has_table, reading
from harness_trainer.view.tokens import TokenTexts
from harness_trainer.view.turns import summaries, version_of_each
from harness_trainer.view.visible import each_text
from jobs.masking import Mask

TOKENS = 2_000  # of one answer
_NUM_EVENTS = 100


class UnknownRollout(KeyError):
    """No attempt, turn, message or row of this name."""


class Traces:
    """Of one run. Every method may be called from any thread, and raises UnknownRollout or RunDirError."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._captures = Captures(run.store)
        self._texts = TokenTexts(run)

    # -- the rollout as a whole ----------------------------------------------------------------------------------

    def facts(self, rollout_id: str) -> dict[str, Any]:
        """All of it but what the model was asked and said."""
        with reading(self._run.store) as db:
            attempt = _attempt(db, rollout_id)
            row = db.execute("SELECT result FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
            beside = Condition("group_id = ? AND slot = ?", (attempt["group_id"], attempt["slot"]))
            tries = attempts_of(db, beside)
            at_work = db.execute(_AT_WORK, (rollout_id,)).fetchone()
            events = _events(db, rollout_id)
            has_trace = db.execute("SELECT 1 FROM rollout_traces WHERE rollout_id = ?", (rollout_id,)).fetchone()
        found = {
            **attempt,
            "result": stored_result(row[0]),
            "tries": [{name: one[name] for name in _OF_A_TRY} for one in tries],
            "at_work": None if at_work is None else dict(zip(_AT_WORK_COLUMNS, at_work, strict=True)),
            "events": events,
            "has_trace": has_trace is not None,
            "files": [{"name": file.name, "size": file.size} for file in kept.files_in(self.folder(rollout_id))],
        }
        mask = self.mask_of(rollout_id)
        told: dict[str, Any] = found if mask is None else each_text(found, mask)
        return told

    def folder(self, rollout_id: str) -> Path:
        """What was kept of it; the id is one that the store has."""
        return self._run.artifacts / rollout_id

    def turns(self, rollout_id: str) -> list[dict[str, Any]] | None:
        """Its calls in order of arrival; None = the store does not hold them."""
        calls = self._captures.calls(rollout_id)
        if calls is None:
            with reading(self._run.store) as db:
                _attempt(db, rollout_id)
            return None
        return summaries(calls)

    def mask_of(self, rollout_id: str) -> Mask | None:
        """Takes the rollout's token out of a text; None = it never had one."""
        calls = self._captures.calls(rollout_id)
        return None if calls is None else calls.mask

    # -- one call ------------------------------------------------------------------------------------------------

    def turn(self, rollout_id: str, index: int, *, whole: bool = False) -> dict[str, Any]:
        """`whole`: also the messages that the call before it in its lineage had."""
        calls, turn = self._turn(rollout_id, index)
        parent = next((one for one in calls.turns if one.turn_id == calls.graph.nodes[turn.turn_id].parent), None)
        repeated = 0 if whole else num_repeated(turn, parent)
        keys = range(repeated, len(messages_of(turn)))
        tools = turn.request.get("tools")
        return {
            **summaries(calls)[calls.turns.index(turn)],
            "num_repeated": repeated,
            "num_messages": len(messages_of(turn)),
            "messages": [_told(message(turn, str(key), calls.mask)) for key in keys],
            "reply": _told(message(turn, REPLY, calls.mask)) if turn.message else None,
            "num_tools": len(tools) if isinstance(tools, list) else 0,
            "sampling": turn.sampling,
            "requested_sampling": turn.requested_sampling,
        }

    def message(self, rollout_id: str, index: int, key: str, offset: int) -> dict[str, Any]:
        calls, turn = self._turn(rollout_id, index)
        try:
            return part(turn, key, calls.mask, offset)
        except KeyError:
            raise UnknownRollout(f"call {index} of {rollout_id} has no message {key}") from None

    def sampled(self, rollout_id: str, index: int, offset: int) -> dict[str, Any]:
        """The tokens that the engine sampled, each with its log-probability, policy and whether it is trained."""
        _, turn = self._turn(rollout_id, index)
        ids = turn.completion_ids_T
        logprobs = turn.logprobs_T if len(turn.logprobs_T) == len(ids) else [None] * len(ids)
        trained = self._trained_turns(rollout_id)
        is_in = is_trained(turn) if trained is None else turn.turn_id in trained
        versions = version_of_each(turn)
        return self._tokens(ids, offset, lambda n: (logprobs[n], int(is_in), versions[n]))

    def prompt(self, rollout_id: str, index: int, offset: int) -> dict[str, Any]:
        _, turn = self._turn(rollout_id, index)
        return self._tokens(turn.prompt_ids_P, offset, lambda n: (None, 0, None))

    # -- what is trained -----------------------------------------------------------------------------------------

    def rows(self, rollout_id: str) -> dict[str, Any] | None:
        """What the learner makes of the trace it is handed; None = there is no trace (yet)."""
        built = self._rows(rollout_id)
        if built is None:
            return None
        return {
            "rows": [
                {"num_tokens": len(row.ids_N), "num_trained": row.num_trained, "turn_ids": row.turn_ids}
                for row in built.rows
            ],
            "findings": [f"{one.severity.value} {one.code}: {one.detail}" for one in built.findings],
        }

    def row(self, rollout_id: str, number: int, offset: int) -> dict[str, Any]:
        built = self._rows(rollout_id)
        if built is None or not 0 <= number < len(built.rows):
            raise UnknownRollout(f"{rollout_id} has no row {number}")
        row = built.rows[number]
        return self._tokens(row.ids_N, offset, lambda n: _of_row(row, n))

    def stored_trace(self, rollout_id: str) -> dict[str, Any] | None:
        """OpenEnv's `TrainingTrace` as the learner is handed it, a turn per row; None = there is none (yet)."""
        with reading(self._run.store) as db:
            _attempt(db, rollout_id)
            row = db.execute("SELECT trace FROM rollout_traces WHERE rollout_id = ?", (rollout_id,)).fetchone()
        return None if row is None else parse_stored(row[0])

    def calls(self, rollout_id: str) -> Calls | None:
        return self._captures.calls(rollout_id)

    # -- inside --------------------------------------------------------------------------------------------------

    def _turn(self, rollout_id: str, index: int) -> tuple[Calls, Turn]:
        calls = self._captures.calls(rollout_id)
        turn = next((one for one in calls.turns if one.index == index), None) if calls else None
        if calls is None or turn is None:
            raise UnknownRollout(f"{rollout_id} has no call {index}")
        return calls, turn

    def _rows(self, rollout_id: str) -> BuiltRows | None:
        trace = self.stored_trace(rollout_id)
        if trace is None:
            return None
        try:
            return rows_from_trace(trace)
        except (KeyError, TypeError):
            return None  # of a form that this version does not know

    def _trained_turns(self, rollout_id: str) -> set[str] | None:
        built = self._rows(rollout_id)
        return None if built is None else {turn_id for row in built.rows for turn_id in row.turn_ids}

    def _tokens(self, ids: Sequence[int], offset: int, about: Any) -> dict[str, Any]:
        start = min(max(0, offset), len(ids))
        end = min(len(ids), start + TOKENS)
        some = list(ids[start:end])
        texts = self._texts.texts(some)
        tokens = []
        for place, token in enumerate(some):
            logprob, trained, version = about(start + place)
            text = None if texts is None else texts[place]
            tokens.append({"id": token, "text": text, "logprob": logprob, "trained": trained, "version": version})
        return {"tokens": tokens, "start": start, "end": end, "total": len(ids), "has_texts": texts is not None}


_AT_WORK = "SELECT sandbox_type, sandbox_id, job_id, tested FROM agents_at_work WHERE rollout_id = ?"
_AT_WORK_COLUMNS = ("sandbox_type", "sandbox_id", "job_id", "tested")
_OF_A_TRY = ("rollout_id", "attempt", "started_at", "seconds", "final", "outcome", "reward", "detail")


def _attempt(db: sqlite3.Connection, rollout_id: str) -> dict[str, Any]:
    found = attempts_of(db, Condition("rollout_id = ?", (rollout_id,)))
    if not found:
        raise UnknownRollout(f"the run has no rollout {rollout_id}")
    return found[0]


def _events(db: sqlite3.Connection, rollout_id: str) -> list[dict[str, Any]]:
    """What happened beside the calls, such as a connection that was refused."""
    if not has_table(db, "capture_events"):
        return []
    sql = "SELECT at, kind, detail FROM capture_events WHERE session_id = ? ORDER BY seq LIMIT ?"
    return [
        {"at": at, "kind": kind, "detail": detail} for at, kind, detail in db.execute(sql, (rollout_id, _NUM_EVENTS))
    ]


def _told(one: Message) -> dict[str, Any]:
    return {
        "key": one.key,
        "role": one.role,
        "text": one.text,
        "total": one.total,
        "is_cut": one.is_cut,
        "calls": [{"name": name, "arguments": arguments} for name, arguments in one.calls],
    }


def _of_row(row: Row, place: int) -> tuple[float | None, int, str | None]:
    """What the learner is given of a token; without the mask it is context, of which nothing is known here."""
    if not row.mask_N[place]:
        return None, 0, None
    return row.logprobs_N[place], 1, f"v{row.versions_N[place]}"

"""The durable hand-over between the rollout runner and the learner: groups, rollouts and the policy version.

Owns its own tables of the run's `store.sqlite` (the capture proxy owns others in the same file). Used by the runner
(writes rollouts, reads the version), the learner (takes groups, writes the version) and the command line (reads).
Every method is one short transaction and may be called from any thread; in `async` code call it in a worker thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import orjson
import zstandard

from harness_trainer.loops.base import ToolUse
from harness_trainer.rollouts.at_work import AgentsAtWork
from harness_trainer.rollouts.policy_records import PolicyRecords, forget_evaluations, step_taken
from harness_trainer.rollouts.store_file import get_state, storable
from harness_trainer.rollouts.types import Outcome, RolloutResult


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as the learner takes it."""

    group_id: int
    task: str
    results: list[RolloutResult]


class RolloutStore(PolicyRecords, AgentsAtWork):
    """One connection to the run's store. Raises RunDirError when the file cannot be used or written."""

    # -- the runner's side ---------------------------------------------------------------------------------------

    def open_group(self, group_id: int, task: str, harness: str) -> None:
        with self._write() as db:
            db.execute(
                "INSERT INTO rollout_groups (group_id, task, harness, state, start_version, created_at)"
                " VALUES (?, ?, ?, 'running', ?, ?)",
                (group_id, task, harness, int(get_state(db, "policy_version") or 0), time.time()),
            )

    def next_group_id(self) -> int:
        """Of training groups, which are counted from 0."""
        return int(self._read("SELECT MAX(-1, COALESCE(MAX(group_id), -1)) + 1 FROM rollout_groups")[0][0])

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
        self._finish([result], final)

    def finish_together(self, results: Sequence[RolloutResult]) -> None:
        """Rollouts that were scored beside each other stand for their slots all at once, or none does."""
        self._finish(results, True)

    def _finish(self, results: Sequence[RolloutResult], final: bool) -> None:
        blobs = [(_body(result), None if result.trace is None else _dump(result.trace)) for result in results]
        with self._write() as db:
            for result, (body, trace) in zip(results, blobs, strict=True):
                db.execute(
                    "UPDATE rollouts SET finished_at = ?, final = ?, outcome = ?, reward = ?, result = ?"
                    " WHERE rollout_id = ?",
                    (time.time(), int(final), result.outcome, result.reward, body, result.rollout_id),
                )
                if trace is not None:
                    db.execute("INSERT OR REPLACE INTO rollout_traces VALUES (?, ?)", (result.rollout_id, trace))
                db.execute("DELETE FROM agents_at_work WHERE rollout_id = ?", (result.rollout_id,))

    def close_lost(self, taken: Collection[str] = ()) -> int:
        """At the start of a runner: attempts of one that was killed will never end, but those that are `taken` over.

        Returns how many there were.
        """
        with self._write() as db:
            lost = [
                (time.time(), Outcome.CANCELLED, rollout_id)
                for (rollout_id,) in db.execute("SELECT rollout_id FROM rollouts WHERE finished_at IS NULL")
                if rollout_id not in taken
            ]
            db.executemany("UPDATE rollouts SET finished_at = ?, outcome = ? WHERE rollout_id = ?", lost)
            db.executemany(
                "DELETE FROM agents_at_work WHERE rollout_id = ?", [(rollout_id,) for *_, rollout_id in lost]
            )
        return len(lost)

    def group_ready(self, group_id: int) -> None:
        with self._write() as db:
            db.execute(
                "UPDATE rollout_groups SET state = 'ready', ready_at = ? WHERE group_id = ? AND state = 'running'",
                (time.time(), group_id),
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

    def results_by_slot(self, group_id: int) -> dict[int, RolloutResult]:
        """What stands for each slot that is over, refills included."""
        sql = "SELECT slot, result, trace FROM rollouts LEFT JOIN rollout_traces USING (rollout_id)"
        rows = self._read(f"{sql} WHERE group_id = ? AND final = 1", group_id)
        return {slot: _load(body, trace) for slot, body, trace in rows}

    def mark_trained(self, group_ids: list[int], step: int) -> None:
        with self._write() as db:
            db.executemany(
                "UPDATE rollout_groups SET state = 'trained', trained_step = ? WHERE group_id = ?",
                [(step, gid) for gid in group_ids],
            )
            step_taken(db)

    def mark_dropped(self, group_id: int, reason: str) -> None:
        with self._write() as db:
            db.execute("UPDATE rollout_groups SET state = 'dropped', reason = ? WHERE group_id = ?", (reason, group_id))

    def rewind(self, step: int) -> int:
        """Continue from a checkpoint after `step`: later trained groups wait again. Returns how many."""
        with self._write() as db:
            forget_evaluations(db, step)
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
        """Training groups by state."""
        return dict(self._read("SELECT state, COUNT(*) FROM rollout_groups WHERE evaluation IS NULL GROUP BY state"))

    def drop_counts(self) -> dict[str, int]:
        """Groups that will never be trained, by reason, over the whole run."""
        sql = (
            "SELECT COALESCE(reason, '?'), COUNT(*) FROM rollout_groups"
            " WHERE state = 'dropped' AND evaluation IS NULL GROUP BY 1 ORDER BY 2 DESC"
        )
        return dict(self._read(sql))

    def fate(self, group_id: int) -> tuple[str, str | None]:
        """The group's state, and why it was dropped (None = it was not). Raises KeyError."""
        rows = self._read("SELECT state, reason FROM rollout_groups WHERE group_id = ?", group_id)
        if not rows:
            raise KeyError(group_id)
        return rows[0][0], rows[0][1]

    def trained_step(self, group_id: int) -> int | None:
        """The optimizer step, from 1, that trained the group; None = none did."""
        rows = self._read("SELECT trained_step FROM rollout_groups WHERE group_id = ?", group_id)
        return rows[0][0] if rows else None

    def ready_times(self, step: int) -> dict[int, float]:
        """When each group that `step` trained was handed over, in Unix seconds."""
        sql = "SELECT group_id, ready_at FROM rollout_groups WHERE trained_step = ? AND ready_at IS NOT NULL"
        return dict(self._read(sql, step))

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


_RESULTS = "SELECT result, trace FROM rollouts LEFT JOIN rollout_traces USING (rollout_id)"


def _body(result: RolloutResult) -> bytes:
    return _dump({f.name: getattr(result, f.name) for f in fields(result) if f.name != "trace"})


def _dump(value: dict[str, Any]) -> bytes:
    try:
        data = orjson.dumps(value)
    except TypeError:  # an agent's half of a surrogate pair, say: a bad rollout is data, and must not end the runner
        data = orjson.dumps(storable(value))
    return zstandard.compress(data)


def parse_stored(blob: bytes) -> dict[str, Any]:
    """The fields of a result, or a trace, as they are kept in the file (schema 1: plain JSON)."""
    data: dict[str, Any] = orjson.loads(blob if blob[:1] == b"{" else zstandard.decompress(blob))
    return data


def _load(body: bytes, trace: bytes | None) -> RolloutResult:
    data = parse_stored(body)
    data["outcome"] = Outcome(data["outcome"])
    if data.get("tool_use") is not None:
        data["tool_use"] = ToolUse(**data["tool_use"])
    if trace is not None:
        data["trace"] = parse_stored(trace)
    return RolloutResult(**data)

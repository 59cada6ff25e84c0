"""What a run has come to so far, as data: its state and parts, steps, rollouts and groups by what became of them.

Owns the questions of the first page and the answer's shape, which is that of `/api/overview` (docs/view.md). Unknown is
None, a count that is 0 is 0. Called by `app`.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from harness_trainer.rollouts.sources import source_in
from harness_trainer.rundir import RunDir
from harness_trainer.view.reading import Missing, reading
from harness_trainer.view.series import Curve, GrowingFile, Line, curves, steps_of
from harness_trainer.view.settings import Settings, without_secrets
from harness_trainer.view.visible import each_text, number

_ERRORS = ("runner_error", "learner_error")  # run-state keys: why a part has judged that the run cannot go on
_NUM_NOTES = 12


class Overview:
    """Of one run. `look` may be called from several threads."""

    def __init__(self, run: RunDir, settings: Settings) -> None:
        self._run = run
        self._settings = settings
        self._metrics = GrowingFile(run.metrics)
        self._events = GrowingFile(run.events)

    def look(self) -> dict[str, Any]:
        """Raises RunDirError for a store that cannot be read; a run that has not begun is a state like any other."""
        metrics, events = self._metrics.look(), self._events.look()
        steps = steps_of(metrics.lines)
        is_live = held(self._run)
        config = self._settings.read()
        try:
            with reading(self._run.store) as db:
                stored = _stored(db, config.sources)
        except Missing as missing:
            stored = {**_NOTHING, "waiting_for": str(missing)}
        stored["failure"] = stored["failure"] or _failure(events.lines)
        max_steps = config.max_steps
        found: dict[str, Any] = {
            "run": self._run.path.name,
            "state": _state(is_live, stored, len(steps), max_steps),
            "is_live": is_live,
            "max_steps": max_steps,
            "num_steps": len(steps),
            "last_step": _last_step(steps),
            "bad_metric_lines": metrics.num_bad,
            "parts": _parts(events.lines, is_live),
            **stored,
        }
        told: dict[str, Any] = each_text(found, without_secrets)
        return told

    def curves(self) -> list[Curve]:
        return curves(steps_of(self._metrics.look().lines))

    def steps(self) -> list[Line]:
        return steps_of(self._metrics.look().lines)

    def stamp(self) -> str:
        """Another one means that something was written; costs a few `stat`s and opens nothing but the lock."""
        store = self._run.store
        files = (store, store.with_name(store.name + "-wal"), self._run.metrics, self._run.events)
        return ":".join([str(held(self._run)), *map(_trail, files)])


def held(run: RunDir) -> bool | None:
    """Whether a live run has the folder; None = the lock may not be looked at."""
    try:
        return run.is_held()
    except OSError:
        return None


def _trail(path: Any) -> str:
    try:
        status = path.stat()
    except OSError:
        return "-"
    return f"{status.st_mtime_ns:x}.{status.st_size:x}"


_NOTHING: dict[str, Any] = {
    "waiting_for": None,
    "policy_version": None,
    "failure": None,
    "outcomes": {},
    "evaluated_outcomes": {},
    "groups": {},
    "dropped": {},
    "sources": [],
    "harnesses": [],
    "evaluations": [],
    "quarantined": {},
    "notes": [],
}


def _state(is_live: bool | None, stored: Mapping[str, Any], num_steps: int, max_steps: int | None) -> str:
    """running, waiting, failed, finished, interrupted or unknown."""
    if stored["waiting_for"] is not None and not is_live:
        return "waiting"
    if stored["failure"]:
        return "failing" if is_live else "failed"
    if is_live is None:
        return "unknown"
    if is_live:
        return "running"
    if max_steps is None:  # a run of `rollout`, which is one evaluation
        return "finished" if any(one["report"] for one in stored["evaluations"]) else "interrupted"
    return "finished" if num_steps >= max_steps and _are_over(stored["evaluations"]) else "interrupted"


def _are_over(evaluations: Iterable[Mapping[str, Any]]) -> bool:
    return all(one["report"] is not None for one in evaluations)


def _stored(db: sqlite3.Connection, sources: list[str]) -> dict[str, Any]:
    state = {str(key): str(value) for key, value in db.execute("SELECT key, value FROM run_state")}
    policy = state.get("policy_version", "")
    tallies = _tallies(db)
    return {
        "waiting_for": None,
        "policy_version": int(policy) if policy.isdigit() and int(policy) else None,
        "failure": next((state[key] for key in _ERRORS if state.get(key)), None),
        "outcomes": _outcomes(row for row in tallies if not row["evaluated"]),
        "evaluated_outcomes": _outcomes(row for row in tallies if row["evaluated"]),
        "groups": dict(db.execute("SELECT state, COUNT(*) FROM rollout_groups GROUP BY state ORDER BY 2 DESC")),
        "dropped": dict(
            db.execute(
                "SELECT COALESCE(reason, 'unknown'), COUNT(*) FROM rollout_groups WHERE state = 'dropped'"
                " AND evaluation IS NULL GROUP BY 1 ORDER BY 2 DESC"
            )
        ),
        "sources": _by("source", tallies, lambda row: source_in(row["task"], sources)) if sources else [],
        "harnesses": _by("harness", tallies, lambda row: row["harness"]),
        "evaluations": [_evaluation(row) for row in db.execute(_EVALUATIONS)],
        "quarantined": dict(db.execute("SELECT task, reason FROM task_records WHERE quarantined_at IS NOT NULL")),
        "notes": [_note(row) for row in db.execute(_NOTES, (_NUM_NOTES,))],
    }


_EVALUATIONS = "SELECT step, policy_version, started_at, finished_at, report FROM evaluations ORDER BY step"
_NOTES = "SELECT at, kind, detail FROM run_notes ORDER BY seq DESC LIMIT ?"
_TALLIES = (
    "SELECT task, harness, evaluation IS NOT NULL, COALESCE(outcome, 'running'), COUNT(*), COUNT(reward), TOTAL(reward)"
    " FROM rollouts JOIN rollout_groups USING (group_id) GROUP BY 1, 2, 3, 4"
)


def _tallies(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Attempts, retried ones included, by task, agent, purpose and outcome."""
    names = ("task", "harness", "evaluated", "outcome", "count", "num_scored", "total")
    return [dict(zip(names, row, strict=True)) for row in db.execute(_TALLIES)]


def _outcomes(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row["outcome"]] += row["count"]
    return dict(counts.most_common())


def _by(name: str, tallies: list[dict[str, Any]], key: Any) -> list[dict[str, Any]]:
    """Training attempts by a name, with their mean reward over the scored ones; None = none is scored."""
    found: dict[str, dict[str, Any]] = {}
    for row in tallies:
        if row["evaluated"]:
            continue
        one = found.setdefault(key(row), {"outcomes": Counter(), "num_scored": 0, "total": 0.0})
        one["outcomes"][row["outcome"]] += row["count"]
        one["num_scored"] += row["num_scored"]
        one["total"] += row["total"]
    return [
        {
            name: label,
            "num_attempts": one["outcomes"].total(),
            "num_scored": one["num_scored"],
            "reward_mean": one["total"] / one["num_scored"] if one["num_scored"] else None,
            "outcomes": dict(one["outcomes"].most_common()),
        }
        for label, one in sorted(found.items())
    ]


def _evaluation(row: tuple[Any, ...]) -> dict[str, Any]:
    step, version, started_at, finished_at, report = row
    told = _object(report)
    return {
        "step": step,
        "policy_version": version,
        "started_at": started_at,
        "finished_at": finished_at,
        "reward_mean": number(told.get("reward_mean")),
        "reward_ci": _interval(told.get("reward_ci")),
        "pass_at_1": number(told.get("pass_at_1")),
        "pass_at_1_ci": _interval(told.get("pass_at_1_ci")),
        "num_scored": told.get("num_scored"),
        "num_unscored": told.get("num_unscored"),
        "report": None if report is None else told,
    }


def _interval(value: Any) -> list[float] | None:
    ends = [number(end) for end in value] if isinstance(value, list | tuple) and len(value) == 2 else []
    return [end for end in ends if end is not None] if ends and None not in ends else None


def _note(row: tuple[Any, ...]) -> dict[str, Any]:
    at, kind, detail = row
    return {"at": at, "kind": kind, "line": _object(detail).get("line")}


def _object(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text) if isinstance(text, str | bytes) else {}
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def _last_step(steps: list[Line]) -> dict[str, Any] | None:
    """Of the newest step what a person looks at first; None = no step was taken yet."""
    if not steps:
        return None
    names = ("step", "policy_version", "reward_mean", "reward_std", "num_rollouts", "num_groups", "loss", "kl")
    return {name: steps[-1].get(name) for name in (*names, "ratio_mean", "staleness_mean", "trained_tokens", "step_s")}


def _failure(events: Iterable[Line]) -> str | None:
    """Why the run ended, by its supervisor; None = it has not failed, or was started again since."""
    reason: str | None = None
    for event in events:
        if event.get("kind") == "failed":
            reason = str(event.get("reason"))
        elif event.get("kind") == "started":
            reason = None
    return reason


def _parts(events: Iterable[Line], is_live: bool | None) -> list[dict[str, Any]]:
    """Engine, gateway, runner, learner, as the supervisor noted it last; of a run that was killed nobody did."""
    parts: dict[str, dict[str, Any]] = {}
    for event in events:
        kind, name = event.get("kind"), event.get("part")
        if not isinstance(name, str) or kind not in ("started", "stopped", "restart"):
            continue
        part = parts.setdefault(name, {"part": name, "num_starts": 0})
        part["num_starts"] += kind == "started"
        part["state"] = {"started": "running", "stopped": "stopped", "restart": "being restarted"}[kind]
        part["since"] = number(event.get("time"))
        part["exit_code"] = event.get("exit_code")
        part["last_line"] = event.get("last_line")
    for part in parts.values():
        if part["state"] != "stopped" and is_live is False:
            part["state"] = "gone with the run"
    return list(parts.values())

"""Lists of a run: its rollouts by what a person asks for, page by page, and its groups with rewards and advantages.

Owns filters, the order and the keys of pages, and the SQL. The newest come first. Called by `app`.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness_trainer.errors import ConfigError
from harness_trainer.learner.advantages import is_finite_number, step_advantages
from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.rollouts.store import parse_stored
from harness_trainer.rollouts.types import Outcome
from harness_trainer.view.captures import masks

PAGE = 100  # rollouts, and groups, of one page
OUTCOMES = ("running", *(outcome.value for outcome in Outcome))
GROUP_STATES = ("running", "ready", "trained", "dropped", "evaluating", "evaluated")
_GLOBAL = ("global", "global_std")  # estimators that compare with the whole step
_NUM_IDS = 900  # variables of one statement

_ROLLOUTS = (
    "SELECT rollout_id, group_id, slot, attempt, started_at, finished_at, final, COALESCE(outcome, 'running'), reward,"
    " task, harness, state, start_version, trained_step, evaluation, result"
    " FROM rollouts JOIN rollout_groups USING (group_id)"
)
_COLUMNS = (
    "rollout_id", "group_id", "slot", "attempt", "started_at", "finished_at", "final", "outcome", "reward",
    "task", "harness", "group_state", "start_version", "trained_step", "evaluation",
)  # fmt: skip
_GROUPS = (
    "SELECT group_id, task, harness, state, start_version, created_at, ready_at, trained_step, reason, evaluation"
    " FROM rollout_groups"
)
_GROUP_COLUMNS = (
    "group_id", "task", "harness", "state", "start_version", "created_at", "ready_at", "trained_step", "reason",
    "evaluation",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Condition:
    """A part of WHERE and its values. Example: Condition("outcome = ?", ("ok",))."""

    sql: str
    values: tuple[Any, ...] = ()


def rollouts(db: sqlite3.Connection, query: Mapping[str, str]) -> dict[str, Any]:
    """One page of attempts that the query asks for. Raises ConfigError for a value that no filter can have."""
    conditions = [*_filters(query), *_before(query)]
    where = " AND ".join(["1", *(one.sql for one in conditions)])
    values = [value for one in conditions for value in one.values]
    sql = f"{_ROLLOUTS} WHERE {where} ORDER BY started_at DESC, rollout_id DESC LIMIT ?"
    found = [_attempt(row) for row in db.execute(sql, (*values, PAGE + 1))]
    page = _masked(db, found[:PAGE])
    last = page[-1] if len(found) > PAGE else None
    return {"rollouts": page, "next": None if last is None else f"{last['started_at']!r}~{last['rollout_id']}"}


def attempts_of(db: sqlite3.Connection, condition: Condition) -> list[dict[str, Any]]:
    """All that meet the condition, in order of start."""
    sql = f"{_ROLLOUTS} WHERE {condition.sql} ORDER BY started_at, rollout_id"
    return _masked(db, [_attempt(row) for row in db.execute(sql, condition.values)])


def groups(db: sqlite3.Connection, query: Mapping[str, str], objective: ObjectiveConfig | None) -> dict[str, Any]:
    """One page of groups, each with what stands for its slots. Raises ConfigError as `rollouts` does."""
    conditions = _group_filters(query)
    where = " AND ".join(["1", *(one.sql for one in conditions)])
    values = [value for one in conditions for value in one.values]
    sql = f"{_GROUPS} WHERE {where} ORDER BY created_at DESC, group_id DESC LIMIT ?"
    found = [dict(zip(_GROUP_COLUMNS, row, strict=True)) for row in db.execute(sql, (*values, PAGE + 1))]
    page = found[:PAGE]
    last = page[-1] if len(found) > PAGE else None
    _fill(db, page, objective)
    return {"groups": page, "next": None if last is None else f"{last['created_at']!r}~{last['group_id']}"}


# -- filters -----------------------------------------------------------------------------------------------------


def _filters(query: Mapping[str, str]) -> list[Condition]:
    found = []
    if outcome := query.get("outcome"):
        _one_of("outcome", outcome, OUTCOMES)
        found.append(Condition("COALESCE(outcome, 'running') = ?", (outcome,)))
    if task := query.get("task"):
        found.append(Condition("instr(task, ?) > 0", (_encodable(task),)))
    if harness := query.get("harness"):
        found.append(Condition("harness = ?", (_encodable(harness),)))
    for name, column in (("group", "group_id"), ("policy", "start_version"), ("step", "trained_step")):
        if query.get(name):
            found.append(Condition(f"{column} = ?", (_whole(name, query[name]),)))
    for name, sign in (("min_reward", ">="), ("max_reward", "<=")):
        if query.get(name):
            found.append(Condition(f"reward {sign} ?", (_real(name, query[name]),)))
    if final := query.get("final"):
        _one_of("final", final, ("0", "1"))
        found.append(Condition("final = ?", (int(final),)))
    return found


def _group_filters(query: Mapping[str, str]) -> list[Condition]:
    found = []
    if state := query.get("state"):
        _one_of("state", state, GROUP_STATES)
        found.append(Condition("state = ?", (state,)))
    if task := query.get("task"):
        found.append(Condition("instr(task, ?) > 0", (_encodable(task),)))
    for name, column in (("group", "group_id"), ("policy", "start_version"), ("step", "trained_step")):
        if query.get(name):
            found.append(Condition(f"{column} = ?", (_whole(name, query[name]),)))
    if key := query.get("before"):
        at, _, group_id = key.partition("~")
        found.append(Condition("(created_at, group_id) < (?, ?)", (_real("before", at), _whole("before", group_id))))
    return found


def _before(query: Mapping[str, str]) -> list[Condition]:
    key = query.get("before")
    if not key:
        return []
    at, _, rollout_id = key.partition("~")
    return [Condition("(started_at, rollout_id) < (?, ?)", (_real("before", at), _encodable(rollout_id)))]


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r} is none of {', '.join(known)}")


def _whole(name: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ConfigError(f"{name}={value[:40]!r} is no whole number") from None
    if abs(number) >= 2**63:
        raise ConfigError(f"{name}={value[:40]!r} is too large")
    return number


def _real(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name}={value[:40]!r} is no number")
    return number


def _encodable(value: str) -> str:
    """SQLite takes no lone surrogate; nothing in the store has one, so nothing is found."""
    return value.encode("utf-8", "replace").decode()


# -- rows --------------------------------------------------------------------------------------------------------


def _attempt(row: tuple[Any, ...]) -> dict[str, Any]:
    attempt = dict(zip(_COLUMNS, row[:-1], strict=True))
    attempt["final"] = bool(attempt["final"])
    result = stored_result(row[-1])
    attempt["detail"] = result.get("detail")
    was_captured = result.get("tool_calls", {}) is not None  # else nobody counted, and the counts are defaults
    for name in ("num_turns", "num_trainable_turns", "num_side_turns", "num_completion_tokens"):
        attempt[name] = result.get(name) if was_captured else None
    ended = attempt["finished_at"]
    attempt["seconds"] = None if ended is None else max(0.0, ended - attempt["started_at"])
    return attempt


def _masked(db: sqlite3.Connection, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An agent's last words may hold its token, which is the session's."""
    told = {one["rollout_id"]: one for one in found if one["detail"]}
    for rollout_id, mask in masks(db, list(told)).items():
        told[rollout_id]["detail"] = mask(str(told[rollout_id]["detail"]))
    return found


def stored_result(blob: bytes | None) -> dict[str, Any]:
    """The fields of an attempt's result; {} = it has none (it runs, or was lost), or it cannot be read."""
    if blob is None:
        return {}
    try:
        return parse_stored(blob)
    except Exception as error:  # zstandard has errors of its own, and is imported only where it is needed
        return {"detail": f"its result cannot be read: {error}"}


def _fill(db: sqlite3.Connection, page: list[dict[str, Any]], objective: ObjectiveConfig | None) -> None:
    """Rewards and advantages of each group's slots."""
    rest: dict[int, int] = {}  # other groups of the same steps, which a global baseline is made of
    if objective is not None and objective.advantage in _GLOBAL:
        steps = {group["trained_step"] for group in page if group["trained_step"] is not None}
        for step in steps:
            rest |= dict(
                db.execute("SELECT group_id, trained_step FROM rollout_groups WHERE trained_step = ?", (step,))
            )
    results = _final(db, {*rest, *(group["group_id"] for group in page)})
    for group in page:
        group["rollouts"] = results.get(group["group_id"], [])
        values = _advantages(group, results, rest, objective)
        for rollout, value in zip(group["rollouts"], values, strict=True):
            rollout["advantage"] = value


def _final(db: sqlite3.Connection, group_ids: set[int]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    ids = sorted(group_ids)
    for start in range(0, len(ids), _NUM_IDS):
        some = ids[start : start + _NUM_IDS]
        sql = (
            "SELECT group_id, rollout_id, slot, outcome, reward FROM rollouts WHERE final = 1 AND group_id IN"
            f" ({', '.join('?' * len(some))}) ORDER BY slot"
        )
        for group_id, rollout_id, slot, outcome, reward in db.execute(sql, some):
            one = {"rollout_id": rollout_id, "slot": slot, "outcome": outcome, "reward": reward}
            found.setdefault(group_id, []).append(one)
    return found


def _advantages(
    group: Mapping[str, Any],
    results: Mapping[int, list[dict[str, Any]]],
    rest: Mapping[int, int],
    objective: ObjectiveConfig | None,
) -> list[float | None]:
    """Of the outcome, by the run's estimator over the rewards that are stored; None = not known (yet).

    Of a group that no step trained, an estimator over the whole step has nothing to say.
    """
    own = results.get(group["group_id"], [])
    unknown: list[float | None] = [None] * len(own)
    if objective is None or group["evaluation"] is not None or group["state"] == "running":
        return unknown
    together = [group["group_id"]]
    if objective.advantage in _GLOBAL:
        if group["trained_step"] is None:
            return unknown
        together = sorted(gid for gid, step in rest.items() if step == group["trained_step"])
    rewards = [[_reward(one, objective) for one in results.get(gid, [])] for gid in together]
    return step_advantages(rewards, objective.advantage)[together.index(group["group_id"])]


def _reward(rollout: Mapping[str, Any], objective: ObjectiveConfig) -> float | None:
    """As it is trained on: less the penalty for being cut by a limit."""
    reward = rollout["reward"]
    if not is_finite_number(reward):
        return None
    penalty = objective.truncation_penalty if rollout["outcome"] == Outcome.TRUNCATED else 0.0
    return float(reward) - penalty

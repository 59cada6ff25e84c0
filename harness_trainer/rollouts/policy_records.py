"""What the rollout policy remembers in the run's store: policy versions, tasks' records, evaluations, notes for people.

Owns those rows and no decision: `admission`, `curriculum` and `evaluation` decide. Part of `RolloutStore`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness_trainer.errors import TrainingFailed
from harness_trainer.rollouts.lineage import BASE, Lineage, PolicyVersion
from harness_trainer.rollouts.store_file import StoreFile, get_state, put_state, storable

# Keys of the run state: what the engine was given last, and whether it has it; where the learner is in the tree of
# versions (the newest that was announced, or the checkpoint's), and how many steps it has taken from there.
_POLICY, _ENGINE, _LEARNER, _AHEAD = "policy_version", "engine_has_policy", "learner_version", "steps_ahead"
_ANNOUNCED = "announced_version"  # the newest number that is used up
_ENGINE_NUMBER = "engine_number"  # how many engines of the run were given up so far
# Of a run with several replicas of the engine the two are kept of each; the first has the names without a number.


@dataclass(frozen=True, slots=True)
class Versions:
    """Example: Versions(engine=3, learner=3, ahead=1): the optimizer has taken a step, its weights are on their way."""

    engine: int  # what the engine samples with; 0 = nothing of this run yet
    learner: int  # the version that the learner's weights were last named by
    ahead: int = 0  # optimizer steps that these weights are further than `learner`: 0, or 1 until the next is named
    lineage: Lineage = field(default_factory=Lineage, compare=False, repr=False)

    def age(self, sampled: int) -> int:
        """Optimizer steps between the policy `sampled` and the one that the learner's next step starts from."""
        return self.lineage.distance(sampled, self.learner) + self.ahead

    @property
    def next_sampled(self) -> int:
        """The oldest policy that may sample a token from now on: an engine that has none gets the learner's again."""
        return self.engine or self.learner


@dataclass(frozen=True, slots=True)
class Note:
    """Something to tell a person. Example: Note(3, 1760000000.0, "quarantined", {"task": "a", "line": "..."})."""

    seq: int
    at: float  # seconds since the epoch
    kind: str
    detail: dict[str, Any]  # `line` is the sentence


class PolicyRecords(StoreFile):
    """See `RolloutStore`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lineage = Lineage()
        self._newest_read = BASE

    # -- versions ------------------------------------------------------------------------------------------------

    def policy_version(self) -> int:
        """The newest version that was ever published to an engine; 0 = none yet."""
        return int(self.state(_POLICY) or 0)

    def versions(self) -> Versions:
        keys = (_POLICY, _LEARNER, _AHEAD, f"{_ENGINE}*")
        sql = "SELECT key, value FROM run_state WHERE key IN (?, ?, ?) OR key GLOB ?"
        found = dict(self._read(sql, *keys))
        policy = int(found.get(_POLICY, 0))
        has = [value for key, value in found.items() if key.startswith(_ENGINE)]
        engine = 0 if has and set(has) == {"0"} else policy
        learner, ahead = int(found.get(_LEARNER, policy)), int(found.get(_AHEAD, 0))
        return Versions(engine, learner, ahead, self.lineage())

    def lineage(self) -> Lineage:
        """All versions of the run so far. One of schema 3 or older knows those from its continuation on."""
        # A row never changes, and is written before anybody can sample with the version: only new ones are read.
        rows = self._read("SELECT version, step, parent FROM policy_versions WHERE version > ?", self._newest_read)
        for row in rows:
            self._lineage.add(PolicyVersion(*row))
            self._newest_read = max(self._newest_read, row[0])
        return self._lineage

    def continue_from(self, version: int, step: int) -> None:
        """The learner has the weights of `version`, after `step` optimizer steps; 0 and 0 = those of the base model."""
        with self._write() as db:
            if version > BASE:  # a checkpoint of a run that kept no tree: nobody knows what it descends from
                db.execute("INSERT OR IGNORE INTO policy_versions VALUES (?, ?, NULL)", (version, step))
            put_state(db, _LEARNER, str(version))
            put_state(db, _AHEAD, "0")

    def announce(self, version: int) -> None:
        """The learner's weights are called `version` from here on, before an engine can sample with them.

        Naming the same weights again by the same number changes nothing. Raises TrainingFailed for other weights.
        """
        with self._write() as db:
            parent, ahead = int(get_state(db, _LEARNER) or BASE), int(get_state(db, _AHEAD) or 0)
            if version == parent and not ahead:
                return
            if version <= parent or _step_of(db, version) is not None:
                raise TrainingFailed(f"policy version v{version} is used up: other weights of this run had that name")
            from_step = _step_of(db, parent)
            step = _steps_taken(db) if from_step is None else from_step + ahead
            db.execute("INSERT INTO policy_versions VALUES (?, ?, ?)", (version, step, parent))
            put_state(db, _LEARNER, str(version))
            put_state(db, _AHEAD, "0")
            put_state(db, _ANNOUNCED, str(version))

    def used_up(self) -> int:
        """The highest version that any engine of this run may have reported; 0 = none."""
        return max(self.policy_version(), int(self.state(_ANNOUNCED) or 0))

    def publish(self, version: int, *, engine: int | Mapping[int, int] | None = None) -> None:
        """The engine samples with `version` from now on.

        `engine` is the number of the one that was sent it; where that has died meanwhile, the next one has nothing yet.
        None = there is only one. Of several replicas, by replica: those that were sent it, and no others have it.
        """
        sent = engine if isinstance(engine, Mapping) else {0: engine}
        with self._write() as db:
            put_state(db, _POLICY, str(version))
            for replica, number in sent.items():
                if number in (None, int(get_state(db, _of(_ENGINE_NUMBER, replica)) or 0)):
                    put_state(db, _of(_ENGINE, replica), "1")
            put_state(db, _LEARNER, str(version))
            put_state(db, _AHEAD, "0")

    def forget_engine(self, replica: int = 0) -> None:
        """A new engine is started: it has none of the run's policies until the learner publishes the next version."""
        number = _of(_ENGINE_NUMBER, replica)
        with self._write() as db:
            put_state(db, _of(_ENGINE, replica), "0")
            put_state(db, number, str(int(get_state(db, number) or 0) + 1))

    def forget_engines(self, num_replicas: int) -> None:
        """At the start of a run: it has so many replicas of the engine now, and none has a policy."""
        with self._write() as db:
            db.execute("DELETE FROM run_state WHERE key GLOB ?", (f"{_ENGINE}.*",))
        for replica in range(num_replicas):
            self.forget_engine(replica)

    def engine_number(self, replica: int = 0) -> int:
        """Which engine of the run is the present one, or the next if there is none: they are counted."""
        return int(self.state(_of(_ENGINE_NUMBER, replica)) or 0)

    def serving(self, num_replicas: int) -> set[int]:
        """The replicas of the engine that have one of the run's policies."""
        if not self.policy_version():
            return set()
        return {replica for replica in range(num_replicas) if self.state(_of(_ENGINE, replica)) == "1"}

    # -- tasks ---------------------------------------------------------------------------------------------------

    def setup_worked(self, task: str) -> None:
        """Some rollout of a group of the task got its sandbox: failures before it were no rule."""
        with self._write() as db:
            db.execute("DELETE FROM task_records WHERE task = ? AND quarantined_at IS NULL", (task,))

    def setup_failed(self, task: str, reason: str, quarantine_after: int) -> bool:
        """All tries of a group of the task failed at set-up. Returns whether the task is quarantined by this."""
        reason = storable(reason)
        with self._write() as db:
            row = db.execute(
                "SELECT setup_failures, quarantined_at FROM task_records WHERE task = ?", (task,)
            ).fetchone()
            failures, since = (1, None) if row is None else (row[0] + 1, row[1])
            now = since is None and failures >= quarantine_after
            if now:
                line = f"task {task} is quarantined: its last {failures} groups failed at set-up ({reason})"
                add_note(db, "quarantined", task=task, groups=failures, reason=reason, line=line)
                since = time.time()
            db.execute("INSERT OR REPLACE INTO task_records VALUES (?, ?, ?, ?)", (task, failures, reason, since))
        return now

    def quarantined(self) -> dict[str, str]:
        """Reason by task, first quarantined first."""
        sql = "SELECT task, reason FROM task_records WHERE quarantined_at IS NOT NULL ORDER BY quarantined_at"
        return dict(self._read(sql))

    def release_all(self) -> None:
        """Take every task out of quarantine, as if none of its groups had failed."""
        with self._write() as db:
            db.execute("DELETE FROM task_records")

    def pass_rates(self, pass_reward: float, window: int) -> dict[str, float]:
        """Share of scored rollouts with at least `pass_reward`, by task, over its last `window` finished groups.

        A task of which no rollout was scored is absent.
        """
        sql = (
            "WITH latest AS (SELECT group_id, task, ROW_NUMBER() OVER (PARTITION BY task ORDER BY group_id DESC) AS n"
            " FROM rollout_groups WHERE evaluation IS NULL AND state != 'running')"
            " SELECT task, AVG(reward >= ?) FROM latest JOIN rollouts USING (group_id)"
            " WHERE n <= ? AND final = 1 AND reward IS NOT NULL GROUP BY task"
        )
        return dict(self._read(sql, pass_reward, window))

    # -- evaluations ---------------------------------------------------------------------------------------------

    def steps_taken(self) -> int:
        return int(self._read(_STEPS_TAKEN)[0][0])

    def due_evaluation(self, every: int, last_step: int | None = None, *, may_be_away: bool = False) -> int | None:
        """The step after which the engine's policy is to be evaluated now, also one under way; None = nothing is due.

        Due are the policy of the start, of every `every` steps, and that of `last_step`, if given. `may_be_away`: also
        while no engine has it. Only the learner may say so: as long as it waits, the next engine gets the same policy.
        """
        versions, step = self.versions(), self.steps_taken()
        is_there = versions.engine == versions.learner if versions.engine else may_be_away
        if not is_there or versions.ahead or (step % every and step != last_step):
            return None
        done = self._read("SELECT 1 FROM evaluations WHERE step = ? AND finished_at IS NOT NULL", step)
        return None if done else step

    def start_evaluation(self, step: int, groups: Sequence[tuple[str, str]]) -> None:
        """`groups`: task and harness of each. Does nothing where it was started before."""
        now = time.time()
        with self._write() as db:
            version = int(get_state(db, _POLICY) or 0)
            made = db.execute("INSERT OR IGNORE INTO evaluations VALUES (?, ?, ?, NULL, NULL)", (step, version, now))
            if not made.rowcount:
                return
            _add_evaluated(db, groups, version, step)

    def replace_evaluated(self, group_id: int, reason: str, harness: str | None) -> None:
        """Drop a group that is not over; one of the same task with this agent stands in for it (None = none does)."""
        with self._write() as db:
            sql = (
                "SELECT task, start_version, evaluation FROM rollout_groups WHERE group_id = ? AND state = 'evaluating'"
            )
            if (old := db.execute(sql, (group_id,)).fetchone()) is None:  # the learner has gone back
                return
            db.execute("UPDATE rollout_groups SET state = 'dropped', reason = ? WHERE group_id = ?", (reason, group_id))
            if harness is not None:
                task, version, step = old
                _add_evaluated(db, [(task, harness)], version, step)

    def evaluation_groups(self, step: int) -> list[tuple[int, str, str, bool]]:
        """(group id, task, harness, whether it is over) of every group of the evaluation, in the order of its tasks."""
        rows = self._read(
            "SELECT group_id, task, harness, state = 'evaluated' FROM rollout_groups"
            " WHERE evaluation = ? AND state IN ('evaluating', 'evaluated') ORDER BY group_id DESC",
            step,
        )
        return [(gid, task, harness, bool(over)) for gid, task, harness, over in rows]

    def group_evaluated(self, group_id: int) -> None:
        """All its rollouts are over. Does nothing where the learner has gone back: the group stays dropped."""
        with self._write() as db:
            db.execute(
                "UPDATE rollout_groups SET state = 'evaluated', ready_at = ?"
                " WHERE group_id = ? AND state = 'evaluating'",
                (time.time(), group_id),
            )

    def finish_evaluation(self, step: int, report: dict[str, Any], line: str) -> None:
        """`report` gets the policy's version; `line` is for people. Does nothing where the learner has gone back."""
        with self._write() as db:
            row = db.execute("SELECT policy_version FROM evaluations WHERE step = ?", (step,)).fetchone()
            if row is None:  # a restarted learner takes that step again (`forget_evaluations`)
                return
            whole = {"step": step, "policy_version": row[0], **report}
            db.execute(
                "UPDATE evaluations SET finished_at = ?, report = ? WHERE step = ?",
                (time.time(), json.dumps(whole), step),
            )
            add_note(db, "evaluation", **whole, line=line)

    def evaluations(self) -> list[dict[str, Any]]:
        """The reports of all finished ones, by step."""
        rows = self._read("SELECT report FROM evaluations WHERE finished_at IS NOT NULL ORDER BY step")
        return [json.loads(report) for (report,) in rows]

    # -- notes ---------------------------------------------------------------------------------------------------

    def tell(self, kind: str, line: str, **detail: Any) -> None:
        """Have a person told; the supervisor shows `line` once."""
        with self._write() as db:
            add_note(db, kind, **detail, line=line)

    def notes(self, after: int) -> list[Note]:
        """Those with a higher `seq`, oldest first."""
        rows = self._read("SELECT seq, at, kind, detail FROM run_notes WHERE seq > ? ORDER BY seq", after)
        return [Note(seq, at, kind, json.loads(detail)) for seq, at, kind, detail in rows]


def engine_at(db: sqlite3.Connection) -> int | None:
    """The number of the run's present engine, if it has one of the run's policies; None = nothing may be sampled."""
    sql = "SELECT key, value FROM run_state WHERE key IN (?, ?, ?)"
    found = dict(db.execute(sql, (_POLICY, _ENGINE, _ENGINE_NUMBER)).fetchall())
    has_policy = found.get(_ENGINE) != "0" and int(found.get(_POLICY, 0)) > 0
    return int(found.get(_ENGINE_NUMBER, 0)) if has_policy else None


def _of(key: str, replica: int) -> str:
    return f"{key}.{replica}" if replica else key


def step_taken(db: sqlite3.Connection) -> None:
    """Inside a transaction: the learner's weights are a step further than their last name says."""
    put_state(db, _AHEAD, "1")


_STEPS_TAKEN = "SELECT COALESCE(MAX(trained_step), 0) FROM rollout_groups WHERE state = 'trained'"


def _step_of(db: sqlite3.Connection, version: int) -> int | None:
    """None = the version is not in the tree."""
    if version == BASE:
        return 0
    found = db.execute("SELECT step FROM policy_versions WHERE version = ?", (version,)).fetchone()
    return None if found is None else int(found[0])


def _steps_taken(db: sqlite3.Connection) -> int:
    return int(db.execute(_STEPS_TAKEN).fetchone()[0])


def _add_evaluated(db: sqlite3.Connection, groups: Sequence[tuple[str, str]], version: int, step: int) -> None:
    lowest = db.execute("SELECT MIN(0, COALESCE(MIN(group_id), 0)) FROM rollout_groups").fetchone()[0]
    db.executemany(
        "INSERT INTO rollout_groups (group_id, task, harness, state, start_version, created_at, evaluation)"
        " VALUES (?, ?, ?, 'evaluating', ?, ?, ?)",
        [(lowest - 1 - n, task, agent, version, time.time(), step) for n, (task, agent) in enumerate(groups)],
    )


def forget_evaluations(db: sqlite3.Connection, after_step: int) -> None:
    """Inside a transaction: the steps after this one are taken again, and lead to other policies."""
    db.execute("DELETE FROM evaluations WHERE step > ?", (after_step,))
    db.execute(
        "UPDATE rollout_groups SET state = 'dropped', reason = 'its step is taken again' WHERE evaluation > ?",
        (after_step,),
    )


def add_note(db: sqlite3.Connection, kind: str, **detail: Any) -> None:
    """Inside a transaction."""
    told = json.dumps(storable(detail))  # whoever shows it may not be able to write half a surrogate pair
    db.execute("INSERT INTO run_notes (at, kind, detail) VALUES (?, ?, ?)", (time.time(), kind, told))

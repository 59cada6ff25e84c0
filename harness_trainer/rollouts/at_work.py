"""What the store knows of attempts that are not over: which agent works where, since when, and what it has left.

Owns the rows of `agents_at_work` and their data types, and no decision: `journal` writes them, `takeover` reads them.
Part of `RolloutStore`. Holds no secret: a session's token is of use to its agent alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from harness_trainer.rollouts.store_file import StoreFile


@dataclass(frozen=True, slots=True)
class Facts:
    """Example: Facts(1.76e9, 600.0, 1290.5, 3, True, {"queue": 0.0, "create": 1.2, "setup": 0.3})."""

    started_at: float  # Unix seconds at which the agent's command was about to be started
    limit_s: float  # the agent's time from then on
    left_s: float  # of the whole rollout's deadline, then
    version: int  # the policy that the engine sampled with when the rollout had its sandbox
    warm: bool | None  # as in RolloutResult
    stages_s: dict[str, float]  # that were over by then
    replica: int = 0  # of the engine, whose gateway the rollout is pinned to


@dataclass(frozen=True, slots=True)
class AtWork:
    """Where an attempt's agent is. `job_id` None = its command was about to be started, and may run or not."""

    sandbox_type: str  # "local", "docker", ...
    sandbox_id: str
    job_id: str | None
    tested: bool  # tests were brought into this very sandbox
    facts: Facts


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An attempt that is not over by the store. `at_work` None = it had no agent yet."""

    rollout_id: str
    group_id: int
    slot: int
    attempt: int
    task: str
    harness: str
    group_runs: bool  # its group is still of use to the run
    at_work: AtWork | None


class AgentsAtWork(StoreFile):
    """See `RolloutStore`."""

    def note_agent(self, rollout_id: str, sandbox_type: str, sandbox_id: str, facts: Facts) -> None:
        """Before the agent's command is started."""
        with self._write() as db:
            db.execute(
                "INSERT OR REPLACE INTO agents_at_work (rollout_id, sandbox_type, sandbox_id, facts)"
                " VALUES (?, ?, ?, ?)",
                (rollout_id, sandbox_type, sandbox_id, json.dumps(asdict(facts))),
            )

    def note_job(self, rollout_id: str, job_id: str) -> None:
        with self._write() as db:
            db.execute("UPDATE agents_at_work SET job_id = ? WHERE rollout_id = ?", (job_id, rollout_id))

    def note_tests(self, rollout_id: str) -> None:
        """Before tests are brought into the agent's own sandbox."""
        with self._write() as db:
            db.execute("UPDATE agents_at_work SET tested = 1 WHERE rollout_id = ?", (rollout_id,))

    def unfinished_rollouts(self) -> list[Unfinished]:
        """In the order in which they were started."""
        rows = self._read(
            "SELECT rollout_id, group_id, slot, attempt, task, harness, state IN ('running', 'evaluating'),"
            " sandbox_type, sandbox_id, job_id, tested, facts"
            " FROM rollouts JOIN rollout_groups USING (group_id) LEFT JOIN agents_at_work USING (rollout_id)"
            " WHERE finished_at IS NULL ORDER BY started_at"
        )
        return [
            Unfinished(rollout_id, group_id, slot, attempt, task, harness, bool(runs), _at_work(*where))
            for rollout_id, group_id, slot, attempt, task, harness, runs, *where in rows
        ]


def _at_work(sandbox_type: str | None, sandbox_id: str, job_id: str | None, tested: int, facts: str) -> AtWork | None:
    if sandbox_type is None:
        return None
    return AtWork(sandbox_type, sandbox_id, job_id, bool(tested), Facts(**json.loads(facts)))

"""Writes down, before it is needed, what another runner needs to go on with a rollout should this one be killed.

Owns the order: the row first, then the sandbox's record (from here on no reaper takes it), then the agent's command,
then its job. Killed before the last, nobody can say whether the agent runs, and the attempt is started over. What a row
holds is `at_work`'s; `takeover` is the reader. Called by `agent_stage` and `agents`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from harness_trainer.rollouts.at_work import Facts
from harness_trainer.rollouts.boxes import DEADLINE_SLACK_S
from harness_trainer.rollouts.budget import Budget
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job
from sandboxes.base import Sandbox
from sandboxes.ownership import Keeper


@dataclass(frozen=True, slots=True)
class Journal:
    """Of a whole runner. `keeper` = who starts this runner again; None = nobody does, and sandboxes end with it."""

    store: RolloutStore
    sandbox_type: str
    keeper: Keeper | None
    replica: int = 0  # of the engine, whose gateway these rollouts are pinned to


@dataclass(frozen=True, slots=True)
class Entry:
    """Of one rollout, whose agent is about to start in `sandbox`. `version`, `warm`: as in `at_work.Facts`."""

    journal: Journal
    job: Job
    sandbox: Sandbox
    budget: Budget
    version: int
    warm: bool | None

    async def starting(self, limit_s: float) -> None:
        """The agent has `limit_s` from now on. Raises SandboxError, and RunDirError when the store is not writable."""
        now, left_s = time.time(), self.budget.left_s
        stages_s = {"queue": self.job.queued_s, **self.budget.stages_s}
        facts = Facts(now, limit_s, left_s, self.version, self.warm, stages_s, self.journal.replica)
        journal, sandbox = self.journal, self.sandbox
        await asyncio.to_thread(
            journal.store.note_agent, self.job.rollout_id, journal.sandbox_type, sandbox.sandbox_id, facts
        )
        if journal.keeper is not None:
            await sandbox.keep(journal.keeper, now + left_s + DEADLINE_SLACK_S)

    async def started(self, job_id: str) -> None:
        await asyncio.to_thread(self.journal.store.note_job, self.job.rollout_id, job_id)

"""What a runner does first: it goes on with the agents that a killed one left, and closes what cannot be gone on with.

Owns that decision. An attempt goes on when its agent was started, nobody's tests were in its sandbox yet, and the
sandbox can be attached; from there `agent_stage` waits for what is left of the agent's own time, and all that comes
after is done as ever, from its start. Any other attempt is closed, its session sealed and its sandbox ended, and its
slot is filled by a fresh one: cancelled, or (where tests were at work beside what the agent had left, with rights that
it may have got hold of) an infra failure. What is read was written by `journal`; the sandboxes lived on because their
records said so (`sandboxes.ownership.Claim.keep`). Made by `__main__`, called by `runner`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from capture_proxy.admin_client import AdminClient
from harness_trainer.rollouts.at_work import AtWork, Unfinished
from harness_trainer.rollouts.journal import Journal
from harness_trainer.rollouts.sealing import seal
from harness_trainer.rollouts.sources import source_in
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult, Taken
from harness_trainer.tasks import Task
from sandboxes.base import Backend, Sandbox, SandboxError
from sandboxes.lifecycle import reap

log = logging.getLogger("harness_trainer.rollouts")

ATTACH_S = 60.0  # for one sandbox
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Takeover:
    """`tasks`: by name, those trained on and those only evaluated on; `harnesses`: by source and name;
    `sources`: the run's, by name.

    `backend` and `admin` are of the engine's only replica, or the first; `others` of the further ones, in order. An
    attempt goes on with the replica that it is pinned to.
    """

    journal: Journal
    backend: Backend
    registry: Path
    admin: AdminClient
    tasks: Mapping[str, Task]
    evaluation_tasks: Mapping[str, Task]
    harnesses: Collection[tuple[str, str]]
    sources: Sequence[str] = ()
    others: Sequence[tuple[Backend, AdminClient]] = ()
    attach_s: float = ATTACH_S

    async def __call__(self) -> Sequence[Job]:
        """The attempts that go on, as jobs whose sandboxes are ours. Everything else of dead runners is ended."""
        unfinished = await asyncio.to_thread(self.journal.store.unfinished_rollouts)
        try:
            return await self._divide(unfinished)
        except asyncio.CancelledError:  # the run is stopped: the backend ends the sandboxes that it has by now
            await self._close(unfinished, ())
            raise

    async def _divide(self, unfinished: Sequence[Unfinished]) -> Sequence[Job]:
        store = self.journal.store
        gate = asyncio.Semaphore(_AT_ONCE)
        found = await asyncio.gather(*(self._try(each, gate) for each in unfinished))
        jobs = [job for job in found if isinstance(job, Job)]
        taken = {job.rollout_id for job in jobs}
        for each in unfinished:
            if each.rollout_id not in taken and each.at_work is not None and each.at_work.tested:
                result = _spoiled(each, each.at_work)
                result.source = source_in(each.task, self.sources)
                await asyncio.to_thread(store.finish_rollout, result, final=False)
        await self._close(unfinished, taken)
        for left in await asyncio.to_thread(lambda: reap(self.registry, given_up=self.journal.keeper)):
            log.info("ended what a dead runner left: %s", left)
        if unfinished:
            log.info(
                "%d rollouts were under way when the last runner ended: %d of them go on", len(unfinished), len(jobs)
            )
        return jobs

    async def _close(self, unfinished: Sequence[Unfinished], taken: Collection[str]) -> None:
        await asyncio.to_thread(self.journal.store.close_lost, taken)
        lost = [each.rollout_id for each in unfinished if each.rollout_id not in taken]
        # Whose session it is the gateways know: only that one has one of this name.
        admins = [self.admin, *(admin for _, admin in self.others)]
        await asyncio.gather(*(seal(admin, rollout_id) for rollout_id in lost for admin in admins))

    async def _try(self, each: Unfinished, gate: asyncio.Semaphore) -> Job | None:
        task = (self.evaluation_tasks if each.group_id < 0 else self.tasks).get(each.task)
        at_work = each.at_work
        if task is None:
            why = "no agent of this run's works on its task"  # a white-box source's, say: `__main__` seals those
        elif (source_in(each.task, self.sources), each.harness) not in self.harnesses or not each.group_runs:
            why = "it is of no use any more"
        elif at_work is None or at_work.job_id is None:
            why = "its agent had not been started, as far as is known"
        elif at_work.tested:
            why = "tests were at work in its agent's sandbox"
        elif at_work.sandbox_type != self.journal.sandbox_type:
            why = f"its sandbox is a {at_work.sandbox_type} one"
        elif at_work.facts.replica > len(self.others):
            why = "the replica of the engine that it was pinned to is gone"
        else:
            try:
                async with gate:
                    sandbox, running = await self._attached(at_work, at_work.job_id)
            except (SandboxError, KeyError, TimeoutError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
            else:
                log.info("rollout %s goes on in %s", each.rollout_id, at_work.sandbox_id)
                taken = Taken(each.slot, sandbox, at_work.job_id, running, at_work.facts)
                return Job(
                    each.rollout_id,
                    each.group_id,
                    each.attempt,
                    task,
                    has_box=lambda: at_work.facts.version,
                    harness=each.harness,
                    taken=taken,
                )
        log.info("rollout %s is given up with the runner that ran it: %s", each.rollout_id, why)
        return None

    async def _attached(self, at_work: AtWork, job_id: str) -> tuple[Sandbox, bool]:
        """The sandbox, and whether the job runs. Raises SandboxError, TimeoutError, KeyError when it does not know it.

        Nothing of it is left then.
        """
        backends = [self.backend, *(backend for backend, _ in self.others)]
        async with asyncio.timeout(self.attach_s):
            sandbox = await backends[at_work.facts.replica].attach(at_work.sandbox_id)
            try:
                return sandbox, (await sandbox.job(job_id)).running
            except BaseException:
                await asyncio.shield(sandbox.stop())
                raise


def _spoiled(each: Unfinished, at_work: AtWork) -> RolloutResult:
    result = RolloutResult(
        each.rollout_id, each.group_id, each.task, each.harness, each.attempt, Outcome.INFRA_FAILED, None
    )
    result.stages_s, result.warm = dict(at_work.facts.stages_s), at_work.facts.warm
    result.failed_stage = "verify"
    result.detail = (
        "the runner was killed while tests ran in the agent's own sandbox: what the agent left may have had their "
        "rights since, so they cannot be run again there"
    )
    return result

"""Runs the rollouts of groups: a place for each at a time, retries of what the machinery spoiled, fresh samples after.

Owns the cap on rollouts at work and the order of tries; those that a killed runner left (`takeover`) have their places
first, and their groups get what they come to. What a group then comes to is `runner`'s (groups to train on)
and `evaluation`'s business.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.failures import Backoff, Breaker, ScoringBreaker
from harness_trainer.rollouts.group import Group
from harness_trainer.rollouts.needs import Needs
from harness_trainer.rollouts.scoring import weigh
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import NODE, Job, Outcome, RolloutResult

if TYPE_CHECKING:
    from harness_trainer.rollouts.sources import Sources

log = logging.getLogger("harness_trainer.rollouts")

Attempt: TypeAlias = Callable[[Job], Awaitable[RolloutResult]]  # runs one rollout; raises nothing but cancellation
Sleep: TypeAlias = Callable[[float], Awaitable[object]]
# Machines lost under one slot that cost it no try: it may itself be what takes each of them along.
FREE_LOSSES = 3
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class _Resumed:
    job: Job
    going_on: asyncio.Task[RolloutResult]


class Slots:
    """`engine_version` tells which policy the engine samples with now."""

    def __init__(
        self,
        config: RolloutConfig,
        store: RolloutStore,
        sources: Sources,
        needs: Needs,
        *,
        engine_version: Callable[[], int],
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._store = store
        self._sources = sources
        self._needs = needs
        self._engine_version = engine_version
        self._sleep = sleep
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._backoff = Backoff(config.retry_backoff_s, config.retry_backoff_max_s)
        self._breakers = {name: Breaker(config.infra_window, config.infra_share, name) for name in sources.names}
        self._scoring = {name: ScoringBreaker(config.infra_window, name, clock) for name in sources.names}
        self._may_begin = {name: asyncio.Event() for name in sources.names}  # unset: its reward function has a rest
        for may_begin in self._may_begin.values():
            may_begin.set()
        self._resumed: dict[tuple[int, int], _Resumed] = {}  # by group and slot
        self._told_unscored: set[str] = set()  # sources of which a person knows that a reward function failed

    def resume(self, jobs: asyncio.TaskGroup, taken: Sequence[Job]) -> None:
        """Go on with them, first of all. One whose group never asks for it ends as cancelled (`_end_unclaimed`)."""
        for job in taken:
            assert job.taken is not None
            going_on = jobs.create_task(self._go_on(job), name=f"go on with {job.rollout_id}")
            self._resumed[job.group_id, job.taken.slot] = _Resumed(job, going_on)
        if taken:
            jobs.create_task(self._end_unclaimed())

    async def _go_on(self, job: Job) -> RolloutResult:
        async with self._places:
            return await self._sources.attempt(job)

    async def _end_unclaimed(self) -> None:
        """End those whose group will not ask for them: a learner that goes back drops an evaluation's groups, say.

        Whatever still waits for its group when the runner ends gets its end here too.
        """
        try:
            while self._resumed:
                for each in await asyncio.to_thread(self._store.unfinished_rollouts):
                    key = each.group_id, each.slot
                    if not each.group_runs and key in self._resumed:
                        await self._end(self._resumed[key], "its group is of no use any more")
                        self._resumed.pop(key, None)  # only now: if this is cut short, the end comes below
                await asyncio.sleep(POLL_S)
        finally:
            # Not that of one whose end was being written just now.
            without_end = {each.rollout_id for each in await asyncio.to_thread(self._store.unfinished_rollouts)}
            while self._resumed:
                _, left = self._resumed.popitem()
                if left.job.rollout_id in without_end:
                    await self._end(left, "the run was stopped")

    async def _end(self, resumed: _Resumed, why: str) -> None:
        """Cancel one if it still runs, and write down its end, which it does not do itself."""
        if not resumed.going_on.cancelling():  # a second word would cut short how it ends
            resumed.going_on.cancel()
        await asyncio.wait([resumed.going_on])
        await self._record_cancelled(resumed.job, why)

    @property
    def all_taken(self) -> bool:
        return self._places.locked()

    async def fill(self, group: Group) -> None:
        """Run what the group lacks, refills included. Raises TrainingFailed as `Breaker` does."""
        try:
            slots = group.missing() or group.refills(self._config)
            while slots:
                self._needs.change(group, sum((group.group_id, slot) not in self._resumed for slot in slots))
                async with asyncio.TaskGroup() as running:
                    for slot in slots:
                        running.create_task(self._fill_slot(group, slot))
                slots = group.refills(self._config)
                if slots:
                    log.info("group %d: %d fresh samples for rollouts without a score", group.group_id, len(slots))
            await self._score_together(group)
        finally:
            self._needs.forget(group)
            await self._give_up_waiting(group)

    async def _fill_slot(self, group: Group, slot: int) -> None:
        config = self._config
        resumed = self._resumed.pop((group.group_id, slot), None)
        first = 0 if resumed is None else resumed.job.attempt
        num_lost = 0  # tries that say nothing of the task: their machine was lost
        for attempt in itertools.count(first):
            hopeless = False
            if resumed is not None:
                result, resumed = await self._result_of(group, resumed), None
            else:
                queued_at = time.monotonic()
                async with self._place(self._sources.name_of(group.task.name)):
                    queued_s = time.monotonic() - queued_at
                    hopeless = group.is_hopeless(config.setup_tries)
                    result = await self._run_attempt(group, slot, attempt, queued_s, hopeless=hopeless)
                result.stages_s = {"queue": queued_s, **result.stages_s}
            result.source = self._sources.name_of(group.task.name)
            weigh(result, self._sources.config_of(group.task.name).reward_weights)
            group.note(result)
            if result.awaits_group:
                group.wait(slot, result)
                self._breakers[result.source].note(result)
                return
            num_lost += result.failed_stage == NODE and num_lost < FREE_LOSSES
            last = attempt - num_lost >= config.infra_retries or group.is_hopeless(config.setup_tries)
            final = result.outcome is not Outcome.INFRA_FAILED or last
            await asyncio.to_thread(self._store.finish_rollout, result, final=final)
            if final:
                group.finish(slot, result)
            await self._report(result)
            if not hopeless:
                self._breakers[result.source].note(result)
            if result.outcome is not Outcome.INFRA_FAILED:
                await self._note_scoring([result])
            if final or group.is_stale:  # what was cancelled may still have come to a result
                return
            self._needs.change(group, 1)
            await self._sleep(self._backoff.wait_s(max(0, attempt - num_lost)))

    @asynccontextmanager
    async def _place(self, source: str) -> AsyncIterator[None]:
        """One of the places, once the source's reward function has had its rest. Who waits for that holds none."""
        may_begin = self._may_begin[source]
        while True:
            await may_begin.wait()
            async with self._places:
                if may_begin.is_set():
                    yield
                    return

    async def _note_scoring(self, scored: Sequence[RolloutResult]) -> None:
        """What one call of a reward function came to. After failures nothing of its source begins for a while.

        Those at work go on; what they fail with meanwhile makes the rest no longer.
        """
        source = scored[0].source
        calls, may_begin = self._scoring[source], self._may_begin[source]
        if not calls.note(scored) or not may_begin.is_set():
            return
        may_begin.clear()
        calls.num_rests += 1
        try:
            await self._sleep(self._backoff.wait_s(calls.num_rests - 1))
        finally:
            may_begin.set()

    async def _score_together(self, group: Group) -> None:
        """The rollouts whose rewards compare them. Stored as one: siblings of a runner that is killed are run again."""
        if not group.waiting:
            return
        scores = self._sources.group_scores_of(group.task.name)
        waiting = sorted(group.waiting.items())
        await scores.score([result for _, result in waiting])
        for _, result in waiting:
            weigh(result, self._sources.config_of(group.task.name).reward_weights)
        group.waiting.clear()  # a cancellation from here on cannot take back, of some of them, what the store is told
        await asyncio.shield(asyncio.to_thread(self._store.finish_together, [result for _, result in waiting]))
        for slot, result in waiting:
            group.finish(slot, result)
            await self._report(result)
        await self._note_scoring([result for _, result in waiting])

    async def _give_up_waiting(self, group: Group) -> None:
        """Of a group that ended before its rollouts were scored."""
        if not group.waiting:
            return
        scores = self._sources.group_scores_of(group.task.name)
        waiting = list(group.waiting.values())
        group.waiting.clear()
        await scores.drop(waiting)
        for result in waiting:
            job = Job(result.rollout_id, result.group_id, result.attempt, group.task, harness=result.harness)
            await self._record_cancelled(job, _why_cancelled(group))

    async def _result_of(self, group: Group, resumed: _Resumed) -> RolloutResult:
        job = resumed.job
        assert job.taken is not None
        group.sampling_since[job.rollout_id] = job.taken.facts.version
        try:
            return await asyncio.shield(resumed.going_on)
        except asyncio.CancelledError:
            await self._end(resumed, _why_cancelled(group))
            raise
        finally:
            group.sampling_since.pop(job.rollout_id, None)

    async def _run_attempt(
        self, group: Group, slot: int, attempt: int, queued_s: float, *, hopeless: bool
    ) -> RolloutResult:
        # The id is new for every attempt, also after a restart: a session is single-use.
        prefix = f"g{group.group_id:05d}" if group.group_id >= 0 else f"e{-group.group_id:05d}"
        rollout_id = f"{prefix}-{slot}-{uuid.uuid4().hex[:8]}"
        waits_for_box = True

        def has_box() -> int:
            nonlocal waits_for_box
            if waits_for_box:
                waits_for_box = False
                group.sampling_since[rollout_id] = self._engine_version()
                self._needs.change(group, -1)
            return group.sampling_since[rollout_id]

        job = Job(rollout_id, group.group_id, attempt, group.task, has_box, group.harness, queued_s)
        try:
            await asyncio.to_thread(self._store.start_rollout, rollout_id, group.group_id, slot, attempt)
            return group.given_up(job) if hopeless else await self._sources.attempt(job)
        except asyncio.CancelledError:
            await self._record_cancelled(job, _why_cancelled(group))
            raise
        finally:
            has_box()  # or needs none any more
            group.sampling_since.pop(rollout_id, None)

    async def _record_cancelled(self, job: Job, why: str) -> None:
        result = RolloutResult(
            job.rollout_id, job.group_id, job.task.name, job.harness, job.attempt, Outcome.CANCELLED, None
        )
        result.source = self._sources.name_of(job.task.name)
        result.detail = f"cancelled: {why}"
        await asyncio.to_thread(self._store.finish_rollout, result, final=False)

    async def _report(self, result: RolloutResult) -> None:
        log.info(
            "rollout %s (%s): %s, reward %s, %d turns, %s%s",
            result.rollout_id,
            result.task,
            result.outcome,
            "none" if result.reward is None else f"{result.reward:.3f}",
            result.num_turns,
            " ".join(f"{stage} {seconds:.1f}s" for stage, seconds in result.stages_s.items()),
            f" -- {result.detail}" if result.detail else "",
        )
        if (failure := result.scoring_failure) and result.source not in self._told_unscored:
            self._told_unscored.add(result.source)
            line = f"WARNING: no reward for rollout {result.rollout_id} of task {result.task}: {failure}"
            log.warning("%s", line)
            await asyncio.to_thread(
                self._store.tell,
                "reward_failed",
                f"{line}. Such a rollout is replaced by a fresh sample (rollouts.max_refills); this is said once",
                rollout=result.rollout_id,
                reason=failure,
            )


def _why_cancelled(group: Group) -> str:
    return "its group had become too old for any step" if group.is_stale else "the run was stopped"

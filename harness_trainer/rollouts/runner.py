"""Keeps agents running: opens groups as the learner will want them, judges them when they are over, ends stale ones.

Owns scheduling. It is a process of its own (`python -m harness_trainer.rollouts`), so that a learner that is killed or
busy never stops an agent, and the reverse; both meet in the store only. `slots` runs the rollouts of a group, `group`
holds the rule by which one is trained, `admission` the arithmetic of staleness, `sources` says what each group is of,
`evaluation` runs the tasks that are never trained on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from harness_trainer.errors import TaskError, TrainingFailed
from harness_trainer.rollouts.admission import is_too_old, may_open, num_left, num_open
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.evaluation import Evaluator, tell_agent_gone
from harness_trainer.rollouts.group import Group, Unfit
from harness_trainer.rollouts.needs import Needs
from harness_trainer.rollouts.policy_config import Schedule
from harness_trainer.rollouts.policy_records import Versions
from harness_trainer.rollouts.slots import Sleep, Slots
from harness_trainer.rollouts.sources import Sources
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job
from harness_trainer.tasks import Task

log = logging.getLogger("harness_trainer.rollouts")

TakeOver: TypeAlias = Callable[[], Awaitable[Sequence[Job]]]
POLL_S = 0.25


class Runner:
    """Runs groups until it is cancelled.

    Raises TrainingFailed when it makes no sense to go on: most rollouts are infra failures, every task is quarantined,
    or too many groups in a row had to be dropped. `num_evaluated`: groups of an evaluation, as in `RunnerSpec`;
    `take_over` says which agents of a killed runner go on, and closes its other attempts (None = all are closed).
    """

    def __init__(
        self,
        config: RolloutConfig,
        sources: Sources,
        store: RolloutStore,
        *,
        schedule: Schedule,
        num_evaluated: int | None = None,
        take_over: TakeOver | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._config = config
        self._sources = sources
        self._store = store
        self._schedule = schedule
        self._draws = sources.draws(store)
        self._needs = Needs(sources.plan)
        self._take_over = take_over or self._close_lost
        self._versions = Versions(0, 0)
        self._slots = Slots(
            config, store, sources, self._needs, engine_version=lambda: self._versions.next_sampled, sleep=sleep
        )
        self._evaluator: Evaluator | None = None
        if evaluated := sources.evaluated(num_evaluated):
            last_step = schedule.num_groups // schedule.groups_per_step
            self._evaluator = Evaluator(config, sources, store, self._slots, evaluated, last_step=last_step)
        self._running: dict[Group, asyncio.Task[None]] = {}
        # By source: one whose groups are all dropped must not hide behind others.
        self._dropped_in_a_row: dict[str, Counter[str]] = {name: Counter() for name in sources.names}

    async def run(self) -> None:
        taken = await self._take_over()
        if self._config.forget_quarantine:
            await asyncio.to_thread(self._store.release_all)
        async with asyncio.TaskGroup() as jobs:
            self._slots.resume(jobs, taken)
            await self._until_engine_is_ours()
            for group_id, task_name, _ in await asyncio.to_thread(self._store.unfinished_groups):
                if (group := await self._continued(group_id, task_name)) is not None:
                    self._start(jobs, group)
            jobs.create_task(self._cancel_stale())
            if self._evaluator is not None:
                jobs.create_task(self._evaluator.run())
            while True:
                await self._until_wanted()
                group_id = await asyncio.to_thread(self._store.next_group_id)
                task, harness = await self._drawn(group_id)
                await asyncio.to_thread(self._store.open_group, group_id, task.name, harness)
                self._needs.expect(None)
                self._start(jobs, Group(group_id, task, harness, self._config.group_size))

    async def _close_lost(self) -> Sequence[Job]:
        if lost := await asyncio.to_thread(self._store.close_lost):
            log.info("%d rollouts were under way when the last runner ended", lost)
        return ()

    async def _until_engine_is_ours(self) -> None:
        """Until the learner has published: before that even a continued run's engine has the weights of no policy."""
        while (versions := await asyncio.to_thread(self._store.versions)).engine == 0:
            await asyncio.sleep(POLL_S)
        self._versions = versions

    def _start(self, jobs: asyncio.TaskGroup, group: Group) -> None:
        self._running[group] = jobs.create_task(self._run_group(group))

    async def _continued(self, group_id: int, task_name: str) -> Group | None:
        """None = it is dropped, for its agent is none of the run's any more."""
        if task_name not in self._sources.tasks:
            raise TaskError(
                f"the run has an unfinished group of task {task_name!r}, which is gone from the tasks: put it back"
            )
        harness = await asyncio.to_thread(self._store.harness_of, group_id)  # whatever the shares are now
        if self._sources.lacks_agent(task_name, harness):
            await asyncio.to_thread(self._store.mark_dropped, group_id, Unfit.AGENT_GONE)
            await tell_agent_gone(self._store, group_id, task_name, harness)
            return None
        results = await asyncio.to_thread(self._store.results_by_slot, group_id)
        log.info("group %d (%s) continues: %d of its rollouts are finished", group_id, task_name, len(results))
        group = Group(group_id, self._sources.tasks[task_name], harness, self._config.group_size)
        for slot, result in results.items():
            group.note(result)
            group.finish(slot, result)
        return group

    async def _drawn(self, group_id: int) -> tuple[Task, str]:
        return await asyncio.to_thread(self._draws.draw, group_id)

    async def _until_wanted(self) -> None:
        """Wait until the learner could use another group (`admission`), and there is a free place for it."""
        while True:
            self._versions = await asyncio.to_thread(self._store.versions)
            counts = await asyncio.to_thread(self._store.group_counts)
            wanted = may_open(self._schedule, self._versions, counts) and not self._slots.all_taken
            if wanted and (self._evaluator is None or await self._evaluator.due() is None):
                return
            if not self._needs.has_next and num_open(counts) < num_left(self._schedule, counts):
                task, harness = await self._drawn(await asyncio.to_thread(self._store.next_group_id))
                self._needs.expect((task, harness, self._config.group_size))
            await asyncio.sleep(POLL_S)

    async def _cancel_stale(self) -> None:
        """End running groups that every later step would find too old: their places are for fresh ones."""
        while True:
            self._versions = versions = await asyncio.to_thread(self._store.versions)
            for group, running in self._running.items():
                if not group.is_stale and is_too_old(self._schedule, versions, group.sampled_by()):
                    group.is_stale = True
                    log.info(
                        "group %d (%s) is cancelled: sampled by v%s, %d optimizer steps from the next one",
                        group.group_id,
                        group.task.name,
                        ", v".join(map(str, sorted(group.sampled_by()))),
                        max(map(versions.age, group.sampled_by())),
                    )
                    running.cancel()
            await asyncio.sleep(POLL_S)

    async def _run_group(self, group: Group) -> None:
        try:
            await self._slots.fill(group)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            assert current is not None
            if not group.is_stale or current.uncancel() > 0:  # the whole run is being stopped
                raise
        finally:
            self._running.pop(group, None)
        await self._judge(group)

    async def _judge(self, group: Group) -> None:
        unfit = Unfit.STALE if group.is_stale else group.unfit(self._config)
        source = self._sources.name_of(group.task.name)
        dropped = self._dropped_in_a_row[source]
        if group.got_sandbox:
            await asyncio.to_thread(self._store.setup_worked, group.task.name)
        if unfit is None:
            await asyncio.to_thread(self._store.group_ready, group.group_id)
            dropped.clear()
            log.info("group %d (%s) is ready", group.group_id, group.task.name)
            return
        await asyncio.to_thread(self._store.mark_dropped, group.group_id, unfit)
        log.info("group %d (%s) is dropped: %s %s", group.group_id, group.task.name, unfit, group.reason)
        if unfit is Unfit.SETUP_FAILED:
            await self._note_setup_failure(group)
        dropped[unfit] += 1
        if dropped.total() >= self._schedule.max_dropped_in_a_row:
            reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.most_common())
            whose = f" of source {source}" if source else ""
            unscored = f"; no reward: {group.scoring_failure}" if group.scoring_failure else ""
            raise TrainingFailed(
                f"{dropped.total()} groups{whose} in a row were dropped before the learner had them ({reasons};"
                f" last task: {group.task.name}{unscored}). {_ADVICE[unfit]}"
            )

    async def _note_setup_failure(self, group: Group) -> None:
        after = self._config.quarantine_after
        if await asyncio.to_thread(self._store.setup_failed, group.task.name, group.reason, after):
            log.warning("task %s is quarantined after %d groups: %s", group.task.name, after, group.reason)


_ADVICE = {
    Unfit.TOO_FEW_SCORED: "Look at the rollouts' outcomes (`harness-trainer traces ls`); rollouts.min_group and"
    " rollouts.max_refills say how many must be scored.",
    Unfit.SETUP_FAILED: "Mend the tasks: no sandbox can be had for them (`harness-trainer tasks check` tries them).",
    Unfit.STALE: "Raise learner.max_staleness, or lower rollouts.timeout_s: rollouts take longer than several steps.",
}

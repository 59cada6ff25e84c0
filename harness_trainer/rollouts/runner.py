"""Keeps agents running: opens groups, fills their slots, retries what the machinery spoiled, hands groups over.

Owns scheduling. It is a process of its own (`python -m harness_trainer.rollouts`), so that a learner that is killed or
busy never stops an agent, and the reverse; both meet in the store only.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from harness_trainer.errors import TaskError, TrainingFailed
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult
from harness_trainer.tasks import Task

log = logging.getLogger("harness_trainer.rollouts")

Attempt: TypeAlias = Callable[[Job], Awaitable[RolloutResult]]  # runs one rollout; raises nothing but cancellation
HarnessOf: TypeAlias = Callable[[int, Task], str]  # the name of a group's agent
# Sandboxes still to be had: of which task, for which agent, how many.
Need: TypeAlias = tuple[Task, str, int]
Plan: TypeAlias = Callable[[Sequence[Need]], None]

POLL_S = 0.25
RETRY_BACKOFF_S = 2.0


def task_of_group(group_id: int, tasks: Sequence[Task], seed: int) -> Task:
    """Every task once per pass, each pass in an order of its own; the same id always means the same task."""
    pass_, position = divmod(group_id, len(tasks))
    order = list(range(len(tasks)))
    random.Random(f"{seed}:{pass_}").shuffle(order)
    return tasks[order[position]]


class Runner:
    """Runs groups until it is cancelled. Raises TrainingFailed when too many rollouts in a row are infra failures.

    `plan` is told, after every change, how many sandboxes of which task are still to be had, the most urgent first.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tasks: Sequence[Task],
        store: RolloutStore,
        attempt: Attempt,
        *,
        harness_of: HarnessOf,
        max_open_groups: int,
        num_groups: int,
        plan: Plan = lambda needs: None,
    ) -> None:
        self._config = config
        self._tasks = list(tasks)
        self._store = store
        self._attempt = attempt
        self._harness_of = harness_of
        self._max_open_groups = max_open_groups
        self._num_groups = num_groups
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._consecutive_infra = 0
        self._plan = plan
        self._boxless: dict[int, Need] = {}  # group -> slots of it that have no sandbox yet, oldest first
        self._next: Need | None = None  # the group that will be opened next

    async def run(self) -> None:
        async with asyncio.TaskGroup() as groups:
            for group_id, task_name, done in await asyncio.to_thread(self._store.unfinished_groups):
                log.info("group %d (%s) continues: %d of its rollouts are finished", group_id, task_name, len(done))
                harness = await asyncio.to_thread(self._store.harness_of, group_id)  # whatever the shares are now
                groups.create_task(self._run_group(_Group(group_id, self._task_named(task_name), harness), done))
            while True:
                await self._until_wanted()
                group_id = await asyncio.to_thread(self._store.next_group_id)
                task = task_of_group(group_id, self._tasks, self._config.seed)
                harness = self._harness_of(group_id, task)
                await asyncio.to_thread(self._store.open_group, group_id, task.name, harness)
                self._next = None
                groups.create_task(self._run_group(_Group(group_id, task, harness), []))

    def _task_named(self, name: str) -> Task:
        for task in self._tasks:
            if task.name == name:
                return task
        raise TaskError(f"the run has an unfinished group of task {name!r}, which is gone from the tasks: put it back")

    async def _until_wanted(self) -> None:
        """Wait until a policy is published, the run wants another group, and there is room and a free slot for it."""
        while True:
            version = await asyncio.to_thread(self._store.policy_version)
            counts = await asyncio.to_thread(self._store.group_counts)
            open_groups = counts.get("running", 0) + counts.get("ready", 0)
            left = self._num_groups - counts.get("trained", 0)
            if version > 0 and open_groups < min(self._max_open_groups, left) and not self._slots.locked():
                return
            if self._next is None and open_groups < left:
                group_id = await asyncio.to_thread(self._store.next_group_id)
                task = task_of_group(group_id, self._tasks, self._config.seed)
                self._next = (task, self._harness_of(group_id, task), self._config.group_size)
                self._replan()
            await asyncio.sleep(POLL_S)

    def _replan(self) -> None:
        needs = list(self._boxless.values()) + ([self._next] if self._next else [])
        self._plan([need for need in needs if need[-1] > 0])

    def _change_boxless(self, group: _Group, by: int) -> None:
        *_, count = self._boxless.get(group.group_id, (None, None, 0))
        self._boxless[group.group_id] = (group.task, group.harness, count + by)
        self._replan()

    async def _run_group(self, group: _Group, done: Sequence[int]) -> None:
        missing = [slot for slot in range(self._config.group_size) if slot not in done]
        self._change_boxless(group, len(missing))
        async with asyncio.TaskGroup() as slots:
            for slot in missing:
                slots.create_task(self._run_slot(group, slot))
        await asyncio.to_thread(self._store.group_ready, group.group_id)
        del self._boxless[group.group_id]
        log.info("group %d (%s) is ready", group.group_id, group.task.name)

    async def _run_slot(self, group: _Group, slot: int) -> None:
        for attempt in range(self._config.infra_retries + 1):
            queued_at = time.monotonic()
            async with self._slots:
                queued_s = time.monotonic() - queued_at
                hopeless = group.num_setup_failed >= self._config.setup_tries
                result = await self._run_attempt(group, slot, attempt, hopeless=hopeless)
            result.stages_s = {"queue": queued_s, **result.stages_s}
            group.note(result)
            last = attempt == self._config.infra_retries or group.num_setup_failed >= self._config.setup_tries
            final = result.outcome is not Outcome.INFRA_FAILED or last
            await asyncio.to_thread(self._store.finish_rollout, result, final=final)
            self._report(result)
            if not hopeless:
                self._judge_loop(result)
            if final:
                return
            self._change_boxless(group, 1)
            await asyncio.sleep(RETRY_BACKOFF_S * 2**attempt)

    async def _run_attempt(self, group: _Group, slot: int, attempt: int, *, hopeless: bool) -> RolloutResult:
        # The id is new for every attempt, also after a restart: a session is single-use.
        rollout_id = f"g{group.group_id:05d}-{slot}-{uuid.uuid4().hex[:8]}"
        await asyncio.to_thread(self._store.start_rollout, rollout_id, group.group_id, slot, attempt)
        waits_for_box = True

        def has_box() -> None:
            nonlocal waits_for_box
            if waits_for_box:
                waits_for_box = False
                self._change_boxless(group, -1)

        job = Job(rollout_id, group.group_id, attempt, group.task, has_box, group.harness)
        try:
            return group.given_up(job) if hopeless else await self._attempt(job)
        finally:
            has_box()  # or needs none any more

    def _report(self, result: RolloutResult) -> None:
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

    def _judge_loop(self, result: RolloutResult) -> None:
        if result.outcome is not Outcome.INFRA_FAILED:
            self._consecutive_infra = 0
            return
        self._consecutive_infra += 1
        if self._consecutive_infra >= self._config.max_consecutive_infra:
            raise TrainingFailed(
                f"the last {self._consecutive_infra} rollouts all failed for infra reasons; the last: {result.detail}"
            )


@dataclass(slots=True)
class _Group:
    """What the slots of one group tell each other: a sandbox that cannot be had is tried for only so often."""

    group_id: int
    task: Task
    harness: str  # one agent for all its rollouts: they share a baseline
    num_setup_failed: int = 0
    reason: str = ""

    def note(self, result: RolloutResult) -> None:
        if result.setup_failed:
            self.num_setup_failed += 1
            self.reason = self.reason or result.detail

    def given_up(self, job: Job) -> RolloutResult:
        result = RolloutResult(
            job.rollout_id, job.group_id, job.task.name, self.harness, job.attempt, Outcome.INFRA_FAILED, None
        )
        result.failed_stage, result.setup_failed = "prepare", True
        result.detail = f"not tried, because earlier tries of its group failed: {self.reason}"
        return result

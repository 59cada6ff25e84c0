"""Runs attempts on the nodes of a Ray cluster: which node gets one, and what it means when a node is lost under it.

Owns that choice and that judgement: an attempt whose worker is lost is an infra failure of the machine (`types.NODE`),
which costs its slot no try as long as that is rare (`slots`); and each node's share of the sandboxes that are started
ahead of need. Who is there is `members`'; one attempt, `errand`'s. Opened by `opened`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from harness_trainer.errors import TaskError, TrainingFailed
from harness_trainer.rollouts.means import Sessions
from harness_trainer.rollouts.on_ray import files
from harness_trainer.rollouts.on_ray.errand import Errand
from harness_trainer.rollouts.on_ray.members import LOOK_S, SETTLE_S, SILENT_S, Members, Node, Nodes
from harness_trainer.rollouts.on_ray.messages import Order, Setup, WorkerFailed, WorkerLost
from harness_trainer.rollouts.types import NODE, Job, Outcome, RolloutResult
from harness_trainer.tasks import Task

log = logging.getLogger("harness_trainer.rollouts")

_PLAN_S = 0.2  # changes of the plan within it are sent together
_BEFORE_A_BOX = ("prepare", "create")  # stages


class Executor:
    """An async context manager: entered when a first node is open, for which it may wait.

    `tell` is for what a person should read once.
    """

    def __init__(
        self,
        cluster: Nodes,
        setup: Setup,
        admin: Sessions,
        *,
        tell: Callable[..., None],
        look_s: float = LOOK_S,
        silent_s: float = SILENT_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._members = Members(cluster, setup, tell=tell, look_s=look_s, silent_s=silent_s, settle_s=settle_s)
        self._setup = setup
        self._settings = setup.spec.config
        self._admin = admin
        self._tasks = {task.name: (source, task) for source, task in setup.tasks}
        self._needs: Sequence[tuple[str, str, int]] = ()
        self._loops: list[asyncio.Task[None]] = []
        self._failed: BaseException | None = None

    async def __aenter__(self) -> Self:
        """Raises SetupError when no node can be used, or none has come for `ray.patience_s`."""
        try:
            await self._members.first_node()
        except BaseException:
            await asyncio.shield(self._close())
            raise
        self._loops = [
            asyncio.create_task(self._members.look(), name="look at the cluster"),
            asyncio.create_task(self._send_plans(), name="plan sandboxes"),
        ]
        for loop in self._loops:
            loop.add_done_callback(self._note_end)
        return self

    def _note_end(self, loop: asyncio.Task[None]) -> None:
        """Neither ends by itself: an error that nobody foresaw ends the run, and not only what it was met in."""
        if not loop.cancelled():
            self._failed = loop.exception()
            self._members.changed.set()

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.shield(self._close())

    async def _close(self) -> None:
        for one in self._loops:
            one.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._members.close()

    # -- attempts ------------------------------------------------------------------------------------------------

    async def attempt(self, job: Job) -> RolloutResult:
        """Raises TrainingFailed when for `ray.patience_s` no node is left, and otherwise nothing but cancellation."""
        began = time.monotonic()
        node = await self._place()
        waited_s = time.monotonic() - began
        try:
            result = await self._on(node, job)
        except WorkerLost as error:
            self._members.lose(node, str(error))
            result = _failed(job, NODE, f"Ray node {node.info.name} was lost: {error}")
        except OSError as error:
            detail = (
                f"this host cannot keep what Ray node {node.info.name} sends (space in its temporary folder?): {error}"
            )
            result = _failed(job, "prepare", detail)
        except (WorkerFailed, TaskError) as error:
            log.error("rollout %s failed on Ray node %s: %s", job.rollout_id, node.info.name, error)
            result = _failed(job, "prepare", f"on Ray node {node.info.name}: {error}")
            result.setup_failed = isinstance(error, TaskError)
            if not result.setup_failed:
                node.note(made=False)
        else:
            made = result.outcome is not Outcome.INFRA_FAILED or result.failed_stage not in _BEFORE_A_BOX
            if made or not result.setup_failed:  # a task whose sandbox cannot be had says nothing of the node
                node.note(made=made)
        finally:
            node.running -= 1
            self._members.changed.set()
        result.stages_s["wait"] = waited_s + result.stages_s.get("wait", 0.0)
        return result

    async def _on(self, node: Node, job: Job) -> RolloutResult:
        await self._bring(node, job.task)
        gateway = self._setup.spec.access.gateway
        address = None if gateway is None else await asyncio.to_thread(gateway.public_now)
        source, _ = self._tasks[job.task.name]
        order = Order(
            job.rollout_id, job.group_id, job.attempt, source, job.task.name, job.harness, job.queued_s, address
        )
        return await Errand(node.worker, order, self._admin, self._setup.spec.artifacts, job.has_box).run()

    async def _place(self) -> Node:
        """A place on the node that has the largest share of its own free, taken."""
        while True:
            if self._failed is not None:
                raise self._failed
            if free := [node for node in self._members.ready() if node.running < node.capacity]:
                node = min(free, key=lambda one: one.running / one.capacity)
                node.running += 1
                return node
            if (why := self._members.given_up) is not None:
                raise TrainingFailed(why)
            await self._members.wait_for_change()

    async def _bring(self, node: Node, task: Task) -> None:
        """The task's folders to the node, once. Raises TaskError, WorkerLost, WorkerFailed."""
        bringing = node.brought.get(task.name)
        if bringing is None or (bringing.done() and bringing.exception() is not None):  # a full disk, say: not for ever
            bringing = asyncio.create_task(self._send(node, task.name), name=f"bring {task.name}")
            node.brought[task.name] = bringing
        await asyncio.shield(bringing)

    async def _send(self, node: Node, name: str) -> None:
        async with node.sending:
            sent = await asyncio.to_thread(files.bundle, self._tasks[name][1])
            if sent.folders:
                await node.worker.call("bring", sent)

    # -- sandboxes ahead of need ---------------------------------------------------------------------------------

    def plan(self, needs: Sequence[tuple[Task, str, int]]) -> None:
        """As `needs.Plan`; each node has its share of them ready, within bounds that are each node's own."""
        self._needs = [(task.name, agent, count) for task, agent, count in needs if task.name in self._tasks]

    async def _send_plans(self) -> None:
        """Again when the plan has changed, or who is there to have a share of it."""
        sent: tuple[Any, ...] = ()
        while True:
            await asyncio.sleep(_PLAN_S)
            needs, nodes = self._needs, list(self._members.open.values())
            if (needs, nodes) == sent:
                continue
            sent = (needs, nodes)
            for node in nodes:
                await self._send_plan(node, needs, node.capacity / sum(one.capacity for one in nodes))

    async def _send_plan(self, node: Node, needs: Sequence[tuple[str, str, int]], share: float) -> None:
        try:
            for name, _, _ in needs:
                await self._bring(node, self._tasks[name][1])
        except (WorkerLost, WorkerFailed, TaskError) as error:  # an attempt will say so, and count
            log.info("nothing is started ahead on Ray node %s: %s", node.info.name, error)
        else:
            node.worker.tell("plan", [(name, agent, math.ceil(count * share)) for name, agent, count in needs])


def _failed(job: Job, stage: str, detail: str) -> RolloutResult:
    result = RolloutResult(
        job.rollout_id, job.group_id, job.task.name, job.harness, job.attempt, Outcome.INFRA_FAILED, None
    )
    result.failed_stage, result.detail = stage, detail
    return result

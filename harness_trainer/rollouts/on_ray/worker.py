"""What runs on a node: sandboxes, their pool, agents and verifiers, as a runner has them, for attempts that it is sent.

One per node and run; `cluster` makes a Ray actor of it, and this module knows nothing of Ray. Owns what is opened here
and its end, a folder on this node's disk for tasks and logs, and the registry of what it owns: the node's own. Whatever
an attempt wants of the gateway it asks the runner for (`desk`). It ends with the runner; should it be killed,
`afterwards` ends what it leaves.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from capture_proxy import openenv_types
from harness_trainer.cache import cache_dir
from harness_trainer.errors import HarnessTrainerError
from harness_trainer.expose.probe import PATH
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.rollouts.agent_sources import open_pool
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.rollouts.budget import Caps
from harness_trainer.rollouts.harbor import open_harbor
from harness_trainer.rollouts.means import Means
from harness_trainer.rollouts.on_ray import afterwards, files
from harness_trainer.rollouts.on_ray.desk import Desk, Line
from harness_trainer.rollouts.on_ray.messages import Event, NodeFacts, Order, Setup
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.types import Job, RolloutResult
from harness_trainer.rundir import write_atomically
from harness_trainer.side_environments import DISTRIBUTION
from harness_trainer.tasks import Task
from sandboxes import open_backend
from sandboxes.base import Access, SandboxError
from sandboxes.lifecycle import LifecycleError, claim, default_registry, reap, remove_tree
from sandboxes.ownership import Owner
from sandboxes.pool import Pool

log = logging.getLogger("harness_trainer.rollouts")

ASK_S = 10.0


class Worker:
    """`open` before anything but `facts` and `look`, and once; `close` at the end.

    `watched`: what it leaves if it is killed is ended by `afterwards`.
    """

    def __init__(self, *, watched: bool = True) -> None:
        self._watched = watched
        self._stack = AsyncExitStack()
        self._lines: dict[str, Line] = {}
        self._running: dict[str, asyncio.Task[RolloutResult]] = {}
        self._tasks: dict[str, Task] = {}  # by name, where they lie here
        self._means: dict[tuple[str, str], Means] = {}  # by source and agent
        self._source_of: dict[str, str] = {}
        self._pool: Pool | None = None
        self._home = Path()
        self._loading: asyncio.Task[Any] | None = None  # what the first capture needs takes seconds to import
        self._address: Path | None = None  # file with the gateway's public address; None = that does not change
        self._noted: str | None = None  # what it says; None = it is not there
        self._noting = asyncio.Lock()

    # -- before it is opened -------------------------------------------------------------------------------------

    async def facts(self) -> NodeFacts:
        return facts_here()

    async def look(self, url: str, headers: dict[str, str]) -> tuple[int, bytes] | str:
        """The gateway's answer at `url` as this node gets it, or why there is none."""
        return await ask(url, headers)

    # -- opening and ending --------------------------------------------------------------------------------------

    async def open(self, setup: Setup, access: Access, follows: bool) -> str:
        """Why rollouts cannot run here, as one line; "" = they can.

        `follows`: the gateway's public address may change, and comes with each order.
        """
        try:
            await self._open(setup, access, follows)
        except (HarnessTrainerError, SandboxError, LifecycleError, OSError) as error:
            await self.close()
            return str(error)
        return ""

    async def _open(self, setup: Setup, access: Access, follows: bool) -> None:
        os.environ.update(setup.env)
        registry = default_registry()
        for left in await asyncio.to_thread(reap, registry):
            log.info("ended what a dead worker left here: %s", left)
        owned = await asyncio.to_thread(claim, registry, "ray_worker", run_id=setup.spec.run_id)
        self._stack.callback(owned.release)
        self._home = await asyncio.to_thread(owned.make_folder, Path(tempfile.gettempdir()))
        self._stack.push_async_callback(asyncio.to_thread, remove_tree, self._home)
        if self._watched:
            await asyncio.to_thread(_watch, registry)
        if follows and access.gateway is not None:
            self._address = self._home / "gateway_address"
            access = replace(access, gateway=replace(access.gateway, public_url_file=self._address))
        spec = setup.spec.model_copy(
            update={
                "registry": registry,
                "artifacts": self._home / "artifacts",
                "store": self._home / "none.sqlite",
                "access": access,
                "admin_url": "",
            }
        )
        for number, (of_source, task) in enumerate(setup.tasks):
            self._tasks[task.name] = files.moved(task, self._home / "tasks" / str(number))
            self._source_of[task.name] = of_source
        backend = open_backend(spec.sandbox, run_id=spec.run_id, registry=registry, access=access)
        await self._stack.enter_async_context(backend)
        self._loading = asyncio.create_task(asyncio.to_thread(openenv_types.training))
        pool = self._pool = await self._stack.enter_async_context(open_pool(backend, spec.config))
        harnesses = [harness for source in setup.sources for harness in source.harnesses.values()]
        harbor = await open_harbor(self._stack, spec, backend, *harnesses)
        caps, desk = Caps(spec.config), Desk(self._lines)
        for source in setup.sources:
            for name, harness in source.harnesses.items():
                programs = await asyncio.to_thread(ensure_installed, harness, cache_dir(), log.info)
                own = source.spec.model_copy(update={"harness_bins": {name: programs}})
                boxes = Boxes(spec.of_source(own, name), harness, access)
                for task in self._tasks.values():
                    if self._source_of[task.name] == source.spec.name:
                        boxes.check(task, backend)
                self._means[source.spec.name, name] = Means(boxes, backend, pool, caps, desk, harbor=harbor)

    async def close(self) -> None:
        """Nothing of it is left on the node. Idempotent."""
        ending = [*self._running.values(), *filter(None, [self._loading])]
        for one in ending:
            one.cancel()  # of the import, only the waiting: this process will not last
        await asyncio.gather(*ending, return_exceptions=True)
        await self._stack.aclose()

    # -- work ----------------------------------------------------------------------------------------------------

    async def bring(self, sent: files.Bundle) -> None:
        """The task's folders, before its first attempt here. Raises SandboxError, OSError."""
        await asyncio.to_thread(files.unbundle, sent, self._tasks[sent.task].path)

    async def plan(self, needs: Sequence[tuple[str, str, int]]) -> None:
        """Which sandboxes are still to be had here: of which task, for which agent, how many."""
        if self._pool is not None:
            wanted = [(self._means[self._source_of[task], agent], task, count) for task, agent, count in needs]
            self._pool.plan([(means.boxes.spec_of(self._tasks[task]), count) for means, task, count in wanted])

    async def attempt(self, order: Order) -> AsyncIterator[Event]:
        """One attempt: what it asks for, its files, its result. Not for more than one listener."""
        line = self._lines[order.rollout_id] = Line()
        running = self._running[order.rollout_id] = asyncio.create_task(self._run(order, line))
        running.add_done_callback(lambda _: line.close())
        kept = self._home / "artifacts" / order.rollout_id
        try:
            async for event in line.events():
                yield event
            if running.cancelled():
                yield Event("cancelled")
                return
            result = running.result()
            pieces = files.pieces(kept)
            try:
                while (piece := await asyncio.to_thread(_next, pieces)) is not None:
                    yield Event("file", payload=piece)
            except OSError as error:  # logs for people: no reason to lose the rollout
                result.findings.append(f"artifacts: warning not_kept: {error}")
            yield Event("result", payload=result)
        finally:
            del self._lines[order.rollout_id], self._running[order.rollout_id]
            await asyncio.to_thread(remove_tree, kept)

    async def _run(self, order: Order, line: Line) -> RolloutResult:
        means = self._means[order.source, order.harness]
        await self._note_address(order.gateway)

        def has_box() -> None:
            line.tell("box")

        job = Job(
            order.rollout_id,
            order.group_id,
            order.attempt,
            self._tasks[order.task],
            has_box=has_box,
            harness=order.harness,
            queued_s=order.queued_s,
        )
        return await run_rollout(job, means)

    async def _note_address(self, url: str | None) -> None:
        """Where sandboxes that start from now on are led; others of them may be reading it."""
        async with self._noting:
            if self._address is None or url == self._noted:
                return
            if url is None:
                await asyncio.to_thread(self._address.unlink, missing_ok=True)
            else:
                await asyncio.to_thread(write_atomically, self._address, url)
            self._noted = url

    async def answer(self, rollout_id: str, number: int, value: object, error: BaseException | None) -> None:
        if (line := self._lines.get(rollout_id)) is not None:
            line.answer(number, value, error)

    async def cancel(self, rollout_id: str) -> None:
        if (running := self._running.get(rollout_id)) is not None:
            running.cancel()


def facts_here() -> NodeFacts:
    owner = Owner.current()
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        version = "of a source tree"
    network = os.readlink("/proc/self/ns/net")
    return NodeFacts(owner.host, owner.boot_id, network, platform.python_version(), version, owner.pid)


async def ask(url: str, headers: dict[str, str]) -> tuple[int, bytes] | str:
    """As an agent asks, with a token of no session (see `expose.probe`)."""
    try:
        async with httpx.AsyncClient(timeout=ASK_S, trust_env=False) as http:
            answer = await http.get(f"{url.rstrip('/')}{PATH}", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return answer.status_code, answer.content


def _next(pieces: Iterator[bytes]) -> bytes | None:
    return next(pieces, None)


def _watch(registry: Path) -> None:
    """Raises OSError. The script has left this process, and its children, when this returns."""
    me = Owner.current()
    subprocess.run(
        [sys.executable, "-I", "-S", afterwards.__file__, str(me.pid), str(me.start_ticks), str(registry)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )

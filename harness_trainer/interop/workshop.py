"""Where the sessions of other people's trainers are at work: an event loop in a thread, with everything rollouts need.

Owns the start and the end of gateway client, sandboxes and pool. Sessions (`sessions`) hand it rollouts from threads of
their own; it is an async world that OpenEnv's synchronous one can hold on to.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Generic, TypeVar

from capture_proxy.admin_client import AdminClient
from harness_trainer.errors import SetupError
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.entry import entered
from harness_trainer.rewards.custom import load_reward
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.rollouts.budget import Caps
from harness_trainer.rollouts.config import RunnerSpec
from harness_trainer.rollouts.harbor import open_harbor
from harness_trainer.rollouts.proxies import open_access
from harness_trainer.rollouts.rollout import Means
from harness_trainer.tasks import Task
from sandboxes import open_backend
from sandboxes.pool import Bounds, Pool

log = logging.getLogger("harness_trainer.interop")

Result = TypeVar("Result")


class Work(Generic[Result]):
    """Something at work in the workshop, for a thread outside: over only when its task is, tidying up included."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result], works: set[asyncio.Task[Any]]
    ) -> None:
        self._loop = loop
        self._works = works
        self._task: asyncio.Task[Result] | None = None
        self._over: concurrent.futures.Future[Result] = concurrent.futures.Future()
        loop.call_soon_threadsafe(self._start, work)

    @property
    def done(self) -> bool:
        return self._over.done()

    def result(self, timeout_s: float | None = None) -> Result:
        """Raises TimeoutError, CancelledError (of `concurrent.futures`) and what the work raised."""
        return self._over.result(timeout_s)

    def cancel(self) -> None:
        """Ask it to end; `wait` says when it has."""
        if not self.done:
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def wait(self) -> None:
        concurrent.futures.wait([self._over])

    def _start(self, work: Coroutine[Any, Any, Result]) -> None:
        self._task = self._loop.create_task(work)
        self._works.add(self._task)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Result]) -> None:
        self._works.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self._over.cancel()
            self._over.set_running_or_notify_cancel()
        elif error is not None:
            self._over.set_exception(error)
        else:
            self._over.set_result(task.result())


class Workshop:
    """Open from the constructor to `close`. Raises what its parts raise when they cannot be had."""

    def __init__(self, spec: RunnerSpec, tasks: list[Task], admin_key: str) -> None:
        self._spec, self._tasks, self._admin_key = spec, tasks, admin_key
        self._ready: concurrent.futures.Future[Means] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._works: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._closed = False
        # A daemon: a trainer that forgets to close must still be able to exit.
        self._thread = threading.Thread(target=self._run, name="harness-trainer-sessions", daemon=True)
        self._thread.start()
        self.means = self._ready.result()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Work[Result]:
        """Run it here. Raises SetupError after `close`, and after a part that all sessions need has failed for good."""
        with self._lock:
            if self._closed:
                work.close()
                raise SetupError("this session factory is closed: make another one")
            return Work(self._loop, work, self._works)

    def close(self) -> None:
        """End what is at work, then everything else. Idempotent; returns when nothing is left."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)  # after the start of everything that was submitted
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:
                if self._ready.done():
                    log.exception("the sessions' sandboxes did not end well")
                else:
                    self._ready.set_exception(error)

    async def _serve(self) -> None:
        spec = self._spec
        async with AsyncExitStack() as stack:
            admin = await stack.enter_async_context(AdminClient(spec.admin_url, self._admin_key))
            harness = entered(load_harness(spec.harness), spec.config.entry)
            access = await open_access(stack, spec, self._tasks, self._admin_key, harness)
            boxes = Boxes(spec, harness, access)
            backend = open_backend(spec.sandbox, run_id=spec.run_id, registry=spec.registry, access=access)
            await stack.enter_async_context(backend)
            for task in self._tasks:
                boxes.check(task, backend)
            bounds = Bounds(spec.config.warm_per_task, spec.config.warm_total, spec.config.max_concurrent)
            pool = await stack.enter_async_context(Pool(backend, bounds))
            harbor = await open_harbor(stack, spec, backend, harness)
            reward = load_reward(spec.config.reward)
            try:
                self._ready.set_result(Means(boxes, backend, pool, Caps(spec.config), admin, reward, harbor))
                await self._stop.wait()
            finally:  # also when a part that all need is gone for good, say a proxy
                with self._lock:
                    self._closed = True
                await asyncio.sleep(0)  # what was submitted before that has started
                for work in self._works:  # sessions end before the sandboxes that they are in
                    work.cancel()
                await asyncio.gather(*self._works, return_exceptions=True)

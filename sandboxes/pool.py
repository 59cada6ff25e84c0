"""Warm sandboxes: started ahead of need up to a bound, handed out once, never used again.

Owns when a sandbox is started and who gets it, for any backend; every start goes through here, so that sandboxes
wanted now and sandboxes wanted soon share one cap, those wanted now first. What will be wanted is told by `plan`; the
pool guesses nothing. How a sandbox is made, labelled and reaped is the backend's. Used by `harness_trainer.rollouts`
and by the benchmarks.

All decisions are taken on the event loop between two awaits (`_advance`); starting and stopping are tasks that the pool
owns, so cancelling a caller loses no sandbox.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from sandboxes.base import Backend, BoxSpec, Sandbox, SandboxError, SetupFailed
from sandboxes.health import patience_s

log = logging.getLogger(__name__)


class StartHung(SandboxError):
    """A start took longer than any may."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many sandboxes: kept ready per spec and in all, and being started at once (for now or for later)."""

    per_spec: int = 2
    total: int = 8
    starting: int = 4
    preparing: int = 2  # images being built or pulled at once


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds."""

    check: float = 5.0  # for the question whether a warm sandbox still lives
    start: float = 300.0  # of one start, beyond the time its health check may take
    stop: float = 30.0  # how long a caller waits for a sandbox to end; it goes on ending after that
    close: float = 60.0  # then the backend, which stops all it made, has its turn
    backoff: tuple[float, float] = (1.0, 60.0)  # after a failed start ahead of need: first, doubled each time, up to


@dataclass(slots=True)
class Counts:
    """What the pool did so far. Example: Counts(hits=30, misses=2, dead=1, failed=0, unused=1, waited_s=4.2)."""

    hits: int = 0  # handed out warm
    misses: int = 0  # started only when asked for, or still starting then
    dead: int = 0  # found dead at hand-out, and replaced
    failed: int = 0  # starts that failed, for now or for later
    unused: int = 0  # ended without having been handed out
    adopted: int = 0  # of an earlier pool, whose process was killed
    waited_s: float = 0.0  # by all callers together


@dataclass(frozen=True, slots=True)
class Lease:
    """A sandbox that belongs to one caller from now on. `waited_s` is the time between asking and having."""

    sandbox: Sandbox
    warm: bool
    waited_s: float


@dataclass(slots=True, eq=False)
class _Shelf:
    """The sandboxes of one spec that nobody has yet."""

    spec: BoxSpec
    planned: int = 0  # of the plan, not asked for yet
    num_asking: int = 0  # callers inside `take`
    ready: deque[Sandbox] = field(default_factory=deque)
    waiters: deque[asyncio.Future[Sandbox]] = field(default_factory=deque)
    starting: list[float] = field(default_factory=list)  # monotonic seconds at which each start under way began
    preparing: asyncio.Task[None] | None = None
    prepared: bool = False
    setup_failed: bool = False  # then nothing is started ahead of need any more
    num_failures: int = 0  # in a row
    retry_at: float = 0.0  # monotonic seconds; nothing is started ahead of need before
    started_at: float = 0.0  # monotonic seconds: when the last start that worked ended

    @property
    def num_starting(self) -> int:
        return len(self.starting)

    @property
    def num_ahead(self) -> int:
        """Ready, or being started with nobody waiting for it."""
        return len(self.ready) + max(0, self.num_starting - len(self.waiters))


class Pool:
    """See the module. An async context manager inside the backend's; leaving it ends every sandbox it still holds."""

    def __init__(self, backend: Backend, bounds: Bounds, times: Times = Times()) -> None:
        self._backend = backend
        self._bounds = bounds
        self._times = times
        self._shelves: dict[tuple[object, ...], list[_Shelf]] = {}  # by what tells most specs apart
        self._plan: list[_Shelf] = []  # in order of need
        self._waiting: dict[asyncio.Future[Sandbox], _Shelf] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()  # starting, preparing, ending
        self._ending: set[asyncio.Task[None]] = set()  # of them, those that must not be cancelled
        self._preparing = asyncio.Semaphore(bounds.preparing)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.counts = Counts()

    @property
    def num_ready(self) -> int:
        return sum(len(shelf.ready) for shelf in self._all())

    @property
    def num_starting(self) -> int:
        return sum(shelf.num_starting for shelf in self._all())

    def _all(self) -> Iterator[_Shelf]:
        return itertools.chain.from_iterable(self._shelves.values())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End everything that was not handed out. Idempotent; bounded in time; goes on when it is cancelled."""
        if not self._closed:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            for shelf in self._all():
                self._fail(shelf, SandboxError("the sandbox pool is closed"), everyone=True)
                while shelf.ready:
                    self._drop(shelf.ready.popleft())
            for task in self._tasks - self._ending:
                task.cancel()
        await asyncio.shield(self._ended())

    async def _ended(self) -> None:
        deadline = time.monotonic() + self._times.close
        while self._tasks and (left := deadline - time.monotonic()) > 0:  # a start that is cut short ends its sandbox
            await asyncio.wait(self._tasks, timeout=left)
        if self._tasks:
            log.warning("%d sandboxes of the pool did not end within %.0f s", len(self._tasks), self._times.close)

    # --- asking ---

    def plan(self, needs: Sequence[tuple[BoxSpec, int]]) -> None:
        """How many sandboxes of which spec are still to be handed out, the most urgent first; replaces the last plan.

        Callers that wait in `take` count as well. Images are prepared and sandboxes started within the bounds; idle
        sandboxes beyond the plan are ended.
        """
        if self._closed:
            return
        for shelf in self._plan:
            shelf.planned = 0
        self._plan = []
        for spec, count in needs:
            shelf = self._shelf(spec)
            shelf.planned += count
            if shelf not in self._plan and shelf.planned:
                self._plan.append(shelf)
        for shelf in self._all():
            shelf.planned = max(0, shelf.planned - shelf.num_asking)
            while len(shelf.ready) > min(shelf.planned, self._bounds.per_spec):
                self._drop(shelf.ready.popleft())
        self._advance()

    async def prepare(self, spec: BoxSpec) -> None:
        """Until sandboxes of the spec can be started: its image is there. Raises SetupFailed or SandboxError."""
        self._require_open()
        shelf = self._shelf(spec)
        while not shelf.prepared:
            task = self._prepare(shelf)
            await asyncio.wait({task})  # shared with others: cancelling one who waits must not end it
            self._require_open()
            task.result()

    @asynccontextmanager
    async def acquire(self, spec: BoxSpec) -> AsyncIterator[Lease]:
        """A started sandbox of one's own, ended on leaving. Raises SetupFailed or SandboxError."""
        lease = await self.take(spec)
        try:
            yield lease
        finally:
            await self.give_up(lease)

    async def take(self, spec: BoxSpec) -> Lease:
        """`acquire` without the context: the caller has to `give_up` the lease on every path."""
        self._require_open()
        began = time.monotonic()
        shelf = self._shelf(spec)
        shelf.planned = max(0, shelf.planned - 1)
        shelf.num_asking += 1
        try:
            while shelf.ready:
                sandbox = shelf.ready.popleft()
                if await self._renewed(sandbox):
                    self.counts.hits += 1
                    return self._lease(sandbox, True, began)
            sandbox = await self._next_started(shelf)
            self.counts.misses += 1
            return self._lease(sandbox, False, began)
        finally:
            shelf.num_asking -= 1
            self._advance()

    def hangs(self, spec: BoxSpec, for_s: float) -> bool:
        """Whether a start of the spec has been under way for so long: who waits for it is in no queue."""
        return any(time.monotonic() - began >= for_s for began in self._shelf(spec).starting)

    def has_started_another(self, spec: BoxSpec, since: float) -> bool:
        """Whether a start of another task's sandbox has worked since (monotonic). To take one off a shelf is none."""
        return any(shelf.started_at > since for shelf in self._all() if shelf.spec.name != spec.name)

    async def give_up(self, lease: Lease) -> None:
        """End the sandbox. Raises nothing; when that takes long it goes on without the caller."""
        await asyncio.wait({self._end(lease.sandbox)}, timeout=self._times.stop)

    def adopt(self, sandbox: Sandbox) -> Lease:
        """A sandbox that `Backend.attach` gave, as if it had been taken here: the caller has to `give_up` the lease.

        Raises SandboxError, and the sandbox is still the caller's then.
        """
        self._require_open()
        self.counts.adopted += 1
        return Lease(sandbox, warm=False, waited_s=0.0)

    def _lease(self, sandbox: Sandbox, warm: bool, began: float) -> Lease:
        waited_s = time.monotonic() - began
        self.counts.waited_s += waited_s
        return Lease(sandbox, warm, waited_s)

    async def _renewed(self, sandbox: Sandbox) -> bool:
        """Whether a warm sandbox still lives; one that does not is ended."""
        try:
            async with asyncio.timeout(self._times.check):
                await sandbox.renew()
        except (SandboxError, TimeoutError) as error:
            log.warning("a warm sandbox died while it waited, another takes its place: %s", error)
            self.counts.dead += 1
            self._end(sandbox)
            return False
        except BaseException:  # cancelled: nobody else knows of it
            self._drop(sandbox)
            raise
        return True

    async def _next_started(self, shelf: _Shelf) -> Sandbox:
        self._require_open()  # also after the awaits of the caller
        future: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        shelf.waiters.append(future)
        self._waiting[future] = shelf
        self._advance()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._offer(shelf, future.result())  # it came at the same moment
            raise
        finally:
            if self._waiting.pop(future, None) is not None:
                shelf.waiters.remove(future)

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox pool is closed")

    def _shelf(self, spec: BoxSpec) -> _Shelf:
        alike = self._shelves.setdefault((spec.name, spec.image, spec.build_dir), [])
        for shelf in alike:
            if shelf.spec == spec:
                return shelf
        alike.append(_Shelf(spec))
        return alike[-1]

    # --- deciding ---

    def _advance(self) -> None:
        """Start what may be started now. Called after every change."""
        if self._closed:
            return
        while self.num_starting < self._bounds.starting and (shelf := self._most_urgent()) is not None:
            shelf.starting.append(began := time.monotonic())
            self._own(self._start(shelf, began), f"start a sandbox of {shelf.spec.name}")
        for shelf in [*self._waiting.values(), *self._plan]:
            if not shelf.prepared and (shelf.waiters or (shelf.planned and self._may_start_ahead(shelf))):
                self._prepare(shelf)
        self._wake_for_retries()

    def _most_urgent(self) -> _Shelf | None:
        """The spec to start one of: that of the oldest caller who has none under way, then as planned."""
        claimed: dict[int, int] = {}
        for shelf in self._waiting.values():
            claimed[id(shelf)] = claimed.get(id(shelf), 0) + 1
            if shelf.prepared and claimed[id(shelf)] > shelf.num_starting:
                return shelf
        if sum(shelf.num_ahead for shelf in self._all()) >= self._bounds.total:
            return None
        for shelf in self._plan:
            wanted = min(shelf.planned, self._bounds.per_spec)
            if shelf.prepared and shelf.num_ahead < wanted and self._may_start_ahead(shelf):
                return shelf
        return None

    def _may_start_ahead(self, shelf: _Shelf) -> bool:
        return not shelf.setup_failed and time.monotonic() >= shelf.retry_at

    def _wake_for_retries(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        waits = [s.retry_at - now for s in self._plan if s.planned and not s.setup_failed and s.retry_at > now]
        if waits:
            self._timer = asyncio.get_running_loop().call_later(min(waits) + 0.001, self._advance)

    def _offer(self, shelf: _Shelf, sandbox: Sandbox) -> None:
        """A started sandbox that nobody has: to the caller who has waited longest, to the shelf, or away."""
        while shelf.waiters:
            waiter = shelf.waiters.popleft()
            self._waiting.pop(waiter, None)
            if not waiter.done():
                waiter.set_result(sandbox)
                return
        if not self._closed and len(shelf.ready) < min(shelf.planned, self._bounds.per_spec):
            shelf.ready.append(sandbox)
        else:
            self._drop(sandbox)
        self._advance()

    def _fail(self, shelf: _Shelf, error: SandboxError, *, everyone: bool) -> None:
        """Tell the caller who has waited longest, or everyone who waits."""
        while shelf.waiters:
            waiter = shelf.waiters.popleft()
            self._waiting.pop(waiter, None)
            if not waiter.done():
                waiter.set_exception(error)
                if not everyone:
                    return

    def _note_failure(self, shelf: _Shelf, error: SandboxError) -> None:
        self.counts.failed += 1
        shelf.num_failures += 1
        shelf.setup_failed = isinstance(error, SetupFailed)
        delay = min(self._times.backoff[0] * 2 ** (shelf.num_failures - 1), self._times.backoff[1])
        shelf.retry_at = time.monotonic() + delay
        later = "not started ahead of need any more" if shelf.setup_failed else f"next try in {delay:.0f} s"
        log.warning("no sandbox for %s (%s): %s", shelf.spec.name, later, error)

    def _note_success(self, shelf: _Shelf) -> None:
        shelf.num_failures, shelf.retry_at, shelf.setup_failed = 0, 0.0, False

    # --- doing ---

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _prepare(self, shelf: _Shelf) -> asyncio.Task[None]:
        if shelf.preparing is None:
            shelf.preparing = self._own(self._run_prepare(shelf), f"prepare {shelf.spec.name}")
            shelf.preparing.add_done_callback(_seen)
        return shelf.preparing

    async def _run_prepare(self, shelf: _Shelf) -> None:
        try:
            async with self._preparing:
                await self._backend.prepare(shelf.spec)
            shelf.prepared = True
            self._note_success(shelf)
        except Exception as error:
            failure = _as_sandbox_error(error, f"preparing {shelf.spec.name}")
            self._note_failure(shelf, failure)
            self._fail(shelf, failure, everyone=True)
            raise failure from (None if failure is error else error)
        finally:
            shelf.preparing = None
            self._advance()

    async def _start(self, shelf: _Shelf, began: float) -> None:
        sandbox: Sandbox | None = None
        limit_s = self._times.start + patience_s(shelf.spec)
        try:
            async with asyncio.timeout(limit_s):
                sandbox = self._backend.sandbox(shelf.spec)
                await sandbox.__aenter__()
        except BaseException as error:
            shelf.starting.remove(began)
            if sandbox is not None:
                self._end(sandbox)  # also what was cut short half-way
            if not isinstance(error, Exception):
                raise
            failure = _as_sandbox_error(error, f"starting a sandbox of {shelf.spec.name}", limit_s)
            self._note_failure(shelf, failure)
            self._fail(shelf, failure, everyone=False)
            self._advance()
            return
        shelf.starting.remove(began)
        shelf.started_at = time.monotonic()
        self._note_success(shelf)
        self._offer(shelf, sandbox)

    def _drop(self, sandbox: Sandbox) -> None:
        self.counts.unused += 1
        self._end(sandbox)

    def _end(self, sandbox: Sandbox) -> asyncio.Task[None]:
        task = self._own(_stop(sandbox), "end a sandbox")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task


def _as_sandbox_error(error: Exception, doing: str, limit_s: float | None = None) -> SandboxError:
    if isinstance(error, SandboxError):
        return error
    if isinstance(error, TimeoutError) and limit_s is not None:
        return StartHung(f"{doing} took more than {limit_s:.0f} s")
    return SandboxError(f"{doing} failed: {type(error).__name__}: {error}")


def _seen(task: asyncio.Task[None]) -> None:
    """What a preparation failed with has been logged; those who wait for it get it too."""
    if not task.cancelled():
        task.exception()


async def _stop(sandbox: Sandbox) -> None:
    try:
        await sandbox.stop()
    except Exception as error:  # it stays on record, and the next start ends it
        log.warning("a sandbox could not be ended and is left to the next start: %s: %s", type(error).__name__, error)

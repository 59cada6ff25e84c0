"""Relays started ahead of need, so that a sandbox's start does not wait for one: the relay's image is always the same.

Owns how many there are and when one is made: never in front of a sandbox that is being created, one after another, by
a task of its own. A spare is on record from the first as the sandbox that will take it, so it is reaped like one, and
what takes over that sandbox takes over its relay. Handed out once. What a relay is made of is `docker_relay`'s.
Called by `docker_network` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sandboxes.base import SandboxError
from sandboxes.docker_labels import engine_of
from sandboxes.docker_sidecar import NetworkLink
from sandboxes.ownership import Claim, claim
from sandboxes.processes import LifecycleError

log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Spare:
    """A relay, and the claim of the sandbox that will take it: the sandbox is named after the claim, like the relay."""

    claim: Claim
    link: NetworkLink


@dataclass(frozen=True, slots=True)
class _Order:
    kind: Hashable
    begin: Callable[[], Awaitable[Spare]]


class Spares:
    """Up to `bound` spares of all kinds together. Nothing here waits but `settled` and `close`."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._ready: list[tuple[Hashable, Spare]] = []  # the oldest first
        self._orders: list[_Order] = []  # the first may be in the making
        self._unwanted: list[Spare] = []  # to be ended
        self._num_creating = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._worker: asyncio.Task[None] | None = None
        self._closed = False

    def take(self, kind: Hashable) -> Spare | None:
        """One that lives, from now on the caller's to use, to remove and to release; None = there is none."""
        for held in [held for held in self._ready if held[0] == kind]:
            self._ready.remove(held)
            if held[1].link.alive:
                return held[1]
            self._unwanted.append(held[1])
        return None

    def order(self, kind: Hashable, begin: Callable[[], Awaitable[Spare]], *, first: bool = False) -> None:
        """Have one more made in the background, up to the bound; `first` = only when there is none of this kind.

        `begin` puts it on record and starts nothing. A kind that is asked for takes the place of one that is not.
        """
        kinds = [order.kind for order in self._orders] + [held[0] for held in self._ready]
        if self._closed or (first and kind in kinds):
            return
        if len(kinds) >= self._bound:
            other = next((held for held in self._ready if held[0] != kind), None)
            if other is None:
                return
            self._ready.remove(other)
            self._unwanted.append(other[1])
        self._orders.append(_Order(kind, begin))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="spare relays")

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """No spare is begun meanwhile: a sandbox is being created."""
        self._num_creating += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_creating -= 1
            if not self._num_creating:
                self._quiet.set()

    async def settled(self) -> None:
        """Until every spare that was ordered is there, or could not be made."""
        while self._worker is not None and not self._worker.done():
            await asyncio.wait([self._worker])

    async def close(self) -> list[str]:
        """End all that nobody took, also one in the making; what could not be ended, which stays on record."""
        self._closed = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        spares = [*self._unwanted, *(spare for _, spare in self._ready)]
        self._ready, self._orders, self._unwanted = [], [], []
        return [problem for problem in await asyncio.gather(*map(_end, spares)) if problem]

    # -- in the background -----------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while self._orders or self._unwanted:
            while self._num_creating:
                await self._quiet.wait()
            if self._unwanted:
                if problem := await _to_end(_end(self._unwanted[0])):
                    log.warning("a spare relay is left behind and stays on record for the next start: %s", problem)
                del self._unwanted[0]
                continue
            order = self._orders[0]
            try:
                spare = await self._make(order)
            except SandboxError as e:  # a sandbox that needs a relay makes its own, and says what is wrong
                log.warning("no relay could be started ahead of need: %s", e)
            else:
                self._ready.append((order.kind, spare))
            finally:
                self._orders.remove(order)

    async def _make(self, order: _Order) -> Spare:
        """It is known to `close` from its record on. Raises SandboxError."""

        async def begin() -> Spare:
            spare = await order.begin()
            self._unwanted.append(spare)
            return spare

        spare = await _to_end(begin())
        await spare.link.start()
        await spare.link.ready()
        self._unwanted.remove(spare)
        return spare


async def _to_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Begun means finished, also when the caller is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


async def _end(spare: Spare) -> str:
    """Why it could not be, or ""."""
    try:
        await spare.link.remove()
    except SandboxError as e:
        return str(e)
    await asyncio.to_thread(spare.claim.release)
    return ""


def sandbox_claim(registry: Path, *, run_id: str, address: str) -> Claim:
    """Put a sandbox on record, before anything of it exists. Blocking. Raises SandboxError."""
    try:
        return claim(registry, "sandbox", run_id=run_id, engine=engine_of(address))
    except LifecycleError as e:
        raise SandboxError(str(e)) from e

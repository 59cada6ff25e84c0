"""Whether the engine may be asked now: agents' calls wait here while it is away, or has no policy to sample with.

Owns the waiting and its limit. An engine that is started again holds its base weights until the trainer has sent it a
policy, so whoever starts engines says `hold` before the next one exists and `release` once it has one. `hold` ends
every attempt that is under way: what an attempt could still reach is not the engine that it was meant for. `turn` has
each attempt pass here and decides whether there may be another one; `admin` has the switch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from capture_proxy.errors import EngineUnreachable

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0  # between two attempts at an engine that does not answer
_T = TypeVar("_T")


class Gate:
    """`patience_s` bounds how long one call waits from its first failure on; 0 = it fails with that."""

    def __init__(self, *, held: bool = False, patience_s: float = 0.0) -> None:
        self.patience_s = patience_s
        self._open = asyncio.Event()
        self._attempts: set[asyncio.Timeout] = set()
        if not held:
            self._open.set()

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    async def hold(self) -> None:
        """When this returns no attempt is under way, and none begins."""
        self._open.clear()
        for attempt in self._attempts:
            if not attempt.expired():
                attempt.reschedule(0.0)
        while self._attempts:
            await asyncio.sleep(0.001)

    def release(self) -> None:
        self._open.set()

    @contextlib.asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """One attempt to ask the engine. Raises EngineUnreachable when it may not be asked, now or any more."""
        if self.held:
            raise EngineUnreachable("the engine has no policy yet: it was started a moment ago, or is being started")
        try:
            async with asyncio.timeout(None) as attempt:
                self._attempts.add(attempt)
                try:
                    yield
                finally:
                    self._attempts.discard(attempt)
        except TimeoutError:
            if not attempt.expired():
                raise
            raise EngineUnreachable("the engine went away") from None

    def patience(self) -> Patience:
        """For one call."""
        return Patience(self)

    async def patiently(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask the engine something that needs no policy, again while it is away. Raises what `ask` raises."""
        patience = self.patience()
        while True:
            try:
                return await ask()
            except EngineUnreachable:
                if not await patience.wait():
                    raise

    async def opened(self, limit_s: float) -> bool:
        """Wait until the engine may be asked; False = not within `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._open.wait()
        return not self.held


class Patience:
    """How long one call may still wait. It counts from the first failure: what was sampled before took its time."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._until: float | None = None  # of the loop's clock; None = nothing has failed yet
        self._pause_s = _FIRST_WAIT_S

    async def wait(self) -> bool:
        """After an attempt that failed: wait for a time to try again; False = there is none within the limit."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._gate.patience_s
        left_s = self._until - now
        if left_s <= 0:
            return False
        if self._gate.held:
            return await self._gate.opened(left_s)
        await asyncio.sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_WAIT_S)
        return True

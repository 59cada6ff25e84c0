"""How many episodes of a source are open at once, where that may turn out to be fewer than was thought.

Owns the count, the queue, and how long is waited between tries. A server may tell how many sessions it allows only by
refusing one. Called by the environments that learn it, and by `rollouts.white_box`, which lets rollouts wait outside
their deadline.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0  # between tries for a place that others hold


def pauses(patience_s: float) -> Iterator[float]:
    """Seconds to wait before each further try for a place of a full server: with back-off, `patience_s` in all."""
    wait_s = _FIRST_WAIT_S
    while patience_s > 0:
        pause_s = min(wait_s * random.uniform(0.5, 1.0), patience_s)
        yield pause_s
        patience_s -= pause_s
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


class Places:
    """A semaphore whose limit can fall while places are held. `limit` None = none is known."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._num_held = 0
        self._freed = asyncio.Condition()

    @property
    def too_many(self) -> bool:
        """There are more holders than places."""
        return self.limit is not None and self._num_held > self.limit

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        async with self._freed:
            await self._freed.wait_for(lambda: self.limit is None or self._num_held < self.limit)
            self._num_held += 1
        try:
            yield
        finally:
            self._num_held -= 1  # before anything is awaited, so that a cancelled holder gives its place back too
            await asyncio.shield(self._tell())

    def learn(self, limit: int | None) -> bool:
        """What a refusal says. Whether the limit has fallen."""
        if limit is None or limit < 1 or (self.limit is not None and limit >= self.limit):
            return False
        self.limit = limit
        return True

    async def _tell(self) -> None:
        async with self._freed:
            self._freed.notify_all()

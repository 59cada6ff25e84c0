"""The wall time of one rollout, and the caps that its stages share with other rollouts.

Owns clocks and queues; what a stage does is `rollout`'s. Queueing for a cap never counts against the deadline: a busy
machine must not make agents look slow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.tasks import Task
from sandboxes.health import patience_s

GRACE_S = 15.0  # beyond the agent's own limit, for the sandbox to end it and hand over its output
OVERHEAD_S = 60.0  # of scoring beside the tests: stopping the agent, copying its work, a fresh sandbox
RESERVED = 0.25  # of a deadline that a person set: at most this much is kept for scoring


class StageTimeout(Exception):
    """A stage did not end in time; the message says which, and which limit it met."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that one rollout may take. Example: Limits(start_s=300, agent_s=600, tests_s=600, total_s=1560, ...)."""

    start_s: float  # to get a sandbox, its health check included, and to put the agent in
    agent_s: float
    tests_s: float
    total_s: float
    reserved_s: float  # of the total, kept for scoring whatever comes before

    @classmethod
    def of(cls, config: RolloutConfig, task: Task) -> Limits:
        start_s = config.start_timeout_s + patience_s(task.box)
        agent_s = min(config.timeout_s, task.agent_timeout_s)
        verify_s = task.verifier_timeout_s + OVERHEAD_S
        together = start_s + agent_s + verify_s
        total_s = together if config.deadline_s is None else min(config.deadline_s, together)
        reserved_s = min(verify_s, RESERVED * total_s) if total_s < together else verify_s
        return cls(start_s, agent_s, task.verifier_timeout_s, total_s, reserved_s)


class Caps:
    """How many rollouts may be in the same stage at once. Starting is capped by the sandbox pool."""

    def __init__(self, config: RolloutConfig) -> None:
        self.running = asyncio.Semaphore(config.max_running or config.max_concurrent)
        self.verifying = asyncio.Semaphore(config.max_verifying or config.max_concurrent)


class Budget:
    """The clock of one rollout; its deadline counts from here. `stages_s` receives what each stage took."""

    def __init__(self, limits: Limits, stages_s: MutableMapping[str, float]) -> None:
        self.limits = limits
        self.stage = ""  # the one at work, or the last one
        self.stages_s = stages_s
        self._ends_at = time.monotonic() + limits.total_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())

    def spent_s(self, stage: str) -> float:
        return self.stages_s.get(stage, 0.0)

    def set_left(self, left_s: float) -> None:
        """Of a rollout whose clock another process had begun."""
        self._ends_at = time.monotonic() + left_s

    @property
    def agent_s(self) -> float:
        """What the agent may take from now on, so that its work can still be scored."""
        return min(self.limits.agent_s, max(0.0, self.left_s - self.limits.reserved_s))

    @property
    def tests_s(self) -> float:
        """What the tests may take from now on; some of what is left is for everything around them."""
        return min(self.limits.tests_s, self.left_s - min(OVERHEAD_S, 0.2 * self.left_s))

    @asynccontextmanager
    async def timed(self, name: str, limit_s: float | None = None) -> AsyncIterator[None]:
        """A stage, measured, ended at `limit_s` (None = no limit). Raises StageTimeout then."""
        self.stage = name
        began = time.monotonic()
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StageTimeout(f"{name} took more than {limit_s:.0f} s") from error
        finally:
            self.stages_s[name] = self.stages_s.get(name, 0.0) + time.monotonic() - began

    @asynccontextmanager
    async def outside(self, name: str, limit_s: float | None = None) -> AsyncIterator[None]:
        """`timed`, and the deadline moves by what it takes."""
        began = time.monotonic()
        try:
            async with self.timed(name, limit_s):
                yield
        finally:
            self._ends_at += time.monotonic() - began

    @asynccontextmanager
    async def turn(self, cap: asyncio.Semaphore) -> AsyncIterator[bool]:
        """Hold one of the cap's places; tells whether there was a queue. Waiting moves the deadline."""
        queued = cap.locked()
        async with self.outside("wait"):
            await cap.acquire()
        try:
            yield queued
        finally:
            cap.release()

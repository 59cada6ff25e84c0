"""Which replica of the engine a rollout is pinned to: chosen when it begins, for its whole life.

Owns that choice and no more. A lane is all that leads to one replica: the client of its gateway, the sandboxes that
reach this gateway, what rollouts there are made with. Its session lives in that gateway alone, so that the engine's
prefix cache and the recorded turns that a prompt goes on from are where the agent's next call arrives. A run with one
engine has one lane, and there is nothing to choose. Made by `agent_sources`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from capture_proxy.admin_client import AdminClient
from harness_trainer.rollouts.config import RunnerSpec
from harness_trainer.rollouts.means import Means
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.sealing import sealing
from harness_trainer.rollouts.slots import Attempt
from harness_trainer.rollouts.types import Job, RolloutResult
from sandboxes.base import Access, Backend
from sandboxes.pool import Pool


@dataclass(slots=True)
class Lane:
    """Example: the lane of replica 1 has `spec.of_replica(1)`; `means` are by source and agent."""

    spec: RunnerSpec  # as the rollouts of this lane see it
    access: Access  # with the proxies that the run has started
    admin: AdminClient
    backend: Backend
    pool: Pool
    means: dict[tuple[str, str], Means] = field(default_factory=dict)
    num_open: int = 0  # rollouts that are pinned to it now

    async def run(self, job: Job, source: str) -> RolloutResult:
        """Raises nothing but cancellation."""
        attempt = sealing(self.admin, lambda it: run_rollout(it, self.means[source, it.harness]))
        self.num_open += 1
        try:
            return await attempt(job)
        finally:
            self.num_open -= 1


class Lanes:
    """`serving` tells which replicas have a policy of the run now; it blocks for a moment."""

    def __init__(self, lanes: Sequence[Lane], serving: Callable[[], Collection[int]]) -> None:
        self._lanes = lanes
        self._serving = serving

    def attempt(self, source: str) -> Attempt:
        """How a rollout of the source is run."""

        async def run(job: Job) -> RolloutResult:
            return await (await self._lane_of(job)).run(job, source)

        return run

    async def _lane_of(self, job: Job) -> Lane:
        if job.taken is not None:
            return self._lanes[job.taken.facts.replica]
        if len(self._lanes) == 1:
            return self._lanes[0]
        serving = await asyncio.to_thread(self._serving)
        # Where none serves, all are being started again, and it waits wherever it is.
        able = [lane for number, lane in enumerate(self._lanes) if number in serving] or self._lanes
        return min(able, key=lambda lane: lane.num_open)


def shares(count: int, num_lanes: int) -> list[int]:
    """So many of each lane, for sandboxes that are started ahead of need. Example: shares(5, 2) == [3, 2]."""
    each, more = divmod(count, num_lanes)
    return [each + (lane < more) for lane in range(num_lanes)]

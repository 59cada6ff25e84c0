"""Reward functions that compare siblings: called once for a whole group, when all its rollouts have ended.

Owns the instances that wait for that (`reward_scope: group`), and what a group earned. Of an episode that is over its
instance is kept as it is, for functions to read. What it gave up at its end: the session of every OpenEnv client among
its attributes, which would hold a place of the server's, and the episode's own place (`max_episodes`). What it still
has: its thread, and all else that its code holds open; `close` is called when the group is scored or given up. Its own
`get_reward` was called before, at the episode's end.

Functions are given one entry per rollout of the group that can be scored, in the order of its slots; one that failed,
or whose `get_reward` did, is not among them. They run in one thread of the group's. What one raises, or an infinite
reward, leaves the whole group unscored.

Made by `environment_class`, fed by `class_episode`, asked by `rollouts.group_scores`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness_trainer.loops.base import GroupScore, Scores
from harness_trainer.loops.held_instance import Held
from harness_trainer.loops.reward_functions import Rewards, Sample
from harness_trainer.own_thread import OwnThread

log = logging.getLogger("harness_trainer.loops")

CLOSE_S = 10.0  # for instances to be closed; after that nobody waits for them


@dataclass(frozen=True, slots=True)
class Waiting:
    """An episode that is over, and whose group is not."""

    held: Held
    rewards: Rewards  # the source's, the same for all
    sample: Sample
    own: Mapping[str, float | None]  # what its instance said of itself, by name


class KeptEpisodes:
    """`loops.base.GroupRewards` of one source."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}  # by rollout
        self._closing: set[asyncio.Task[None]] = set()

    def keep(self, rollout_id: str, waiting: Waiting) -> None:
        self._waiting[rollout_id] = waiting

    def has(self, rollout_id: str) -> bool:
        return rollout_id in self._waiting

    async def score(self, rollout_ids: Sequence[str]) -> list[GroupScore]:
        """Raises RewardFailed, EnvironmentFault."""
        waiting = [self._waiting[rollout_id] for rollout_id in rollout_ids]
        rewards, samples = waiting[0].rewards, [each.sample for each in waiting]
        thread, columns = OwnThread("rewards of a group"), {}
        try:
            for function in rewards.functions:
                columns[function.name] = await function.score(samples, thread.call)
        finally:
            thread.close()
        return [
            GroupScore(
                Scores({name: values[at] for name, values in columns.items()} | dict(each.own), rewards.weights),
                each.sample.metrics,
            )
            for at, each in enumerate(waiting)
        ]

    async def drop(self, rollout_ids: Sequence[str]) -> None:
        found = [self._waiting.pop(rollout_id, None) for rollout_id in rollout_ids]
        closing = [asyncio.create_task(each.held.close()) for each in found if each is not None]
        self._closing.update(closing)
        for task in closing:
            task.add_done_callback(self._closing.discard)
        if closing:
            _, late = await asyncio.wait(closing, timeout=CLOSE_S)
            if late:
                log.warning("%d instances whose group is over were not closed within %.0f s", len(late), CLOSE_S)

    async def close(self) -> None:
        await self.drop(list(self._waiting))

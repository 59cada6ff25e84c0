"""Scores a group's rollouts together, where a white-box source's rewards compare siblings (`loops.base.GroupRewards`).

Owns what each rollout is told of it. What cannot be scored stays unscored, which is not 0: a group that a reward
function fails on has no scored rollout, and is dropped like any other. Called by `slots`; a source's is made by
`white_box_run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from harness_trainer.loops.base import GroupRewards, Source
from harness_trainer.rollouts.types import RolloutResult
from harness_trainer.rollouts.white_box import take_facts, take_scores
from harness_trainer.tasks.base import DEFAULT_TIMEOUT_S

log = logging.getLogger("harness_trainer.rollouts")


class GroupScores(Protocol):
    """What `slots` asks of a source whose rollouts may end with `awaits_group`."""

    async def score(self, results: Sequence[RolloutResult]) -> None:
        """Fill in the rewards of these siblings, in the order of their slots. Raises nothing but cancellation."""
        ...

    async def drop(self, results: Sequence[RolloutResult]) -> None:
        """They will not be scored."""
        ...


def group_scores_of(source: Source) -> GroupScores | None:
    """None = each of its rollouts is scored by itself."""
    rewards = source.group_rewards
    return None if rewards is None else WhiteBoxGroupScores(rewards, DEFAULT_TIMEOUT_S)


class WhiteBoxGroupScores:
    """`limit_s` bounds one group's scoring."""

    def __init__(self, rewards: GroupRewards, limit_s: float) -> None:
        self._rewards = rewards
        self._limit_s = limit_s

    async def score(self, results: Sequence[RolloutResult]) -> None:
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                scored = await self._rewards.score([result.rollout_id for result in results])
        except (Exception, SystemExit) as error:  # whatever a person's function raises
            finding = f"reward_failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if limit.expired():
                finding = f"reward_timeout: scoring the group took more than {self._limit_s:.0f} s"
            log.warning("group %d stays unscored: %s", results[0].group_id, finding)
            for result in results:
                result.awaits_group, result.rewards = False, {}
                result.findings.append(f"reward: warning {finding}")
        else:
            for result, score in zip(results, scored, strict=True):
                result.awaits_group = False
                take_scores(result, score.scores)
                take_facts(result, {**result.facts, **score.facts})
        finally:
            await self.drop(results)

    async def drop(self, results: Sequence[RolloutResult]) -> None:
        await self._rewards.drop([result.rollout_id for result in results])

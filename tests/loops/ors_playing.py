"""Opens ORS environments and plays single episodes of them without a model, for the tests of ORS."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from harness_trainer.environments import OrsConfig
from harness_trainer.loops.base import LoopLimits, Scores
from harness_trainer.loops.ors.environment import OrsEnvironment
from harness_trainer.loops.ors.episode import OrsEpisode
from harness_trainer.loops.tool_loop import Ended, run_episode
from tests.loops.playing import SayingModel


def ors(url: str, env_name: str | None = None, **settings: Any) -> OrsEnvironment:
    return OrsEnvironment(OrsConfig(target=url, env_name=env_name, **settings))


@contextlib.asynccontextmanager
async def episode(environment: OrsEnvironment, number: int = 0) -> AsyncIterator[OrsEpisode]:
    """An episode of the open environment's task of this number, not started."""
    task = (await environment.tasks())[number]
    async with environment.episode(task, f"g0-{number}-a") as one:
        yield one


async def called(one: OrsEpisode, name: str, **arguments: Any) -> Any:
    """What the tool answers."""
    (tool,) = [tool for tool in one.tools if tool.name == name]
    return await tool.call(arguments)


async def played(environment: OrsEnvironment, *said: Any, number: int = 0, **limits: Any) -> tuple[Ended, Scores]:
    """One whole episode with a model that says this."""
    async with environment, episode(environment, number) as one:
        model = SayingModel(*said)
        ended = await run_episode(one, await one.start(), model, LoopLimits(**limits))
        return ended, await one.rewards(ended.transcript)

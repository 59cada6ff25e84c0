"""Opens environment classes and plays single episodes of them without a model, for the tests of environment classes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from harness_trainer.environments import EnvironmentClassConfig
from harness_trainer.loops.base import Message, Reply, Scores, Transcript
from harness_trainer.loops.class_episode import ClassEpisode
from harness_trainer.loops.environment_class import ClassEnvironment

GUIDE = Path(__file__).with_name("guide_classes.py")
PROMPT: list[Message] = [{"role": "user", "content": "Play. "}]
CLASS = "Env"  # of the sources that `written` writes


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or ({"prompt": PROMPT},)))
    return path


def guide(folder: Path, name: str, *rewards: str, rows: Any = (), **settings: Any) -> ClassEnvironment:
    """A class of `guide_classes` with functions of it."""
    settings["rewards"] = [f"{GUIDE}:{reward}" for reward in rewards]
    return ClassEnvironment(EnvironmentClassConfig(target=f"{GUIDE}:{name}", **settings), write_rows(folder, *rows))


def written(folder: Path, source: str, *rewards: str, rows: Any = (), name: str = CLASS, **settings: Any) -> Any:
    """The class `Env` of this source, and functions of it."""
    path = folder / "env.py"
    path.write_text(source)
    settings["rewards"] = [f"{path}:{reward}" for reward in rewards]
    return ClassEnvironment(EnvironmentClassConfig(target=f"{path}:{name}", **settings), write_rows(folder, *rows))


@contextlib.asynccontextmanager
async def episode(
    environment: ClassEnvironment, number: int = 0, rollout_id: str = "g0-0-a"
) -> AsyncIterator[ClassEpisode]:
    """An episode of the open environment's row of this number, which is not started."""
    task = (await environment.tasks())[number]
    async with environment.episode(task, rollout_id) as one:
        yield one


async def called(one: ClassEpisode, name: str, **arguments: Any) -> Any:
    """What the model would be told."""
    (tool,) = [tool for tool in one.tools if tool.name == name]
    return (await tool.call(arguments)).content


async def played(environment: ClassEnvironment, *calls: tuple[str, dict[str, Any]], number: int = 0) -> Scores:
    """One whole episode of these calls; what it earned."""
    async with environment, episode(environment, number) as one:
        opening = await one.start()
        for name, arguments in calls:
            await called(one, name, **arguments)
        return await one.rewards(over(opening))


def over(opening: list[Message]) -> Transcript:
    """A conversation of one call."""
    call = {"id": "c1", "type": "function", "function": {"name": "echo", "arguments": '{"message": "hi"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "name": "echo", "content": "hi", "tool_call_id": "c1"}
    return Transcript(opening, [message, told], [Reply(message, "tool_calls", 3, 2, "t0", (1, 2, 3), (4, 5))])

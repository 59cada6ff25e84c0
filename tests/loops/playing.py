"""Plays white-box rollouts with everything real but the engine and the environment, for the tests of loops."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from capture_proxy.engines.base import Engine
from capture_proxy.gate import Gate
from capture_proxy.pipeline import Pipeline
from capture_proxy.rendering import Bridging
from capture_proxy.store import Store
from harness_trainer.loops.base import ROW, Message, Reply, Scores, Tool, ToolReply, Transcript
from harness_trainer.loops.places import Places
from harness_trainer.loops.tool_loop import ToolLoop
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.model_side import ModelSide
from harness_trainer.rollouts.types import Job, RolloutResult
from harness_trainer.rollouts.white_box import WhiteBoxMeans, run_rollout
from harness_trainer.tasks import Task

OPENING: list[Message] = [{"role": "user", "content": "Play."}]
TASK = Task("game", Path("rows.jsonl"), "Play.", metadata={ROW: {"prompt": "Play."}})


def tool(name: str, call: Callable[[dict[str, Any]], Awaitable[ToolReply]], **properties: str) -> Tool:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return Tool(name, f"The tool {name}.", parameters, call)


async def _guess(arguments: dict[str, Any]) -> ToolReply:
    return ToolReply(f"no, not {arguments['word']}")


GUESS = tool("guess", _guess, word="string")


class Game:
    """An episode of these tools that earns `earned`, and says what was done with it."""

    def __init__(self, tools: Sequence[Tool] = (GUESS,), earned: Any = 1.0, opening: Any = OPENING) -> None:
        self.tools = list(tools)
        self.done = False
        self.facts = {"guesses": 2.0}
        self.events: list[str] = []
        self.transcript: Transcript | None = None
        self._earned, self._opening = earned, opening

    async def start(self) -> list[Message]:
        self.events.append("start")
        if isinstance(self._opening, BaseException):
            raise self._opening
        return list(self._opening)

    async def rewards(self, transcript: Transcript) -> Scores:
        self.events.append("rewards")
        self.transcript = transcript
        if isinstance(self._earned, BaseException):
            raise self._earned
        return self._earned if isinstance(self._earned, Scores) else Scores({"game": self._earned})


class Arcade:
    """An environment that gives the episodes that `make` makes; a lock on how many are open shows in `most_open`."""

    def __init__(self, make: Callable[[], Any] = Game, max_episodes: int | None = None) -> None:
        self.name, self.max_episodes = "arcade", max_episodes
        self.games: list[Any] = []
        self.num_open = self.most_open = 0
        self._make = make

    async def __aenter__(self) -> Arcade:
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self.num_open == 0, "every episode is closed before its environment"

    async def tasks(self) -> list[Task]:
        return [TASK]

    @contextlib.asynccontextmanager
    async def episode(self, task: Task, rollout_id: str) -> AsyncIterator[Any]:
        game = self._make()
        if isinstance(game, BaseException):
            raise game
        self.games.append(game)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            yield game
        finally:
            self.num_open -= 1
            game.events.append("closed")


class SayingModel:
    """A `Model` that gives these messages in order, each of 10 tokens on a prompt of 5 a message."""

    def __init__(self, *messages: Message | BaseException) -> None:
        self.asked: list[list[Message]] = []
        self.tools: list[Any] = []
        self.caps: list[int | None] = []
        self._messages = list(messages)

    async def chat(
        self, messages: Sequence[Message], tools: Any = (), *, max_tokens: int | None = None, **sampling: Any
    ) -> Reply:
        self.asked.append(list(messages))
        self.tools.append(tools)
        self.caps.append(max_tokens)
        said = self._messages[min(len(self.asked) - 1, len(self._messages) - 1)]
        if isinstance(said, BaseException):
            raise said
        finish = said.get("finish") or ("tool_calls" if said.get("tool_calls") else "stop")
        message = {key: value for key, value in said.items() if key != "finish"}
        num_tokens = 10 if max_tokens is None else min(10, max_tokens)
        return Reply(message, finish, 5 * len(messages), num_tokens, f"t{len(self.asked)}")

    async def count(self, messages: Sequence[Message], tools: Any = ()) -> int:
        return 5 * len(messages)


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def calls(*functions: tuple[str, Any]) -> Message:
    """Arguments that are no text are written as JSON."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": name, "arguments": args if isinstance(args, str) else json.dumps(args)},
            }
            for i, (name, args) in enumerate(functions)
        ],
    }


@contextlib.asynccontextmanager
async def model_side(
    engine: Engine, store: Path, *, bridging: Bridging | None = None, gate: Gate | None = None
) -> AsyncIterator[ModelSide]:
    pipeline = Pipeline(
        engine,
        Store.open(store),
        hang_up_grace_s=0.0,
        bridging=bridging or Bridging(),
        gate=gate or Gate(),
        restarted=False,
    )
    async with pipeline.running():
        await pipeline.bridger.ready()
        yield ModelSide(pipeline, "m")


@contextlib.asynccontextmanager
async def playing(engine: Engine, source: Any, folder: Path, **settings: Any) -> AsyncIterator[WhiteBoxMeans]:
    """What the rollouts of a runner share; an environment is put under the tool loop."""
    if hasattr(source, "episode"):
        source = ToolLoop(source, getattr(source, "group_rewards", None))
    config = RolloutConfig(**{"max_tokens": 2048, "timeout_s": 30, **settings})
    async with source, model_side(engine, folder / "store.sqlite") as side:
        yield WhiteBoxMeans(config, side, {source.name: source}, {source.name: Places(source.max_episodes)})


async def play(engine: Engine, source: Any, folder: Path, *, task: Task = TASK, **settings: Any) -> RolloutResult:
    async with playing(engine, source, folder, **settings) as means:
        return await run_rollout(job(next(iter(means.sources)), task=task), means)


def job(source: str, rollout_id: str = "g0-0-a", task: Task = TASK) -> Job:
    return Job(rollout_id, 0, 0, task, harness=source)

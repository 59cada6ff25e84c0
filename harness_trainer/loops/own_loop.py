"""A person's own loop as a source of rollouts: one class that is given a task and the model.

    class MyLoop:
        async def run(self, task, model):                       # or: def run(self, task, model)
            reply = await model.chat([{"role": "user", "content": task.metadata["row"]["prompt"]}])
            return float("moon" in (reply.message["content"] or ""))

`run` gives the reward: a number, {"name": number or None, ...} of which the sum counts, or None for a rollout that is
unscored (out of its group's baseline, not 0). `model` is `loops.base.Model`; where `run` is not async it is the same
without await (`SyncModel`). It may make any calls in any order, also several conversations: each is recorded, and all
that is not a side call is trained. What `model` raises at a limit should be let through: the rollout is then truncated,
with the reward unknown unless `run` catches SessionClosed and gives one. Anything else that `run` raises is the loop's
own failure: AGENT_FAILED, unscored, not tried again. `loops.base.EpisodeLost` says that the machinery failed: it is.

Owns loading the class, one instance per rollout, and reading its answer. Tasks are rows of a JSONL file (`rows`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from capture_proxy.errors import BadRequest, CaptureError, PromptTooLong, SessionClosed
from harness_trainer.errors import HarnessTrainerError
from harness_trainer.loops.base import (
    Begin,
    EnvironmentFault,
    EpisodeLost,
    GroupRewards,
    LoopLimits,
    Message,
    Model,
    Played,
    Reply,
    Scores,
    Stages,
)
from harness_trainer.loops.rows import load_rows
from harness_trainer.loops.tool_loop import DEADLINE, STOP, WINDOW
from harness_trainer.own_thread import OwnThread
from harness_trainer.tasks import Task

log = logging.getLogger("harness_trainer.loops")

FAILED = "failed"
_GRACE_S = 2.0  # after the session's own deadline, which ends a call of the model in time


class OwnLoop:
    """`loops.base.Source` of a class. Raises EnvironmentFault when it cannot be one."""

    def __init__(self, loop: type, rows: Path, name: str | None = None) -> None:
        self.name = name or loop.__name__
        self.max_episodes: int | None = None
        self.group_rewards: GroupRewards | None = None
        self._loop = loop
        self._rows = rows
        _check(loop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def tasks(self) -> list[Task]:
        return await asyncio.to_thread(load_rows, self._rows)

    async def play(self, task: Task, rollout_id: str, begin: Begin, limits: LoopLimits, stages: Stages) -> Played:
        thread = OwnThread(f"loop of {rollout_id}")
        limit = asyncio.timeout(stages.agent_s + _GRACE_S)
        try:
            async with stages.timed("agent"), limit:
                return _read(await self._run(thread, task, await begin()))
        except SessionClosed as closed:
            return Played(closed.limit)
        except PromptTooLong:
            return Played(WINDOW)
        except (Exception, SystemExit) as error:  # whatever a person's code raises
            theirs = not isinstance(error, EpisodeLost | HarnessTrainerError | CaptureError)
            if not theirs and not isinstance(error, BadRequest):
                raise
            if limit.expired():
                return Played(DEADLINE)
            log.warning("the loop %s failed in rollout %s", self.name, rollout_id, exc_info=error)
            return Played(FAILED, failure=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            thread.close()

    async def _run(self, thread: OwnThread, task: Task, model: Model) -> Any:
        loop = await thread.run(self._loop)
        if inspect.iscoroutinefunction(loop.run):
            return await loop.run(task, model)
        return await thread.call(loop.run, task, SyncModel(model, asyncio.get_running_loop()))


class SyncModel:
    """The model for a loop that is not async: blocks the loop's own thread until the reply is there."""

    def __init__(self, model: Model, loop: asyncio.AbstractEventLoop) -> None:
        self._model, self._loop = model, loop

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        **sampling: Any,
    ) -> Reply:
        call = self._model.chat(messages, tools, max_tokens=max_tokens, **sampling)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        return asyncio.run_coroutine_threadsafe(self._model.count(messages, tools), self._loop).result()


def _check(loop: type) -> None:
    run = getattr(loop, "run", None)
    if not inspect.isclass(loop) or not callable(run):
        raise EnvironmentFault(
            f"{getattr(loop, '__name__', loop)!r} is no loop: write a class with run(self, task, model)"
        )
    try:
        inspect.signature(run).bind(None, None, None)
        inspect.signature(loop).bind()
    except TypeError as error:
        raise EnvironmentFault(
            f"{loop.__name__}: {error}; it is made without arguments, and run(self, task, model) takes these two"
        ) from error


def _read(value: Any) -> Played:
    """What `run` gave. Raises ValueError for what is no reward."""
    if value is None:
        return Played(STOP)
    named = dict(value) if isinstance(value, Mapping) else {"reward": value}
    by_name = {str(name): _number(name, reward) for name, reward in named.items()}
    return Played(STOP, Scores(by_name))


def _number(name: object, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
        raise ValueError(f"run gave {value!r} as {name}, which is no finite number (and not None)")
    return float(value)

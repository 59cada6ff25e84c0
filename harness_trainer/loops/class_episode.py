"""One episode of an environment class: an instance from `reset` to its rewards.

Owns the calls of the person's methods and what their answers come to. What `reset` says is put behind the last message
of the prompt, as TRL puts it; a row without a prompt begins with an empty one. What a tool raises is its reply to the
model. Any method may be async: it then runs in the runner's loop, all others of an instance in one thread of its own.
Called by `environment_class`, which makes the instances.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness_trainer.loops.base import (
    EnvironmentFault,
    EpisodeLost,
    Message,
    Scores,
    SetupFailure,
    Tool,
    ToolReply,
    Transcript,
)
from harness_trainer.loops.class_kinds import Kind, Method
from harness_trainer.loops.contents import as_content
from harness_trainer.loops.held_clients import clients_of, close_client, replaced, session_lost, sockets_of
from harness_trainer.loops.own_thread import OwnThread
from harness_trainer.loops.reward_functions import RewardFailed, RewardFunction, Sample, read_reward
from harness_trainer.loops.rows import prompt_of

log = logging.getLogger("harness_trainer.loops")


@dataclass(slots=True)
class Held:
    """An instance and the thread that it lives in."""

    kind: Kind
    instance: Any
    thread: OwnThread
    spoiled: bool = False  # its episode was lost, or left a call running: it must not be used again

    async def close(self) -> None:
        """Every part of it, whatever the others do. What goes wrong is logged: the episode has its result."""
        try:
            await self._attempt(self._close_instance)
            for client in clients_of(self.instance):
                await self._attempt(partial(close_client, client, self.thread))
        finally:
            self.thread.close()

    async def _close_instance(self) -> None:
        if self.kind.closer is not None:
            nothing = (None, None, None) if self.kind.closer.startswith("__") else ()
            await self.thread.call(getattr(self.instance, self.kind.closer), *nothing)

    async def _attempt(self, end: Callable[[], Awaitable[object]]) -> None:
        try:
            await end()
        except Exception as error:  # whatever a person's code raises
            log.warning("an instance of %s was not closed well: %s: %s", self.kind.name, type(error).__name__, error)


@dataclass(frozen=True, slots=True)
class Rewards:
    functions: list[RewardFunction]
    weights: Mapping[str, float]
    own: Mapping[str, str]  # what the `get_reward` of a class is called, by the class's name


class ClassEpisode:
    """`loops.base.Episode` of an instance."""

    def __init__(
        self, held: Held, row: dict[str, Any], columns: dict[str, Any], rewards: Rewards, stop_when_done: bool
    ) -> None:
        self.tools = [
            Tool(method.name, method.description, method.parameters, partial(self._call, method))
            for method in held.kind.methods
        ]
        self.facts: dict[str, float] = {}
        self._held = held
        self._row = row
        self._columns = columns
        self._rewards = rewards
        self._stop_when_done = stop_when_done

    @property
    def done(self) -> bool:
        return self._stop_when_done and bool(getattr(self._held.instance, "done", False))

    async def start(self) -> list[Message]:
        prompt = prompt_of(self._columns)
        try:
            said = await self._guarded(self._held.instance.reset, dict(self._columns))
        except EpisodeLost:
            raise
        except Exception as error:  # whatever a person's code raises
            self._held.spoiled = True
            where = f"{self._held.kind.name}.reset"
            raise SetupFailure(f"{where} raised {type(error).__name__}: {error}") from error
        return opening(prompt, said, f"{self._held.kind.name}.reset")

    async def rewards(self, transcript: Transcript) -> Scores:
        """Raises RewardFailed, EpisodeLost, EnvironmentFault."""
        held, named = self._held, self._rewards
        sample = Sample(held.instance, self._row, transcript, self.facts)
        by_name: dict[str, float | None] = {}
        for function in named.functions:
            try:
                (by_name[function.name],) = await function.score([sample], held.thread.call)
            except RewardFailed as error:
                if not session_lost(error):
                    raise
                raise EpisodeLost(str(error)) from error  # it asked an environment that is gone
        if held.kind.rewards:
            by_name[named.own[held.kind.name]] = await self._own_reward()
        return Scores(by_name, named.weights)

    async def _own_reward(self) -> float | None:
        who = f"{self._held.kind.name}.get_reward"
        try:
            value = await self._guarded(self._held.instance.get_reward, {})
        except EpisodeLost:
            raise
        except Exception as error:  # whatever a person's code raises
            raise RewardFailed(f"{who} raised {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        return read_reward(who, value)

    async def _call(self, method: Method, arguments: dict[str, Any]) -> ToolReply:
        """Raises what the tool does."""
        try:
            method.signature.bind(**arguments)
        except TypeError as error:
            raise TypeError(f"{method.name}: {error}") from None
        value = await self._guarded(getattr(self._held.instance, method.member), arguments)
        return ToolReply(as_content(value), done=self.done)

    async def _guarded(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call it. Raises EpisodeLost where the session is gone, or was silently replaced; else what it raises."""
        held = self._held
        # `reset` begins a game, on whatever connection it likes.
        sockets = [] if function == held.instance.reset else sockets_of(held.instance)
        try:
            value = await held.thread.call(function, **arguments)
        except asyncio.CancelledError:
            held.spoiled = True
            raise
        except Exception as error:  # whatever a person's code raises
            if not session_lost(error) and not replaced(sockets):
                raise
            held.spoiled = True
            raise EpisodeLost(f"{held.kind.name}: {type(error).__name__}: {error}") from error
        if replaced(sockets):
            held.spoiled = True
            raise EpisodeLost(f"a client of {held.kind.name} lost its session and was connected to a fresh one")
        return value


def opening(prompt: list[Message], said: Any, where: str) -> list[Message]:
    """The prompt with what `reset` said behind its last message, as TRL puts it there."""
    if said is None or (isinstance(said, str | list) and not said):
        if not any(message.get("content") for message in prompt):
            raise EnvironmentFault(
                f"the row has no prompt and {where} gave nothing: add a column `prompt`, or return an observation"
            )
        return prompt
    last = prompt[-1]
    content = last.get("content") or ""
    if isinstance(said, list):
        said = as_content(said)
        if isinstance(said, str):
            raise EnvironmentFault(f"{where} gave a list that holds no content parts: give text, parts or None")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
        return [*prompt[:-1], {**last, "content": [*parts, *said]}]
    if not isinstance(said, str):
        raise EnvironmentFault(f"{where} gave {type(said).__name__}: it must return text, content parts or None")
    added = content + said if isinstance(content, str) else [*content, {"type": "text", "text": said}]
    return [*prompt[:-1], {**last, "content": added}]

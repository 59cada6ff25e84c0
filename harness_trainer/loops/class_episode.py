"""One episode of an environment class: an instance from `reset` to its rewards.

Owns the calls of the person's methods and what their answers come to. What `reset` says is put behind the last message
of the prompt, as TRL puts it; a row without a prompt begins with an empty one. What a tool raises is its reply to the
model. Any method may be async: it then runs in the runner's loop, all others of an instance in one thread of its own.
Called by `environment_class`, which makes the instances.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness_trainer.loops.base import (
    EnvironmentFault,
    EpisodeLost,
    Message,
    NoPlace,
    Scores,
    SetupFailure,
    Tool,
    ToolReply,
    Transcript,
)
from harness_trainer.loops.class_kinds import Method
from harness_trainer.loops.contents import as_content, error_content
from harness_trainer.loops.group_rewards import KeptEpisodes, Waiting
from harness_trainer.loops.held_clients import (
    clients_of,
    ended_by_action,
    max_sessions,
    replaced,
    session_lost,
    sockets_of,
)
from harness_trainer.loops.held_instance import Held
from harness_trainer.loops.openenv.session import ENDED_OVER_IT, SessionSpent
from harness_trainer.loops.places import Places, pauses
from harness_trainer.loops.reward_functions import RewardFailed, RewardFunction, Rewards, Sample, read_reward
from harness_trainer.loops.rows import prompt_of

log = logging.getLogger("harness_trainer.loops")


@dataclass(frozen=True, slots=True)
class Rules:
    """What all episodes of a source share."""

    rewards: Rewards
    stop_when_done: bool
    capacity_patience_s: float = 0.0  # for a place on a server of its clients' that has none left
    places: Places | None = None  # to be told what the server of the class's clients allows; None = of several classes
    kept: KeptEpisodes | None = None  # reward functions judge whole groups; None = each episode by itself


class ClassEpisode:
    """`loops.base.Episode` of an instance."""

    def __init__(self, rollout_id: str, held: Held, row: dict[str, Any], columns: dict[str, Any], rules: Rules) -> None:
        self.tools = [
            Tool(method.name, method.description, method.parameters, partial(self._call, method))
            for method in held.kind.methods
        ]
        self.facts: dict[str, float] = {}
        self._rollout_id = rollout_id
        self._held = held
        self._row = row
        self._columns = columns
        self._rules = rules
        self._is_ended = False  # the server ended the session over an action

    @property
    def done(self) -> bool:
        return self._is_ended or (self._rules.stop_when_done and bool(getattr(self._held.instance, "done", False)))

    async def start(self) -> list[Message]:
        prompt = prompt_of(self._columns)
        try:
            said = await self._reset()
        except EpisodeLost:
            raise
        except Exception as error:  # whatever a person's code raises
            self._held.spoiled = True
            where = f"{self._held.kind.name}.reset"
            raise SetupFailure(f"{where} raised {type(error).__name__}: {error}") from error
        return opening(prompt, said, f"{self._held.kind.name}.reset")

    async def _reset(self) -> Any:
        """A full server is asked again, with back-off: `reset` makes an instance ready however often it is called."""
        held, waits = self._held, pauses(self._rules.capacity_patience_s)
        refused: list[Any] = []  # clients
        while True:
            try:
                said = await self._guarded(held.instance.reset, dict(self._columns))
                held.spoiled = False
                return said
            except EpisodeLost as error:
                self._note_refusal(error)
                if max_sessions(error) is None or (pause_s := next(waits, None)) is None:
                    raise
            finally:
                await held.end_replaced(refused)
            refused = clients_of(held.instance)
            await asyncio.sleep(pause_s)  # in our place: whoever holds the server's own is not of this source

    def _note_refusal(self, error: EpisodeLost) -> None:
        """Raises NoPlace where the server has fewer places than there are episodes of this run."""
        places = self._rules.places
        if places is None or (most := max_sessions(error)) is None:
            return
        if places.learn(most):
            log.info("the server of %s allows %d sessions: the others wait for a place", self._held.kind.name, most)
        if places.too_many:
            raise NoPlace(str(error)) from error

    async def rewards(self, transcript: Transcript) -> Scores:
        """Raises RewardFailed, EpisodeLost, EnvironmentFault."""
        held, rewards, kept = self._held, self._rules.rewards, self._rules.kept
        sample = Sample(held.instance, self._row, transcript, self.facts)
        by_name: dict[str, float | None] = {}
        for function in rewards.functions if kept is None else ():
            (by_name[function.name],) = await self._judged(function, sample)
        own = {rewards.own[held.kind.name]: await self._own_reward()} if held.kind.rewards else {}
        if kept is None:
            return Scores(by_name | own, rewards.weights)
        kept.keep(self._rollout_id, Waiting(held, rewards, sample, own))
        return Scores(own, rewards.weights, awaits_group=True)

    async def _judged(self, function: RewardFunction, sample: Sample) -> list[float | None]:
        try:
            return await function.score([sample], self._held.thread.call)
        except RewardFailed as error:
            if self._is_ended or not session_lost(error):
                raise
            raise EpisodeLost(str(error)) from error  # it asked an environment that is gone

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
        try:
            value = await self._guarded(getattr(self._held.instance, method.member), arguments)
        except SessionSpent as error:
            return ToolReply(error_content(str(error)), failed=True, done=True)
        return ToolReply(as_content(value), done=self.done)

    async def _guarded(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call it. Raises EpisodeLost where the session is gone, or was silently replaced; else what it raises.

        SessionSpent where the policy's own action was the end of the session: what it earned until then counts.
        """
        held = self._held
        # `reset` begins a game, on whatever connection it likes.
        sockets = [] if function == held.instance.reset else sockets_of(held.instance)
        try:
            value = await held.thread.call(function, **arguments)
        except asyncio.CancelledError:
            held.spoiled = True
            raise
        except Exception as error:  # whatever a person's code raises
            if ended_by_action(error):
                held.spoiled = self._is_ended = True
                raise SessionSpent(ENDED_OVER_IT) from error
            if not session_lost(error) and not replaced(sockets):
                raise
            raise self._gone(f"{held.kind.name}: {type(error).__name__}: {error}") from error
        if replaced(sockets):
            raise self._gone(f"a client of {held.kind.name} lost its session and was connected to a fresh one")
        return value

    def _gone(self, why: str) -> Exception:
        self._held.spoiled = True
        if self._is_ended:
            return SessionSpent(f"{self._held.kind.name} was asked after its session had ended over an invalid action")
        return EpisodeLost(why)


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

"""The turns of an episode: ask the model, run the tools that it calls, until one of the two is done or a limit is met.

Owns the order of turns, every limit on them, and what the model is told of a call that went wrong. What a call does is
the environment's, what a turn records the model's (`endpoint`).

**Calls.** Those of one reply run one after the other, in its order, because an environment has one state; each gets a
message of its own, as TRL words it. Arguments that are no JSON object, a name that is no tool of the episode (`reset`
and private methods never are), whatever a tool raises: all that is the tool's reply to the model.

**The budget** `max_completion_tokens` is TRL's `max_completion_length`: all tokens after the episode's first prompt,
the model's and the tools' together, whatever the number of turns. No call may sample beyond it. Results that do not fit
any more are never shown to the model: the episode ends before them. Where the engine does not tell how long a prompt
is, only what was sampled counts.

**Rounds.** After `max_tool_calling_iterations` rounds of calls the model is asked once more; if it calls again, the
episode ends there, as in TRL, and counts as cut short.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from capture_proxy.errors import PromptTooLong, SessionClosed
from harness_trainer.errors import HarnessTrainerError
from harness_trainer.loops.base import (
    Begin,
    Environment,
    Episode,
    EpisodeLost,
    GroupRewards,
    LoopLimits,
    Message,
    Model,
    Played,
    Reply,
    Scores,
    SetupFailure,
    Stages,
    Tool,
    ToolReply,
    ToolUse,
    Transcript,
)
from harness_trainer.loops.contents import bounded, error_content
from harness_trainer.tasks import Task

log = logging.getLogger("harness_trainer.loops")

BUDGET, ROUNDS, DEADLINE, WINDOW, CUT = (
    "max_completion_tokens",
    "max_tool_calling_iterations",
    "deadline",
    "context_length",
    "length",
)
STOP, DONE = "stop", "done"  # the model called no tool; the environment said that it is over
CLOSE_S = 10.0  # to close an episode; its rollout has its result already
_MESSAGE_TOKENS = 64  # more than any template puts around one message
_MANY = 2**40


@dataclass(slots=True)
class Ended:
    """How the turns of an episode ended."""

    how: str  # STOP, DONE or the limit that was met
    transcript: Transcript
    num_calls: Counter[str] = field(default_factory=Counter)  # by the name that the model gave
    num_failures: Counter[str] = field(default_factory=Counter)  # answered with an error
    use: ToolUse = field(default_factory=ToolUse)


class ToolLoop:
    """`loops.base.Source` of an environment: its episodes, driven by the model's tool calls."""

    def __init__(self, environment: Environment, group_rewards: GroupRewards | None = None) -> None:
        self.group_rewards = group_rewards
        self._environment = environment

    @property
    def name(self) -> str:
        return self._environment.name

    @property
    def max_episodes(self) -> int | None:
        return self._environment.max_episodes

    async def __aenter__(self) -> Self:
        await self._environment.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._environment.__aexit__(kind, error, trace)

    async def tasks(self) -> list[Task]:
        return await self._environment.tasks()

    async def play(self, task: Task, rollout_id: str, begin: Begin, limits: LoopLimits, stages: Stages) -> Played:
        async with AsyncExitStack() as stack:
            async with stages.timed("create", min(limits.start_timeout_s, stages.left_s)):
                episode = await stack.enter_async_context(self._episode(task, rollout_id, stages))
            async with stages.timed("setup", min(limits.start_timeout_s, stages.left_s)):
                opening = await _set_up(episode)
            time_s = stages.agent_s
            async with stages.timed("agent"):
                ended = await run_episode(episode, opening, await begin(), limits, time_s=time_s)
            played = Played(ended.how, num_calls=dict(ended.num_calls), num_failures=dict(ended.num_failures))
            played.tool_use = ended.use
            async with stages.timed("verify"):
                played.scores, finding = await _scored(episode, ended.transcript, stages.tests_s)
            played.facts = {name: float(value) for name, value in episode.facts.items()}
            played.findings += [finding] if finding else []
        return played

    @asynccontextmanager
    async def _episode(self, task: Task, rollout_id: str, stages: Stages) -> AsyncIterator[Episode]:
        """Closing it takes no longer than CLOSE_S and spoils no result."""
        context = self._environment.episode(task, rollout_id)
        episode = await context.__aenter__()
        try:
            yield episode
        finally:
            stage, closing = stages.stage, asyncio.ensure_future(_closed(context))
            try:
                async with stages.timed("stop"):
                    await asyncio.wait([closing], timeout=CLOSE_S)
            finally:
                stages.stage = stage  # the one that failed, if one did
                closing.cancel()  # of no effect on one that is done
                closing.add_done_callback(lambda done: _report_closing(rollout_id, done))


async def run_episode(
    episode: Episode, opening: Sequence[Message], model: Model, limits: LoopLimits, *, time_s: float | None = None
) -> Ended:
    """The turns of an episode that was started. `time_s` bounds its tools; the session's deadline bounds the model.

    Raises EpisodeLost, EnvironmentFault, and CaptureError of the model side but for limits, which are ends.
    """
    turns = _Turns(episode, [_shown(message, limits) for message in opening], model, limits, time_s)
    ended = turns.ended
    try:
        ended.how = await turns.run()
    except SessionClosed as closed:
        ended.how = closed.limit
    except PromptTooLong:
        ended.how = WINDOW
    except _OutOfTime:
        ended.how = DEADLINE
    return ended


class _OutOfTime(Exception):
    """A tool was still at work when the rollout's time for turns was over."""


class _Turns:
    """The state of one run through the loop."""

    def __init__(
        self, episode: Episode, opening: list[Message], model: Model, limits: LoopLimits, time_s: float | None
    ) -> None:
        self.ended = Ended(STOP, Transcript(opening))
        self._episode = episode
        self._model = model
        self._limits = limits
        self._tools: dict[str, Tool] = {tool.name: tool for tool in episode.tools}
        self._specs = [tool.spec() for tool in self._tools.values()]
        self._messages = list(opening)
        self._until = None if time_s is None else asyncio.get_running_loop().time() + time_s
        self._num_unseen = 0  # at most so many tokens are in messages that no reply has told the length of yet

    async def run(self) -> str:
        use, most_rounds = self.ended.use, self._limits.max_tool_calling_iterations
        while not self._episode.done:
            room = await self._room()
            if room is not None and room <= 0:
                return BUDGET
            reply = await self._model.chat(self._messages, self._specs, max_tokens=room)
            self._take(reply)
            calls = reply.message.get("tool_calls") or []
            if not calls:
                if reply.finish_reason != "length":
                    return STOP
                return BUDGET if room is not None and reply.num_completion_tokens >= room else CUT
            if most_rounds is not None and use.num_rounds >= most_rounds:
                use.exhausted = True
                return ROUNDS
            use.num_rounds += 1
            for call in calls:
                if (await self._answer(call)).done:
                    return DONE
        return DONE

    def _take(self, reply: Reply) -> None:
        transcript = self.ended.transcript
        transcript.replies.append(reply)
        transcript.completion.append(reply.message)
        self._messages.append(reply.message)
        self._num_unseen = 0

    async def _room(self) -> int | None:
        """What the next call may sample by the episode's budget; None = the session's own limit is nearer, or all."""
        budget, replies = self._limits.max_completion_tokens, self.ended.transcript.replies
        if budget is None or not replies:
            return budget
        first, last = replies[0], replies[-1]
        if not first.num_prompt_tokens or not last.num_prompt_tokens:
            return budget - sum(reply.num_completion_tokens for reply in replies)
        left = budget - (last.num_prompt_tokens + last.num_completion_tokens - first.num_prompt_tokens)
        most = self._limits.max_tokens
        if left <= 0:
            return left
        if most is not None and left - self._num_unseen >= most:
            return None
        return budget - (await self._model.count(self._messages, self._specs) - first.num_prompt_tokens)

    async def _answer(self, call: Mapping[str, Any]) -> ToolReply:
        """Run one call and put its result into the conversation."""
        raw = call.get("function")
        function: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
        name = str(function.get("name") or "")
        self.ended.num_calls[name] += 1
        reply = await self._result(name, function.get("arguments"))
        self.ended.num_failures[name] += reply.failed
        content = bounded(reply.content, max_chars=self._limits.max_tool_chars, images=self._limits.images)
        message: Message = {"role": "tool", "name": name, "content": content}
        if call.get("id"):
            message["tool_call_id"] = call["id"]
        self._messages.append(message)
        self.ended.transcript.completion.append(message)
        self._num_unseen += _MESSAGE_TOKENS + _most_tokens(content)
        return reply

    async def _result(self, name: str, arguments: Any) -> ToolReply:
        tool = self._tools.get(name)
        if tool is None:
            self.ended.use.num_unknown += 1
            there = ", ".join(self._tools) or "none"
            return ToolReply(error_content(f"unknown tool {name}; the tools are: {there}"), failed=True)
        parsed = _arguments(arguments)
        if isinstance(parsed, str):
            return ToolReply(error_content(parsed), failed=True)
        now, limit_s = asyncio.get_running_loop().time(), self._limits.tool_timeout_s
        own = None if limit_s is None else now + limit_s
        until = min((at for at in (own, self._until) if at is not None), default=None)
        timeout = asyncio.timeout_at(until)
        self.ended.use.num_ran[name] = self.ended.use.num_ran.get(name, 0) + 1
        try:
            async with timeout:
                return await tool.call(parsed)
        except (EpisodeLost, HarnessTrainerError):
            raise
        except (Exception, SystemExit) as error:  # whatever an environment's code raises
            if not timeout.expired():
                return ToolReply(error_content(error), failed=True)
            if until != own:
                raise _OutOfTime from error
            return ToolReply(error_content(f"{name} took more than {limit_s:g} s and was given up"), failed=True)
        finally:
            spent = self.ended.use.seconds
            spent[name] = spent.get(name, 0.0) + asyncio.get_running_loop().time() - now


def _shown(message: Message, limits: LoopLimits) -> Message:
    """An opening message; what the model cannot see of it becomes a note, as in a tool's reply."""
    content = message.get("content")
    if limits.images or not isinstance(content, list) or all(part.get("type") == "text" for part in content):
        return message
    return {**message, "content": bounded(content, max_chars=_MANY, images=False)}


def _arguments(arguments: Any) -> dict[str, Any] | str:
    """The model's arguments as an object, or what is wrong with them. None and no text at all are no arguments."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return f"the arguments are not valid JSON: {error}"
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        return f"the arguments must be a JSON object, not {type(arguments).__name__}"
    return arguments


def _most_tokens(content: str | list[dict[str, Any]]) -> int:
    """An upper bound: no tokenizer here makes more of a text than one token per byte. Of an image there is none."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [str(part.get("text", "")) for part in parts if part.get("type") == "text"]
    return _MANY if len(texts) < len(parts) else sum(len(text.encode("utf-8", "replace")) for text in texts)


async def _set_up(episode: Episode) -> list[Message]:
    try:
        return await episode.start()
    except (EpisodeLost, HarnessTrainerError):
        raise
    except (Exception, SystemExit) as error:  # whatever an environment's `reset` raises
        raise SetupFailure(f"{type(error).__name__}: {error}") from error


async def _scored(episode: Episode, transcript: Transcript, limit_s: float) -> tuple[Scores, str]:
    """What it earned; where that cannot be said the reward is unknown, which is not 0, and a finding says why."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await episode.rewards(transcript), ""
    except (EpisodeLost, HarnessTrainerError):
        raise
    except (Exception, SystemExit) as error:  # whatever a person's function raises
        if limit.expired():
            return Scores(), f"reward: warning reward_timeout: scoring took more than {limit_s:.0f} s"
        return Scores(), f"reward: warning reward_failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


async def _closed(context: AbstractAsyncContextManager[Episode]) -> None:
    await context.__aexit__(None, None, None)


def _report_closing(rollout_id: str, done: asyncio.Future[None]) -> None:
    if done.cancelled():
        log.warning("the episode of %s was not closed within %.0f s", rollout_id, CLOSE_S)
    elif (error := done.exception()) is not None:
        log.warning("the episode of %s was not closed well: %s: %s", rollout_id, type(error).__name__, error)

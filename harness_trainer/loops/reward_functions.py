"""Reward functions as TRL calls them: `reward_func(environments, **kwargs) -> list[float | None]`.

Owns what they are given, how their lists are read, and their names. A function is called when an episode is over and
its environment still open, with lists of one entry; or once for a whole group (`group_rewards`). It is given
`environments`, `prompts`, `completions` (messages, the arguments of tool calls as objects), `completion_ids`, every
other column of the row, and `log_metric(name, value)` and `log_extra(column, values)`. One that has no **kwargs is
given what it asks for. `trainer_state` is not to be had: the optimizer runs in another process. None and NaN mean that
a function says nothing of an episode, which is not 0.

What a function raises, and an infinite reward, leaves what it was to score unknown (RewardFailed); a list of the wrong
length or of what are no numbers is a fault of the function (EnvironmentFault). Called by the environments' episodes.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from harness_trainer.loops.base import EnvironmentFault, Message, Transcript
from harness_trainer.loops.loading import load_target

Caller: TypeAlias = Callable[..., Awaitable[Any]]  # calls a function where it is to run: `OwnThread.call`

_GIVEN = ("environments", "prompts", "completions", "completion_ids", "log_metric", "log_extra")
_NOT_PASSED_ON = frozenset({"prompt", "completion", "completion_ids"})  # columns, as in TRL


class RewardFailed(Exception):
    """A reward function raised, or gave infinity: the episode's reward is unknown."""


@dataclass(slots=True)
class Sample:
    """One episode that is over. Example: Sample(WordleEnv(), {"prompt": [...], "level": 2}, transcript)."""

    environment: Any
    row: Mapping[str, Any]
    transcript: Transcript
    metrics: dict[str, float] = field(default_factory=dict)  # what the functions log, by name


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """Example: RewardFunction("reward_win", reward_win)."""

    name: str  # in metrics and weights
    call: Callable[..., Any]

    def check(self, columns: Iterable[str]) -> None:
        """Raises EnvironmentFault when it asks for what rows with these columns cannot give."""
        given = {*_GIVEN, *(set(columns) - _NOT_PASSED_ON)}
        for name, parameter in _parameters(self.call).items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise EnvironmentFault(f"the reward function {self.name} must take {name!r} by name: remove the `/`")
            if name not in given and parameter.default is parameter.empty:
                raise EnvironmentFault(
                    f"the reward function {self.name} asks for {name!r}, which is no column of the rows and not among"
                    f" {', '.join(_GIVEN)}: add the column, or give the argument a default"
                )

    async def score(self, samples: Sequence[Sample], caller: Caller) -> list[float | None]:
        """One entry per sample. Raises RewardFailed, EnvironmentFault."""
        try:
            values = await caller(self.call, **self._wanted(_arguments(samples)))
        except Exception as error:  # whatever a person's function raises
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise RewardFailed(f"the reward function {self.name} raised {reason}") from error
        return read_rewards(f"the reward function {self.name}", values, len(samples))

    def _wanted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        taken = _parameters(self.call)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            return arguments
        return {name: value for name, value in arguments.items() if name in taken}


@dataclass(frozen=True, slots=True)
class Rewards:
    """All that score the episodes of environment classes."""

    functions: Sequence[RewardFunction]
    weights: Mapping[str, float]
    own: Mapping[str, str]  # what the `get_reward` of a class is called, by the class's name


def load_rewards(targets: Sequence[str]) -> list[RewardFunction]:
    """The functions that `targets` name. Raises EnvironmentFault."""
    functions: list[RewardFunction] = []
    for target in targets:
        call = load_target(target)
        if not callable(call) or inspect.isclass(call):
            raise EnvironmentFault(f"{target} is no function: write `def reward_func(environments, **kwargs): ...`")
        functions.append(RewardFunction(free_name(_name(call), [known.name for known in functions]), call))
    return functions


def free_name(name: str, taken: Iterable[str]) -> str:
    """Of two rewards with one name the second is called name_2: their metrics must stay apart."""
    taken = set(taken)
    count = next(
        count for count in range(1, len(taken) + 2) if (name if count == 1 else f"{name}_{count}") not in taken
    )
    return name if count == 1 else f"{name}_{count}"


def read_rewards(who: str, values: Any, count: int) -> list[float | None]:
    """What a function gave as `count` numbers or None. Raises RewardFailed, EnvironmentFault."""
    try:
        listed = None if isinstance(values, str | bytes | Mapping) else list(values)
    except TypeError:
        listed = None
    if listed is None:
        raise EnvironmentFault(f"{who} gave {_short(values)}: it must give a list, one reward or None per episode")
    if len(listed) != count:
        raise EnvironmentFault(f"{who} gave {len(listed)} rewards for {count} episodes: it must give one for each")
    return [read_reward(who, value) for value in listed]


def read_reward(who: str, value: Any) -> float | None:
    """None and NaN are None. Raises RewardFailed for infinity, EnvironmentFault for what is no number."""
    if value is None:
        return None
    try:
        number = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        raise EnvironmentFault(f"{who} gave {_short(value)} as a reward: it must be a number or None")
    if math.isinf(number):
        raise RewardFailed(f"{who} gave {number} as a reward")
    return None if math.isnan(number) else number


def _arguments(samples: Sequence[Sample]) -> dict[str, Any]:
    columns = dict.fromkeys(name for sample in samples for name in sample.row if name not in _NOT_PASSED_ON)

    def log_metric(name: str, value: float) -> None:
        for sample in samples:
            sample.metrics[str(name)] = float(value)

    return {name: [sample.row.get(name) for sample in samples] for name in columns} | {
        "environments": [sample.environment for sample in samples],
        "prompts": [_as_trl(sample.transcript.prompt) for sample in samples],
        "completions": [_as_trl(sample.transcript.completion) for sample in samples],
        "completion_ids": [
            [token for reply in sample.transcript.replies for token in reply.completion_ids] for sample in samples
        ],
        "log_metric": log_metric,
        "log_extra": _no_table,
    }


def _no_table(column: str, values: list[Any]) -> None:
    """TRL adds a column to the table of completions that it prints; there is none here."""


def _as_trl(messages: Sequence[Message]) -> list[Message]:
    """Messages with the arguments of tool calls as objects, where they are such."""
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):  # a malformed call stays as the model wrote it
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _parameters(call: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):  # a built-in without a signature takes what it is given
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def _name(call: Any) -> str:
    while isinstance(call, functools.partial):
        call = call.func
    return str(getattr(call, "__name__", type(call).__name__))


def _short(value: object) -> str:
    return " ".join(repr(value).split())[:100]

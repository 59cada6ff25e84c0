"""A person's own reward function: `--rollouts.reward name|dotted.path:function|file.py:function`.

Owns finding it, checking it before anything slow starts, and calling it so that its mistakes cost one rollout and never
the run. Runs in the rollout runner's process, outside any sandbox: it is the trainer's own code. What it is given is
`outcome.HarnessRolloutOutcome`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from harness_trainer.errors import ConfigError
from harness_trainer.own_thread import OwnThread
from harness_trainer.rewards.outcome import HarnessRolloutOutcome
from harness_trainer.rewards.turns import checked

VERIFIER = "verifier"  # the name of no function at all: the tests' reward counts
ENTRY_POINTS = "harness_trainer.rewards"  # of installed packages: name -> function
TIMEOUT_S = 60.0

_FORMS = "give `verifier`, a name that an installed package registers, module:function or file.py:function"


@dataclass(frozen=True, slots=True)
class Scored:
    """Example: Scored(None, "warning reward_failed: ZeroDivisionError: ..."). None = out of the group's baseline."""

    reward: float | None
    finding: str = ""
    turn_rewards: Mapping[str, float | None] = field(default_factory=dict)  # by node_id of the trace's entries


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """`spec` is for messages."""

    spec: str
    # Gives a number, None, {"reward": either, "turn_rewards": {node_id: either}}, or an awaitable of one of these.
    call: Callable[[HarnessRolloutOutcome], Any]

    async def score(self, outcome: HarnessRolloutOutcome, timeout_s: float = TIMEOUT_S) -> Scored:
        """Raises nothing but cancellation: a function that fails, hangs or gives no number leaves the reward unknown.

        A function that is not async runs in a thread of its own; one that hangs cannot be ended there, only waited for
        no longer (nor by the end of the process).
        """
        try:
            async with asyncio.timeout(timeout_s):
                value = await self._value(outcome)
        except TimeoutError:
            return Scored(None, f"warning reward_timeout: {self.spec} took more than {timeout_s:.0f} s")
        except Exception as error:  # whatever a person's function raises
            return Scored(None, f"warning reward_failed: {self.spec} raised {type(error).__name__}: {_short(error)}")
        turn_rewards: Mapping[str, float | None] = {}
        if isinstance(value, Mapping) and value.keys() == {"reward", "turn_rewards"}:
            try:
                turn_rewards = {str(turn): checked(reward) for turn, reward in value["turn_rewards"].items()}
            except (ValueError, AttributeError) as error:
                return Scored(None, f"warning reward_unusable: {self.spec} gave turn rewards: {_short(error)}")
            value = value["reward"]
        if value is None:
            return Scored(None)
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
            return Scored(None, f"warning reward_unusable: {self.spec} gave {_short(repr(value))}, no finite number")
        return Scored(float(value), turn_rewards=turn_rewards)

    async def _value(self, outcome: HarnessRolloutOutcome) -> Any:
        thread = OwnThread(f"reward {self.spec}")
        try:
            return await thread.call(self.call, outcome)
        finally:
            thread.close()


def pin_reward(spec: str) -> str:
    """The spec with a file's path made absolute: the runner works in another folder."""
    path, colon, name = spec.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{name}" if colon and path.endswith(".py") else spec


def load_reward(spec: str) -> RewardFunction | None:
    """The function that `spec` names; None = the verifier's reward counts as it is.

    Raises ConfigError when there is no such function or it does not take one outcome.
    """
    if spec == VERIFIER:
        return None
    where, colon, name = spec.rpartition(":")
    if not colon:
        function = _registered(spec)
    elif where.endswith(".py"):
        function = _named(_from_file(spec, Path(where).expanduser()), name, spec)
    else:
        function = _named(_imported(spec, where), name, spec)
    _check(spec, function)
    return RewardFunction(spec, function)


def _registered(name: str) -> Any:
    found = entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        known = ", ".join(sorted({VERIFIER, *(entry.name for entry in entry_points(group=ENTRY_POINTS))}))
        raise ConfigError(f"unknown reward {name!r}: known are {known}; {_FORMS}")
    try:
        return next(iter(found)).load()
    except Exception as error:  # whatever a person's module raises while it is imported
        raise ConfigError(f"reward {name} could not be loaded: {type(error).__name__}: {_short(error)}") from error


def _imported(spec: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError)
        advice = "; install it, add its folder to PYTHONPATH, or give file.py:function" if missing else ""
        raise ConfigError(
            f"reward {spec} could not be loaded: {type(error).__name__}: {_short(error)}{advice}"
        ) from error


def _from_file(spec: str, path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"reward {spec}: there is no file {path}; {_FORMS}")
    name = f"harness_trainer_reward_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickles of the file look themselves up there
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"reward {spec} could not be loaded: {type(error).__name__}: {_short(error)}") from error
    return module


def _named(module: Any, name: str, spec: str) -> Any:
    function = getattr(module, name, None)
    if function is None:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"reward {spec}: there is no {name or 'function name'!r} in it; it has {', '.join(own[:8])}")
    return function


def _check(spec: str, function: Any) -> None:
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"reward {spec} is no function; write `def reward(outcome): ...`")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"reward {spec} must take one argument, the outcome: {error}") from error
    except ValueError:  # a built-in without a signature: only a call can tell
        return


def _short(value: object) -> str:
    return " ".join(str(value).split())[:200]

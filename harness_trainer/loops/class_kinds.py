"""What an environment class offers: its tools, its reset, its reward, its end. Read once, at construction.

Owns the reading, by TRL's rules (`environment_factory`): every public method but `reset` and `get_reward` is a tool,
inherited, static and async ones too; properties, class methods and whatever begins with an underscore are not. Its
schema comes of type hints and docstring (`schemas`); what TRL would only notice in the middle of a run (a docstring
without `Args:`, a `reset` that does not take the columns) is told here, with class and method. `environment_class`
plays what this finds.

**Closing.** `close` or `aclose` without docstring and arguments (TRL would refuse it as a tool) is called at the end of
an episode, else `__aexit__` or `__exit__` is. One that is documented is a tool, as in TRL, and never called by us.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness_trainer.loops.base import EnvironmentFault
from harness_trainer.loops.schemas import SchemaError, function_schema

log = logging.getLogger("harness_trainer.loops")

RESET, REWARD = "reset", "get_reward"
_CLOSERS = ("aclose", "close")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what chat APIs take


@dataclass(frozen=True, slots=True)
class Method:
    """A tool of a class. Example: Method("guess", "guess", "Make a guess.", {"type": "object", ...}, signature)."""

    name: str  # the tool's, to the model
    member: str  # the class's
    description: str
    parameters: Mapping[str, Any]  # JSON schema
    signature: inspect.Signature  # without self


@dataclass(frozen=True, slots=True)
class Kind:
    """An environment class, or a function that makes instances of one."""

    name: str  # the class's
    make: Callable[[], Any]
    methods: tuple[Method, ...]
    reset: inspect.Signature  # without self
    rewards: bool  # it has get_reward
    closer: str | None  # the method that ends an instance; None = it has none

    def check_columns(self, row: Mapping[str, Any], where: str) -> None:
        """Raises EnvironmentFault when `reset` does not take the row."""
        try:
            self.reset.bind(**row)
        except TypeError as error:
            raise EnvironmentFault(
                f"{where}: {self.name}.reset does not take its columns ({', '.join(row)}): {error}; it is called with"
                " every column, so write `def reset(self, **kwargs)`"
            ) from error


def check_factory(factory: Any, name: str) -> None:
    """Raises EnvironmentFault when it cannot be called without arguments."""
    if not callable(factory):
        raise EnvironmentFault(
            f"{name} is {type(factory).__name__}, no class: give the class itself, or a dict of them"
        )
    try:
        needed = [
            each.name
            for each in inspect.signature(factory).parameters.values()
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # without a signature only the call can tell
        return
    if needed:
        what = f"{name}.__init__" if inspect.isclass(factory) else name
        raise EnvironmentFault(
            f"{what} must not need arguments, and needs {', '.join(needed)}: take them from the module around it, or"
            " give them defaults"
        )


def read_kind(factory: Callable[[], Any], instance: Any) -> Kind:
    """What `instance`, made by `factory`, offers. Raises EnvironmentFault."""
    cls = type(instance)
    # Of the class: those of the instance would evaluate its properties.
    members = [name for name, _ in inspect.getmembers(cls, predicate=inspect.isfunction)]
    if RESET not in members:
        raise EnvironmentFault(f"{cls.__name__} has no method reset: write `def reset(self, **kwargs) -> str | None`")
    closer = _closer(instance, members)
    methods = [
        _method(cls, member, getattr(instance, member))
        for member in members
        if not member.startswith("_") and member not in (RESET, REWARD, closer)
    ]
    for method in methods:
        twin = next(each for each in methods if each.name == method.name)
        if twin is not method:
            raise EnvironmentFault(
                f"{cls.__name__}.{twin.member} and .{method.member} are both called {method.name!r}: a decorator must"
                " use functools.wraps, and an alias needs a method of its own"
            )
    if REWARD in members:
        _check_reward(cls, instance)
    return Kind(
        name=cls.__name__,
        make=factory,
        methods=tuple(methods),
        reset=inspect.signature(instance.reset),
        rewards=REWARD in members,
        closer=closer,
    )


def _method(cls: type, member: str, bound: Callable[..., Any]) -> Method:
    where = f"{cls.__name__}.{member}"
    try:
        told = function_schema(bound)["function"]
    except SchemaError as error:
        raise EnvironmentFault(
            f"{where} is a tool, as every public method is, and cannot be offered to the model: {error}. If it is to be"
            f" no tool, call it _{member}"
        ) from error
    if not _TOOL_NAME.fullmatch(told["name"]):
        raise EnvironmentFault(f"{where}: {told['name']!r} is no name for a tool: use letters, digits, _ and -")
    if member in _CLOSERS:
        log.warning(
            "%s is offered to the model as a tool, as in TRL; without its docstring it would be called at an episode's"
            " end instead",
            where,
        )
    return Method(told["name"], member, told["description"], told["parameters"], inspect.signature(bound))


def _closer(instance: Any, members: list[str]) -> str | None:
    for name in _CLOSERS:
        if name in members and not inspect.getdoc(getattr(instance, name)) and _takes_nothing(getattr(instance, name)):
            return name
    return next((name for name in ("__aexit__", "__exit__") if name in members), None)


def _takes_nothing(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind()
    except TypeError:
        return False
    return True


def _check_reward(cls: type, instance: Any) -> None:
    try:
        inspect.signature(instance.get_reward).bind()
    except TypeError as error:
        raise EnvironmentFault(f"{cls.__name__}.get_reward is called without arguments: {error}") from error

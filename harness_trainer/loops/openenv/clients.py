"""A person's typed client by class path: the class and the model of the actions that it takes.

Owns what such a class must be. Called by `environment` for `openenv:python:MODULE:CLASS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from harness_trainer.loops.base import EnvironmentFault
from harness_trainer.loops.loading import load_target


def load_client(target: str) -> type:
    """Raises EnvironmentFault when it is no client class of OpenEnv's kind."""
    from openenv.core import EnvClient

    found = load_target(target)
    if not inspect.isclass(found) or not issubclass(found, EnvClient) or inspect.isabstract(found):
        raise EnvironmentFault(
            f"{target} is no OpenEnv client: name a class that extends openenv's EnvClient, such as echo_env:EchoEnv"
        )
    return found


def action_model(client_class: type) -> type | None:
    """The model in `EnvClient[ThisAction, ...]`; None = it names none, as MCP clients do."""
    from pydantic import BaseModel

    for kind in client_class.__mro__:
        for base in getattr(kind, "__orig_bases__", ()):
            named = get_args(base)[:1] if inspect.isclass(get_origin(base)) else ()
            if named and inspect.isclass(named[0]) and issubclass(named[0], BaseModel):
                return named[0]
    return None


def made_action(model: type | None, fields: Mapping[str, Any]) -> Any:
    """An action for a client: of its model where it has one. Raises what the model does, to be told to the policy."""
    return dict(fields) if model is None else model(**fields)

"""Where rollouts come from, if not from our own agents in our own sandboxes: servers that run both, and environments
whose turns are ours.

Owns the union of their settings and how a person names one (`--env openenv-harbor:http://host:8200`). The client of a
server that runs agents is a module of its own here; environments whose turns are ours are `loops`'s. `rollouts` takes
rollouts from both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from harness_trainer.environments.class_config import EnvironmentClassConfig
from harness_trainer.environments.config import OpenEnvHarborConfig, OwnLoopConfig

__all__ = [
    "WHITE_BOX",
    "EnvConfig",
    "EnvironmentClassConfig",
    "OpenEnvHarborConfig",
    "OwnConfig",
    "OwnLoopConfig",
    "as_env",
]

WHITE_BOX = (EnvironmentClassConfig, OwnLoopConfig)  # those whose turns are ours, on the rows of `--tasks`
_SHORT = {
    "openenv-harbor": "url",
    "class": "target",
    "loop": "target",
}  # what stands behind the colon of the short form, by type


class OwnConfig(BaseModel):
    """The usual case: `--tasks`, `--harness` and `--sandbox` say what runs where."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["own"] = "own"


EnvConfig: TypeAlias = Annotated[
    OwnConfig | OpenEnvHarborConfig | EnvironmentClassConfig | OwnLoopConfig, Field(discriminator="type")
]


def as_env(value: Any) -> Any:
    """An environment as a person gives it, in the form that `EnvConfig` reads: `loop:FILE:Class` is type and target."""
    value = {"type": value} if isinstance(value, str) else value
    if isinstance(value, dict):
        kind, colon, rest = str(value.get("type", "own")).partition(":")
        value = {**value, "type": kind, **({_SHORT.get(kind, "url"): rest} if colon else {})}
    return value

"""Where rollouts come from, if not from our own agents in our own sandboxes: servers that run both.

Owns the union of their settings and how a person names one (`--env openenv-harbor:http://host:8200`). A server's client
is a module of its own; `rollouts` takes rollouts from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from harness_trainer.environments.config import OpenEnvHarborConfig

__all__ = ["EnvConfig", "OpenEnvHarborConfig", "OwnConfig", "as_env"]


class OwnConfig(BaseModel):
    """The usual case: `--tasks`, `--harness` and `--sandbox` say what runs where."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["own"] = "own"


EnvConfig: TypeAlias = Annotated[OwnConfig | OpenEnvHarborConfig, Field(discriminator="type")]


def as_env(value: Any) -> Any:
    """An environment as a person gives it, in the form that `EnvConfig` reads: `openenv-harbor:URL` is type and url."""
    value = {"type": value} if isinstance(value, str) else value
    if isinstance(value, dict):
        kind, colon, url = str(value.get("type", "own")).partition(":")
        value = {**value, "type": kind, **({"url": url} if colon else {})}
    return value

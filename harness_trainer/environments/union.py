"""The union of all settings of `--env`, and how a person names one of them (`openenv-harbor:http://host:8200`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from harness_trainer.environments.class_config import EnvironmentClassConfig
from harness_trainer.environments.config import OpenEnvHarborConfig, OwnLoopConfig
from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.environments.ors_config import OrsConfig

# Those whose turns are ours: on the rows of `--tasks`, or (ORS) on tasks that the environment has itself.
WHITE_BOX = (EnvironmentClassConfig, OpenEnvConfig, OrsConfig, OwnLoopConfig)
_SHORT = {
    "openenv-harbor": "url",
    "class": "target",
    "openenv": "target",
    "loop": "target",
    "ors": "target",
}  # what stands behind the colon of the short form, by type


class OwnConfig(BaseModel):
    """The usual case: `--tasks`, `--harness` and `--sandbox` say what runs where."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["own"] = "own"


EnvConfig: TypeAlias = Annotated[
    OwnConfig | OpenEnvHarborConfig | EnvironmentClassConfig | OpenEnvConfig | OrsConfig | OwnLoopConfig,
    Field(discriminator="type"),
]


def as_env(value: Any) -> Any:
    """An environment as a person gives it, in the form that `EnvConfig` reads: `loop:FILE:Class` is type and target."""
    value = {"type": value} if isinstance(value, str) else value
    if isinstance(value, dict):
        kind, colon, rest = str(value.get("type", "own")).partition(":")
        value = {**value, "type": kind, **({_SHORT.get(kind, "url"): rest} if colon else {})}
    return value


def env_of_tasks(data: Any) -> Any:
    """A run's settings as given, in which `tasks: ors:TARGET` names the environment that has the tasks."""
    tasks = data.get("tasks") if isinstance(data, dict) else None
    if not isinstance(tasks, str) or not tasks.startswith("ors:"):
        return data
    env = data.get("env") or {}
    if isinstance(env, BaseModel):
        env = env.model_dump()
    given = {"type": "ors", **env} if isinstance(env, dict) else env
    given = as_env(given)
    target = tasks.removeprefix("ors:")
    if given.get("type") == "own":
        given = {"type": "ors"}
    if given.get("type") != "ors" or given.get("target", target).rstrip("/") != target.rstrip("/"):
        raise ValueError(f"tasks {tasks} are of another environment than env: leave env out, or give its settings only")
    return {**data, "env": {**given, "target": target}}

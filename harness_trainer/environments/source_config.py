"""Settings of one of a run's `sources`. Owns names, defaults and what of them is nonsense; reads no file but YAML.

A source says where rollouts come from as a run of one does (tasks, harness, env), how often it is drawn, and which of
the run's settings are other ones in its rollouts. What of that is in force, `config` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from harness_trainer.environments.config import OpenEnvHarborConfig
from harness_trainer.environments.ors_config import OrsConfig
from harness_trainer.environments.union import WHITE_BOX, EnvConfig, OwnConfig, as_env, env_of_tasks

# Settings of `rollouts` that a source may have of its own.
OWN_SETTINGS = ("reward", "reward_weights", "pass_reward", "max_turns", "max_tokens", "timeout_s")


class SourceConfig(BaseModel):
    """Example: SourceConfig(name="code", weight=2, tasks="./tasks", harness="opencode:3,pi").

    With an environment: SourceConfig(name="wordle", env="class:wordle.py:WordleEnv", tasks="rows.jsonl").
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$", description="what metrics and the names of its tasks begin with"
    )
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="groups of it, relative to the other sources'")
    tasks: str | None = Field(None, description="as the run's")
    harness: str | None = Field(None, description="as the run's; null = opencode, where agents run")
    env: EnvConfig = Field(default_factory=OwnConfig, description="as the run's")
    evaluation: str | None = Field(None, description="tasks to evaluate on, in the forms of `tasks`; null = none")
    reward: str | None = Field(None, description="instead of rollouts.reward, likewise those below; null = the run's")
    reward_weights: dict[str, float] | None = None
    pass_reward: float | None = None
    max_turns: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    timeout_s: float | None = Field(None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _tasks_may_name_env(cls, data: Any) -> Any:
        return env_of_tasks(data)

    @field_validator("env", mode="before")
    @classmethod
    def _env_by_name(cls, value: Any) -> Any:
        return as_env(value)

    @model_validator(mode="after")
    def _fits(self) -> SourceConfig:
        env, white_box = self.env, isinstance(self.env, WHITE_BOX)
        if env.type == "own" and self.tasks is None:
            raise ValueError("it has neither tasks nor env: give tasks (and a harness), or env and its rows as tasks")
        if env.type != "own" and self.harness is not None:
            raise ValueError(f"env {env.type} takes no harness of ours: leave harness out")
        if isinstance(env, OpenEnvHarborConfig):
            if self.tasks is not None or self.evaluation is not None:
                raise ValueError("the server has its own tasks: choose with env.tasks; leave tasks and evaluation out")
        elif isinstance(env, OrsConfig):
            if not str(self.tasks).startswith("ors:"):
                raise ValueError("an ORS environment is named by tasks: ors:NAME_OR_URL")
        elif white_box and self.tasks is None:
            raise ValueError("it has no rows: give tasks, a JSONL file")
        if white_box and getattr(env, "name", None) is not None:
            raise ValueError("its name is the source's own: leave env.name out")
        if white_box and self.reward is not None:
            raise ValueError("an environment's rewards are its own: give env.rewards, and leave reward out")
        if not all(map(math.isfinite, (self.reward_weights or {}).values())):
            raise ValueError("reward_weights must be finite numbers")
        return self

    @property
    def own_settings(self) -> dict[str, Any]:
        """Those of `OWN_SETTINGS` that it has."""
        return {name: value for name in OWN_SETTINGS if (value := getattr(self, name)) is not None}


def read_sources(value: Any) -> Any:
    """What a person gives as `sources`: a list, or the path of a YAML file that holds one. Raises ValueError."""
    if isinstance(value, str):
        value = _from_file(Path(value))
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError("give a list with at least one source: [{name: ..., tasks: ..., harness: ...}, ...]")
    sources = [_read(number, one) for number, one in enumerate(value, 1)]
    if twice := [name for name, count in Counter(source.name for source in sources).items() if count > 1]:
        raise ValueError(f"two sources are named {twice[0]}: give each a name of its own")
    return sources


def _read(number: int, value: Any) -> SourceConfig:
    if isinstance(value, SourceConfig):
        return value
    name = value.get("name") if isinstance(value, dict) else None
    who = f"source {name if isinstance(name, str) and name else number}"
    try:
        return SourceConfig.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
        raise ValueError(": ".join(filter(None, (who, where, said)))) from error


def _from_file(path: Path) -> Any:
    import yaml

    try:
        found = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}): name a file") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    return found.get("sources") if isinstance(found, dict) else found

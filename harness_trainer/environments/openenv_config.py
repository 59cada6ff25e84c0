"""Settings of OpenEnv environments (`--env openenv:...`). Owns names, defaults and what of them is nonsense."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from harness_trainer.environments.reward_settings import RewardTargets, RewardWeights

_FORMS = (
    "write openenv:https://HOST (a server), openenv:docker:IMAGE, openenv:local:MODULE:APP (or FILE.py:APP), or"
    " openenv:python:MODULE:CLASS (a typed client) with --env.url"
)


class OpenEnvConfig(BaseModel):
    """An OpenEnv environment whose tools the model calls without a class around it; `loops.openenv` has the rules.

    Example: `OpenEnvConfig(target="https://openenv-echo-env.hf.space", max_episodes=32)`; its tasks are the rows of
    `--tasks rows.jsonl`, and their columns go to the environment's `reset`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["openenv"] = "openenv"
    target: str = Field(
        "",
        validate_default=True,
        description="a server's address, docker:IMAGE, local:MODULE:APP (a server that is started here) or "
        "python:MODULE:CLASS (a typed client of the server at `url`)",
    )
    url: str | None = Field(None, description="of python: the server's address")
    name: str | None = Field(None, description="what metrics call it; null = what the server calls itself")
    reward: Literal["last", "sum"] = Field(
        "last", description="of the rewards of an episode's steps: the last that is not null (OpenEnv's rule), or all"
    )
    reward_name: str = Field("env_reward", min_length=1, description="what metrics call the reward")
    unrewarded: float | None = Field(
        None, allow_inf_nan=False, description="what an episode without any reward earned; null = it stays unscored"
    )
    rewards: RewardTargets = Field(
        default_factory=list,
        description="reward functions instead of the environment's reward, called with environments=[...] (their"
        " reward, rewards, done, observation, num_steps): file.py:function or package.module:function",
    )
    reward_weights: RewardWeights = Field(
        default_factory=dict, description="what each of them counts, by the function's name; else 1"
    )
    tool_name: str | None = Field(
        None, pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$", description="the tool that takes an action; null = by its model"
    )
    observation: str | None = Field(
        None, description="the field that the model is shown, dots lead inwards (messages.0.content); null = all"
    )
    max_episodes: int | None = Field(
        None, ge=1, description="sessions open at once; a server that is started is told so; null = what it allows"
    )
    per_episode: bool = Field(False, description="docker and local: a server per episode, not one for all")
    port: int = Field(8000, ge=1, le=65535, description="docker: where the image's server listens")
    environment: dict[str, str] = Field(
        default_factory=dict, description="docker and local: variables of the server that is started"
    )
    token_env: str | None = Field(
        None, description="name of the variable that holds the server's bearer token (a private Space); null = none"
    )
    connect_timeout_s: float = Field(30.0, gt=0, description="for a connection")
    step_timeout_s: float = Field(600.0, gt=0, description="for the answer to one reset or step")
    start_timeout_s: float = Field(120.0, gt=0, description="docker and local: until the server answers")
    capacity_patience_s: float = Field(60.0, ge=0, description="for a place on a server that has none left")
    ping_interval_s: float | None = Field(
        20.0, gt=0, description="between keep-alive pings; null = none, for a link that swallows them"
    )
    ping_timeout_s: float | None = Field(
        20.0, gt=0, description="for the answer to a ping, after which the session counts as lost; null = never"
    )
    idle_timeout_s: float | None = Field(
        7200.0, gt=0, description="local: a session that is silent for as long is ended by the server; null = never"
    )
    max_message_mb: float = Field(100.0, gt=0, description="the largest observation")

    @field_validator("target")
    @classmethod
    def _target(cls, value: str) -> str:
        kind, _, rest = value.partition(":")
        named = kind in ("local", "python") and all(rest.rpartition(":")[::2])
        if not (is_address(value) or (kind == "docker" and rest) or named):
            raise ValueError(_FORMS)
        return value.rstrip("/") if is_address(value) else value

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not is_address(value):
            raise ValueError("the server's address must begin with http:// or https:// and name a host")
        return None if value is None else value.rstrip("/")

    @model_validator(mode="after")
    def _fits(self) -> OpenEnvConfig:
        if self.kind == "python" and self.url is None:
            raise ValueError("python: needs --env.url, the address of the server its client talks to")
        if self.kind != "python" and self.url is not None:
            raise ValueError("url is the address of the server that a python: client talks to; give it for that only")
        if self.per_episode and self.kind not in ("docker", "local"):
            raise ValueError("per_episode is for servers that are started here: docker: and local:")
        return self

    @property
    def kind(self) -> Literal["url", "docker", "local", "python"]:
        kind = self.target.partition(":")[0]
        return kind if kind in ("docker", "local", "python") else "url"  # type: ignore[return-value]

    @property
    def shared_server(self) -> str | None:
        """The address of a server that other sources of the run may name too; None = the source starts its own."""
        return self.target if self.kind == "url" else self.url

    @property
    def named(self) -> str:
        """What stands behind the kind: the address, the image, the app or the class."""
        return self.target if self.kind == "url" else self.target.partition(":")[2]


def is_address(value: str) -> bool:
    parts = urlsplit(value)
    return parts.scheme in ("http", "https") and bool(parts.hostname)

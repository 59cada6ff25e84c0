"""Settings of environment classes (`--env class:...`). Owns names, defaults and what of them is nonsense."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness_trainer.environments.config import ClassTarget
from harness_trainer.environments.reward_settings import RewardTargets, RewardWeights


class EnvironmentClassConfig(BaseModel):
    """A person's environment class, as TRL's `environment_factory` takes it; `loops.environment_class` has the rules.

    Example: `EnvironmentClassConfig(target="wordle.py:WordleEnv", rewards=["wordle.py:reward_win"])`; its tasks are the
    rows of `--tasks rows.jsonl`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["class"] = "class"
    target: ClassTarget = Field(
        "",
        validate_default=True,
        description="the class, or a dict of classes by name: file.py:Name or package.module:Name",
    )
    name: str | None = Field(None, description="what metrics call it; null = the class's name")
    rewards: RewardTargets = Field(
        default_factory=list,
        description="reward functions, called with environments=[...]: file.py:function or package.module:function; "
        "their sum counts, with that of the class's own get_reward",
    )
    reward_weights: RewardWeights = Field(
        default_factory=dict, description="what each of them counts, by the function's or the class's name; else 1"
    )
    reward_scope: Literal["rollout", "group"] = Field(
        "rollout",
        description="reward functions judge each rollout by itself; or, once all rollouts of a group have ended, the "
        "group in one call, a list entry per rollout, for rewards that compare siblings. OpenEnv clients in an "
        "instance's attributes are closed by then",
    )
    instances: Literal["fresh", "reused"] = Field(
        "fresh",
        description="an instance per episode, so that nothing of one is left in the next; or, as in TRL, instances "
        "that `reset` alone makes ready again, for a class that takes long to construct",
    )
    stop_when_done: bool = Field(
        False, description="the episode ends when the instance's attribute `done` is true; in TRL it goes on"
    )
    max_episodes: int | None = Field(None, ge=1, description="episodes open at once; null = as many as rollouts")
    capacity_patience_s: float = Field(
        60.0, ge=0, description="how long `reset` is tried again where a server of its OpenEnv clients is full"
    )

    @model_validator(mode="after")
    def _fits(self) -> EnvironmentClassConfig:
        if self.reward_scope == "group" and self.instances == "reused":
            raise ValueError("reward_scope group keeps each instance for its group: it goes with instances fresh only")
        return self

"""What a person may decide about which tasks are drawn and how the policy is evaluated, and what the learner will take.

Owns the configuration only; `curriculum`, `evaluation` and `admission` obey it. Part of `config`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CurriculumConfig(BaseModel):
    """Which task a new group gets."""

    model_config = ConfigDict(extra="forbid")

    by: Literal["order", "pass_rate"] = Field(
        "order",
        description="order: every task once per pass, in an order of the pass's own; pass_rate: drawn at random, tasks "
        "between the two bounds (and new ones) more often than the others",
    )
    low: float = Field(0.1, ge=0, le=1, description="lowest pass rate of a task that is drawn with full weight")
    high: float = Field(0.9, ge=0, le=1, description="highest pass rate of a task that is drawn with full weight")
    outside: float = Field(0.1, gt=0, le=1, description="weight of a task outside the bounds; it is seen now and then")
    window: int = Field(4, ge=1, description="finished groups of a task that its pass rate is taken from, the newest")

    @model_validator(mode="after")
    def _ordered(self) -> CurriculumConfig:
        if self.low > self.high:
            raise ValueError(f"curriculum.low ({self.low}) is above curriculum.high ({self.high}): exchange them")
        return self


class EvaluationConfig(BaseModel):
    """A fixed set of tasks that is run with the current policy now and then, and never trained on."""

    model_config = ConfigDict(extra="forbid")

    tasks: str | None = Field(
        None, description="tasks to evaluate on, in the forms of --tasks; null = no evaluation. Keep them apart from it"
    )
    every: int = Field(
        10,
        ge=1,
        description="steps between two evaluations; the start and the last step are evaluated too. Meanwhile the "
        "learner takes no step, so that one policy is evaluated and not several",
    )
    samples: int = Field(1, ge=1, description="rollouts per task and evaluation")


class Schedule(BaseModel):
    """How the learner takes groups: whole steps of `groups_per_step`, the oldest first."""

    model_config = ConfigDict(extra="forbid")

    max_open_groups: int = Field(ge=1)  # groups that may be running or waiting for the learner at once
    num_groups: int = Field(ge=0)  # groups that the whole run trains; dropped ones are replaced; 0 = it only evaluates
    groups_per_step: int = Field(1, ge=1)
    max_staleness: int | None = Field(None, ge=0)  # optimizer steps; None = a group never gets too old
    max_dropped_in_a_row: int = Field(256, ge=1)  # groups that the runner drops since the last whole one

"""How rollouts are run. Owns the configuration only; `runner` and `rollout` obey it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness_trainer.environments import EnvConfig, OwnConfig
from harness_trainer.harnesses.entry import Entry
from harness_trainer.loops.config import LoopConfig
from harness_trainer.rollouts.on_ray.config import RayConfig
from harness_trainer.rollouts.policy_config import CurriculumConfig, EvaluationConfig, Schedule
from sandboxes import SandboxConfig
from sandboxes.base import Access
from sandboxes.local import LocalConfig

GATEWAY_PATIENCE_S = (
    60.0  # how long the runner waits for a gateway that is started again, before it is an infra failure
)


Transport: TypeAlias = Literal["auto", "generate", "chat", "text"]


class RolloutConfig(BaseModel):
    """Everything a person may decide about rollouts."""

    model_config = ConfigDict(extra="forbid")

    group_size: int = Field(4, ge=2, description="rollouts of one task that are compared with each other (G)")
    max_concurrent: int = Field(4, ge=1, description="rollouts that run at the same time")
    max_turns: int = Field(8, ge=1, description="model calls one rollout may make")
    max_tokens: int = Field(256, ge=1, description="output cap of one model call, in tokens")
    temperature: float = Field(1.0, gt=0, description="sampling temperature, also of the learner's log-probabilities")
    sampling: dict[str, Any] = Field(
        default_factory=lambda: {"top_p": 1.0, "top_k": -1},
        description="further sampling fields, pinned for every call whatever the agent asks",
    )
    max_creating: int | None = Field(None, ge=1, description="sandboxes started at once; null = as max_concurrent")
    max_running: int | None = Field(None, ge=1, description="agents at work at once; null = as max_concurrent")
    max_verifying: int | None = Field(None, ge=1, description="verifiers at work at once; null = as max_concurrent")
    warm_per_task: int = Field(2, ge=0, description="sandboxes started ahead of need, of one task's kind")
    warm_total: int = Field(8, ge=0, description="sandboxes started ahead of need, in all")
    timeout_s: float = Field(600, gt=0, description="wall time of one rollout's agent; the task may ask for less")
    start_timeout_s: float = Field(
        300,
        gt=0,
        description="wall time to get a sandbox and put the agent in, to which is added what the "
        "task's health check may take; the image is built before that",
    )
    deadline_s: float | None = Field(
        None, gt=0, description="wall time of a whole rollout, start to score; null = what its stages may take together"
    )
    verify: Literal["auto", "same", "fresh"] = Field(
        "auto", description="tests run in the agent's own sandbox, or in a fresh one that gets its work"
    )
    infra_retries: int = Field(1, ge=0, description="fresh tries when the machinery (not the agent) failed")
    retry_backoff_s: float = Field(
        2.0, ge=0, description="longest wait before the first retry; doubled for each further"
    )
    retry_backoff_max_s: float = Field(60.0, ge=0, description="longest wait before any retry")
    max_refills: int = Field(
        2,
        ge=0,
        description="fresh samples per group, for rollouts left unscored by infra failures, after all retries, or by a "
        "reward function that failed",
    )
    min_group: int | None = Field(
        None,
        ge=2,
        description="scored rollouts with which a group is trained (the unscored are out of its baseline); with fewer, "
        "refills and all, it is dropped and replaced. null = all but those that a reward function left out",
    )
    setup_tries: int = Field(
        2, ge=1, description="a group is given up once so many of its tries found that the task's sandbox cannot be had"
    )
    quarantine_after: int = Field(
        2, ge=1, description="a task is drawn no more once so many of its groups in a row were given up like that"
    )
    forget_quarantine: bool = Field(False, description="when a run is continued: draw quarantined tasks again")
    infra_window: int = Field(
        12,
        ge=1,
        description="the run stops when most of so many tries, the newest of all groups, were infra failures, and when "
        "so many calls of a reward function in a row failed, over five minutes",
    )
    infra_share: float = Field(0.75, gt=0, le=1, description="the share of `infra_window` that counts as most")
    reward: str = Field(
        "verifier", description="verifier, or a function of the outcome: module:function, file.py:function, or a name"
    )
    reward_weights: dict[str, float] = Field(
        default_factory=dict,
        description="partial credit: the reward is this weighted sum of the verifier's named rewards (reward.json); "
        "empty = its own reward counts. A rollout that lacks one of the names is unscored",
    )
    pass_reward: float = Field(1.0, description="a rollout with at least this reward has passed: pass rates, pass@1")
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    loop: LoopConfig = Field(default_factory=LoopConfig)
    executor: Literal["local", "ray"] = Field(
        "local", description="where attempts of agents run: in the runner's process, or on the nodes of a Ray cluster"
    )
    ray: RayConfig = Field(default_factory=RayConfig)
    seed: int = Field(0, description="order of the tasks")
    entry: Entry = Field(
        "auto",
        description="how agents are led to the gateway: base_url, or intercept (their provider's host answers as the "
        "gateway); auto = base_url for agents that take one",
    )

    @model_validator(mode="after")
    def _goes_together(self) -> RolloutConfig:
        if self.min_group is not None and self.min_group > self.group_size:
            raise ValueError(f"min_group ({self.min_group}) is above group_size ({self.group_size}): lower it")
        if self.reward_weights and self.reward != "verifier":
            raise ValueError("reward_weights weigh the verifier's rewards, and `reward` replaces them: give only one")
        if not all(math.isfinite(weight) for weight in self.reward_weights.values()):
            raise ValueError("reward_weights must be finite numbers")
        return self


class PipelineSpec(BaseModel):
    """How the run's gateway makes prompts and asks its engine, for a pipeline that is to do the same."""

    model_config = ConfigDict(extra="forbid")

    engine_url: str
    model: str
    transport: Transport = "auto"
    adapters: bool = False
    bridging: Literal["auto", "always", "never"] = "auto"
    renderer: str = "auto"
    tokenizer: Path | None = None
    thinking_retention: Literal["all", "tool_cycle"] = "all"
    engine_patience_s: float = Field(0.0, ge=0)


class SourceSpec(BaseModel):
    """One of a run's `sources`, as the runner is told of it; paths are absolute."""

    model_config = ConfigDict(extra="forbid")

    name: str = ""  # "" = the run has this one only, see `sources`
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    config: RolloutConfig  # the run's, with the source's own settings and its own tasks to evaluate on
    env: EnvConfig = Field(default_factory=OwnConfig)  # a server's: tasks, harness_bins mean nothing
    tasks: str
    harness: str
    harness_bins: dict[str, Path] = Field(default_factory=dict)  # by name, of every agent of it


class ReplicaSpec(BaseModel):
    """One of the engine's replicas beyond the first: the gateway before it."""

    model_config = ConfigDict(extra="forbid")

    access: Access
    admin_url: str


class RunnerSpec(Schedule):
    """What the supervisor hands to the runner process, as one JSON file in the run folder. Holds no secret.

    With several `sources`, those say what `env`, `tasks`, `harness` and its programs say of a run that has one.
    """

    config: RolloutConfig
    sources: list[SourceSpec] = Field(default_factory=list)
    sandbox: SandboxConfig = Field(default_factory=LocalConfig)
    env: EnvConfig = Field(default_factory=OwnConfig)  # a server's: tasks, harness_bin, sandbox mean nothing
    tasks: str
    harness: str
    harness_bin: Path
    harness_bins: dict[str, Path] = Field(default_factory=dict)  # by name, of every agent where the run has several
    store: Path
    artifacts: Path
    registry: Path  # where owned things are recorded, see sandboxes.lifecycle
    run_id: str
    every_agent: bool = False  # each task that is evaluated on is run with every agent, and not with one by the shares
    num_evaluated: int | None = None  # groups of an evaluation: task and agent in turn; None = each pair once
    model: str  # name the agent asks for
    context: int  # the model's window in tokens
    access: Access  # the gateway's agent port, and what else sandboxes are led to
    admin_url: str  # the gateway's admin interface; its key comes in the environment
    replicas: list[ReplicaSpec] = Field(default_factory=list)  # the engine's, beyond the one of the two lines above
    replica: int = 0  # which of them `access` and `admin_url` are of, see `of_replica`
    pipeline: PipelineSpec | None = None  # the way to the engine for loops of our own; None = there are none

    def each_source(self) -> list[SourceSpec]:
        """One or several, in the same form."""
        return self.sources or [
            SourceSpec(
                config=self.config,
                env=self.env,
                tasks=self.tasks,
                harness=self.harness,
                harness_bins=self.harness_bins,
            )
        ]

    def of_replica(self, replica: int) -> RunnerSpec:
        """The run's spec as the rollouts that are pinned to one of the engine's replicas see it."""
        if replica == 0:
            return self
        other = self.replicas[replica - 1]
        return self.model_copy(update={"replica": replica, "access": other.access, "admin_url": other.admin_url})

    def of_source(self, source: SourceSpec, harness: str | None = None) -> RunnerSpec:
        """The run's spec as the rollouts of one source see it, those of one of its agents too where one is named."""
        own = {name: getattr(source, name) for name in ("config", "env", "tasks", "harness", "harness_bins")}
        bins = source.harness_bins
        return self.model_copy(update={**own, "harness_bin": bins.get(harness or source.harness, self.harness_bin)})

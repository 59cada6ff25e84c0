"""How rollouts are run. Owns the configuration only; `runner` and `rollout` obey it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness_trainer.harnesses.entry import Entry
from sandboxes import SandboxConfig
from sandboxes.base import Access
from sandboxes.local import LocalConfig


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
        300, gt=0, description="wall time to get a sandbox and put the agent in; its image is built before that"
    )
    deadline_s: float | None = Field(
        None, gt=0, description="wall time of a whole rollout, start to score; null = what its stages may take together"
    )
    verify: Literal["auto", "same", "fresh"] = Field(
        "auto", description="tests run in the agent's own sandbox, or in a fresh one that gets its work"
    )
    infra_retries: int = Field(1, ge=0, description="fresh tries when the machinery (not the agent) failed")
    setup_tries: int = Field(
        2, ge=1, description="a group is given up once so many of its tries found that the task's sandbox cannot be had"
    )
    max_consecutive_infra: int = Field(
        12, ge=1, description="the run stops when so many rollouts in a row failed for infra reasons"
    )
    reward: str = Field(
        "verifier", description="verifier, or a function of the outcome: module:function, file.py:function, or a name"
    )
    seed: int = Field(0, description="order of the tasks")
    entry: Entry = Field(
        "auto",
        description="how agents are led to the gateway: base_url, or intercept (their provider's host answers as the "
        "gateway); auto = base_url for agents that take one",
    )


class RunnerSpec(BaseModel):
    """What the supervisor hands to the runner process, as one JSON file in the run folder. Holds no secret."""

    model_config = ConfigDict(extra="forbid")

    config: RolloutConfig
    sandbox: SandboxConfig = Field(default_factory=LocalConfig)
    tasks: str
    harness: str
    harness_bin: Path
    harness_bins: dict[str, Path] = Field(default_factory=dict)  # by name, of every agent where the run has several
    store: Path
    artifacts: Path
    registry: Path  # where owned things are recorded, see sandboxes.lifecycle
    run_id: str
    model: str  # name the agent asks for
    context: int  # the model's window in tokens
    access: Access  # the gateway's agent port, and what else sandboxes are led to
    admin_url: str  # the gateway's admin interface; its key comes in the environment
    max_open_groups: int = Field(ge=1)  # groups that may be running or waiting for the learner at once
    num_groups: int = Field(ge=1)  # groups that the whole run trains; dropped ones are replaced

"""The configuration of a run: one model, so that every flag is a field and every field can stand in a YAML file.

Owns the composition; each room owns its own part. Parts are imported without their heavy libraries.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from harness_trainer.engine.config import EngineConfig
from harness_trainer.environments import EnvConfig, OwnConfig, as_env
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.rollouts.config import RolloutConfig
from sandboxes import SandboxConfig
from sandboxes.docker import DockerConfig
from sandboxes.local import LocalConfig

# Fields that a continued run may change without becoming another run.
MAY_CHANGE = frozenset(
    {"learner.max_steps", "learner.report_to", "env.url", "env.max_sessions", "env.token_env"}
    | {f"rollouts.{name}" for name in ("forget_quarantine", "infra_window", "infra_share")}
    | {f"rollouts.max_{name}" for name in ("concurrent", "creating", "running", "verifying")}
    | {f"rollouts.warm_{name}" for name in ("per_task", "total")}
)


class GatewayConfig(BaseModel):
    """How the run's capture gateway makes prompts; `capture_proxy.rendering` says what each choice means."""

    model_config = ConfigDict(extra="forbid")

    bridging: Literal["auto", "always", "never"] = Field(
        "auto", description="continue prompts token by token: where proven by ids, without proof, or not at all"
    )
    renderer: str = Field("auto", description="how the model's prompts are written: auto, none, qwen3, gpt_oss, ...")
    port: int = Field(0, ge=0, le=65535, description="of the agents' side on loopback, for a tunnel; 0 = any free one")
    public_url: str | None = Field(
        None, description="where sandboxes elsewhere (e2b) reach the agents' side, e.g. a tunnel's https address"
    )
    thinking_retention: Literal["all", "tool_cycle"] = Field(
        "all", description="whether earlier reasoning stays in a prompt that a new user message continues"
    )


class RunConfig(BaseModel):
    """What `train` and `demo` run. Example: `RunConfig(model="smollm2", tasks="examples", harness="pyagent")`."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field("smollm2", description="smollm2, a Hugging Face id, or a model folder")
    tasks: str = Field(
        "examples", description="folder with Harbor tasks, JSONL file, dataset (hf:owner/name@revision), or `examples`"
    )
    harness: str = Field(
        "opencode", description="agent to train in: a shipped name or a YAML file; several with shares: opencode:3,pi:1"
    )
    sandbox: SandboxConfig = Field(default_factory=LocalConfig, description="where agents run")
    env: EnvConfig = Field(
        default_factory=OwnConfig,
        description="who runs tasks, agents and sandboxes: own (the three above), or openenv-harbor:http://HOST:PORT",
    )
    rollouts: RolloutConfig = Field(default_factory=RolloutConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    keep_weights: bool = Field(False, description="keep the weights of every published policy, for audits")

    @field_validator("env", mode="before")
    @classmethod
    def _env_by_name(cls, value: Any) -> Any:
        return as_env(value)

    @field_validator("env")
    @classmethod
    def _one_says_what_runs(cls, value: EnvConfig, info: ValidationInfo) -> EnvConfig:
        for name in ("tasks", "harness", "sandbox"):
            usual = cls.model_fields[name].get_default(call_default_factory=True)
            if value.type != "own" and info.data.get(name, usual) != usual:
                raise ValueError(f"the server has its own {name}: choose with --env.{name}, and leave --{name} out")
        return value

    @field_validator("sandbox", mode="before")
    @classmethod
    def _sandbox_by_name(cls, value: Any) -> Any:
        return as_sandbox(value)


def as_sandbox(value: Any) -> Any:
    """Sandbox settings as a person gives them, in the form that `SandboxConfig` reads.

    `docker` is short for its type, `harbor:daytona` for Harbor's environment of that name; limits that are given change
    those of the type's own and no others.
    """
    value = {"type": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        return value
    value = {"type": "local", **value}
    kind, colon, name = str(value["type"]).partition(":")
    if colon and kind == "harbor":
        value |= {"type": kind, "name": name}
    kinds = {"local": LocalConfig, "docker": DockerConfig}
    if value["type"] in kinds and isinstance(value.get("limits"), dict):
        usual = asdict(kinds[value["type"]]().limits)
        value["limits"] = {**usual, **value["limits"]}
    return value

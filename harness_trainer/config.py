"""The configuration of a run: one model, so that every flag is a field and every field can stand in a YAML file.

Owns the composition; each room owns its own part. Parts are imported without their heavy libraries.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.replicas import refusal
from harness_trainer.environments import (
    WHITE_BOX,
    EnvConfig,
    OrsConfig,
    OwnConfig,
    SourceConfig,
    as_env,
    env_of_tasks,
    read_sources,
)
from harness_trainer.environments.openenv_config import is_address
from harness_trainer.expose import ExposeConfig, NoExpose, as_expose
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.on_ray.config import RayConfig
from harness_trainer.supervision.restarts import RestartConfig
from sandboxes import SandboxConfig
from sandboxes.docker import DockerConfig
from sandboxes.local import LocalConfig

# Fields that a continued run may change without becoming another run.
MAY_CHANGE = frozenset(
    {"learner.max_steps", "learner.report_to", "learner.verify_sync"}
    # Where and how patiently a source is asked; not what it asks of the model, nor what that earns.
    | {f"env.{name}" for name in ("url", "token_env", "max_sessions", "max_episodes", "per_episode", "port")}
    | {f"env.{name}_timeout_s" for name in ("connect", "step", "start", "ping", "idle")}
    | {f"env.{name}" for name in ("capacity_patience_s", "ping_interval_s", "silence_s", "max_message_mb")}
    | {f"learner.{name}" for name in ("num_processes", "accelerate_config", "process_timeout_s")}
    | {"engine.replicas", "engine.gpus"}
    | {"restarts", *(f"restarts.{name}" for name in RestartConfig.model_fields), "gateway.engine_patience_s"}
    | {f"gateway.{name}" for name in ("port", "public_url", "expose")}
    | {f"gateway.expose.{name}" for name in ("type", "listen", "binary", "share_server", "command")}
    | {f"rollouts.{name}" for name in ("forget_quarantine", "infra_window", "infra_share")}
    | {f"rollouts.max_{name}" for name in ("concurrent", "creating", "running", "verifying")}
    | {f"rollouts.warm_{name}" for name in ("per_task", "total")}
    | {"rollouts.executor", "rollouts.ray", *(f"rollouts.ray.{name}" for name in RayConfig.model_fields)}
)


def may_change(config: SamplingConfig) -> frozenset[str]:
    """`MAY_CHANGE`, and the same of each source; a server that is named by its address may have moved."""
    found = set(MAY_CHANGE)
    for source in config.each_source:
        at = f"sources.{source.name}." if source.name else ""
        found |= {f"{at}{name}" for name in MAY_CHANGE if name.startswith("env.")}
        if is_address(getattr(source.env, "target", "")):  # `tasks` has it again, of an ORS server
            found |= {f"{at}env.target"} | ({f"{at}tasks"} if isinstance(source.env, OrsConfig) else set())
    return frozenset(found)


_OWN = {
    False: "the server has its own {name}: choose with --env.{name}, and leave --{name} out",
    True: "with --env the turns are ours, and there is no {name}: leave --{name} out",
}


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
    expose: ExposeConfig = Field(
        default_factory=NoExpose, description="how the agents' side is opened to sandboxes elsewhere, and watched"
    )
    thinking_retention: Literal["all", "tool_cycle"] = Field(
        "all", description="whether earlier reasoning stays in a prompt that a new user message continues"
    )
    engine_patience_s: float = Field(
        300, ge=0, description="how long an agent's call waits for an engine that is away or has no policy yet"
    )

    @field_validator("expose", mode="before")
    @classmethod
    def _expose_by_name(cls, value: Any) -> Any:
        return as_expose(value)


class SamplingConfig(BaseModel):
    """What it takes to run agents on tasks, whether somebody learns from it or not."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field("smollm2", description="smollm2, a Hugging Face id, or a model folder")
    tasks: str = Field(
        "examples",
        description="folder with Harbor tasks, JSONL file, dataset (hf:owner/name@revision), `examples`, or an ORS "
        "environment (train: ors:owner/name, ors:http://HOST:PORT)",
    )
    harness: str = Field(
        "opencode", description="agent: a shipped name or a YAML file; several with shares: opencode:3,pi:1"
    )
    sandbox: SandboxConfig = Field(default_factory=LocalConfig, description="where agents run")
    env: EnvConfig = Field(
        default_factory=OwnConfig,
        description="who runs tasks, agents and sandboxes: own (the three above), openenv-harbor:http://HOST:PORT, or "
        "our own turns on the rows of --tasks rows.jsonl: class:FILE:Class, openenv:URL, loop:FILE:Class "
        "(--tasks ors:NAME_OR_URL sets it too)",
    )
    sources: list[SourceConfig] | None = Field(
        None,
        description="several at once, by weights, instead of tasks, harness and env: a list in the YAML, or here the "
        "path of a YAML file that holds one",
    )
    rollouts: RolloutConfig = Field(default_factory=RolloutConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    restarts: RestartConfig = Field(default_factory=RestartConfig)

    @field_validator("sandbox", mode="before")
    @classmethod
    def _sandbox_by_name(cls, value: Any) -> Any:
        return as_sandbox(value)

    @field_validator("sources", mode="before")
    @classmethod
    def _sources_read(cls, value: Any) -> Any:
        return read_sources(value)

    @model_validator(mode="before")
    @classmethod
    def _tasks_may_name_env(cls, data: Any) -> Any:
        return env_of_tasks(data)

    @field_validator("env", mode="before")
    @classmethod
    def _env_by_name(cls, value: Any) -> Any:
        return as_env(value)

    @field_validator("env")
    @classmethod
    def _one_says_what_runs(cls, value: EnvConfig, info: ValidationInfo) -> EnvConfig:
        # An environment whose turns are ours has rows as its tasks, and neither agents nor sandboxes.
        own = ("harness", "sandbox") if isinstance(value, WHITE_BOX) else ("tasks", "harness", "sandbox")
        if isinstance(value, OrsConfig) and not str(info.data.get("tasks")).startswith("ors:"):
            own = ("tasks", *own)
        for name in own:
            usual = cls.model_fields[name].get_default(call_default_factory=True)
            if value.type != "own" and info.data.get(name, usual) != usual:
                raise ValueError(_OWN[isinstance(value, WHITE_BOX)].format(name=name))
        return value

    @model_validator(mode="after")
    def _sources_stand_alone(self) -> Self:
        if self.sources is None:
            return self
        for name in ("tasks", "harness", "env"):
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"sources say what runs, and {name} does too: give {name} to a source, or no sources")
        if self.rollouts.evaluation.tasks is not None:
            raise ValueError(
                "each source has its own tasks to evaluate on: give it `evaluation`, and leave"
                " rollouts.evaluation.tasks out"
            )
        for source in self.sources:
            own_rollouts(self.rollouts, source)
        return self

    @model_validator(mode="after")
    def _replicas_can_be_had(self) -> Self:
        learner = getattr(self, "learner", None)  # of a run that has one
        why_not = refusal(
            self.engine,
            gateway_port=self.gateway.port,
            is_exposed=self.gateway.expose.type != "none" or self.gateway.public_url is not None,
            sandbox=self.sandbox.type,
            environments=[source.env.type for source in self.each_source],
            weight_sync="shm" if learner is None else learner.weight_sync.type,
            executor=self.rollouts.executor,
        )
        if why_not is None and self.engine.replicas > 1 and getattr(self, "engine_url", None) is not None:
            why_not = "engine_url names an engine that serves already, which is one: leave engine.replicas out"
        if why_not is not None:
            raise ValueError(why_not)
        return self

    @model_validator(mode="after")
    def _a_cluster_is_used(self) -> Self:
        # Here and not where `rollouts` is defined, whose settings are read again for a run that is long over.
        if why_not := self.rollouts.ray.refusal(self.rollouts.executor):
            raise ValueError(why_not)
        return self

    @property
    def each_source(self) -> list[SourceConfig]:
        """One or several, in the same form; the only one of a run without `sources` is named ""."""
        if self.sources is not None:
            return self.sources
        own = self.env.type == "own"
        return [
            SourceConfig.model_construct(
                name="",
                tasks=self.tasks,
                harness=self.harness if own else None,
                env=self.env,
                evaluation=self.rollouts.evaluation.tasks,
            )
        ]

    @property
    def evaluates(self) -> bool:
        """Whether there are tasks that are only evaluated on."""
        return any(source.evaluation is not None for source in self.each_source)


class RunConfig(SamplingConfig):
    """What `train` and `demo` run. Example: `RunConfig(model="smollm2", tasks="examples", harness="pyagent")`."""

    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    keep_weights: bool = Field(False, description="keep the weights of every published policy, for audits")


class CollectConfig(SamplingConfig):
    """What `rollout` runs. Example: `CollectConfig(model="smollm2", tasks="examples", harness="pi", samples=8)`.

    Sources may be those of a training run: `evaluation` of each is left out, and `left_out` names them.
    """

    samples: int = Field(1, ge=1, description="rollouts of every task with every agent (k)")
    num_groups: int | None = Field(
        None, ge=1, description="pairs of task and agent to run, in turn, each so many times; null = every pair once"
    )
    engine_url: str | None = Field(
        None,
        description="an OpenAI-compatible engine that serves already, instead of one of our own; `model` is then its "
        "name for the model, and CAPTURE_PROXY_ENGINE_KEY its key",
    )

    _left_out: list[str] = PrivateAttr(default_factory=list)

    @property
    def left_out(self) -> list[str]:
        """Settings of sources that are for training, by their path: ["sources.code.evaluation"]."""
        return self._left_out

    @model_validator(mode="after")
    def _one_set_of_tasks(self) -> CollectConfig:
        if self.rollouts.evaluation.tasks is not None:
            raise ValueError("rollouts.evaluation.tasks is for training: here --tasks are what is evaluated")
        if self.sources is not None:
            self._left_out = [f"sources.{one.name}.evaluation" for one in self.sources if one.evaluation is not None]
            self.sources = [one.model_copy(update={"evaluation": None}) for one in self.sources]
        return self

    def as_run(self) -> RunConfig:
        """The same for what needs a whole run's settings."""
        run = RunConfig(**{name: getattr(self, name) for name in SamplingConfig.model_fields})
        evaluation = run.rollouts.evaluation.model_copy(update={"samples": self.samples})
        run.rollouts = run.rollouts.model_copy(update={"evaluation": evaluation})
        return run


def own_rollouts(rollouts: RolloutConfig, source: SourceConfig) -> RolloutConfig:
    """The run's settings as they are in the rollouts of one source. Raises ValueError where they do not go together.

    Of several sources, one whose turns are ours has no verifier: what the run says of its rewards is for the others.
    """
    evaluation = rollouts.evaluation.model_copy(update={"tasks": source.evaluation})
    whole = {**rollouts.model_dump(), "evaluation": evaluation}
    if source.name and isinstance(source.env, WHITE_BOX):
        whole |= {"reward": "verifier", "reward_weights": {}}
    whole |= source.own_settings
    try:
        return RolloutConfig.model_validate(whole)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
        raise ValueError(f"source {source.name}: {said}") from error


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

"""What a run's sources come to, found out before anything slow is started: their tasks, agents, servers, settings.

Owns that inspection, source by source, and the form in which the runner is told (`SourceSpec`): paths are absolute,
datasets are pinned to a commit, agents are installed. A fault is named with the source that it is in. Called by the
supervisor, for `train` and for `rollout`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness_trainer.cache import cache_dir
from harness_trainer.config import SamplingConfig, own_rollouts
from harness_trainer.environments import (
    WHITE_BOX,
    EnvConfig,
    EnvironmentClassConfig,
    OpenEnvHarborConfig,
    OrsConfig,
    SourceConfig,
)
from harness_trainer.environments.openenv_harbor import inspect_server, require_reachable
from harness_trainer.errors import ConfigError
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.loops import inspect_source, pin_env, pin_rows
from harness_trainer.rewards.custom import load_reward, pin_reward
from harness_trainer.rollouts.boxes import check_tasks
from harness_trainer.rollouts.budget import Limits
from harness_trainer.rollouts.config import RolloutConfig, SourceSpec
from harness_trainer.rollouts.mix import load_mix, pin_harness
from harness_trainer.rollouts.on_ray.precheck import require_cluster, require_possible
from harness_trainer.rollouts.sources import naming
from harness_trainer.tasks import Task, load_tasks, pin_tasks

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Inspected:
    """One source. Example: Inspected(SourceSpec(name="code", ...), [moon, star], [sun], ["opencode", "pi"])."""

    spec: SourceSpec
    tasks: list[Task]  # to train on
    held_out: list[Task]  # that are only evaluated on
    agents: list[str]  # names, as metrics have them

    @property
    def longest_s(self) -> float:
        """What the longest of its rollouts may take until its end is known, an image that is built first included.

        Of a group that is scored together no end is known before the last, and they may have to play one by one.
        """
        config, env = self.spec.config, self.spec.env
        together = isinstance(env, EnvironmentClassConfig) and env.reward_scope == "group"
        each = (Limits.of(config, task).total_s + task.box.build_timeout_s for task in (*self.tasks, *self.held_out))
        return max(each) * (config.group_size if together else 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """All sources of a run, in the order of its settings."""

    sources: list[Inspected]

    @property
    def specs(self) -> list[SourceSpec]:
        return [source.spec for source in self.sources]

    @property
    def longest_s(self) -> float:
        return max(source.longest_s for source in self.sources)

    @property
    def line(self) -> str:
        """Example: "code: opencode and pi on 12 tasks; wordle on 64 tasks"."""
        lines = []
        for source in self.sources:
            name, agents = source.spec.name, " and ".join(source.agents)
            who = agents if not name else name if agents == name else f"{name}: {agents}"
            lines.append(f"{who} on {len(source.tasks)} tasks")
        return "; ".join(lines)

    def only_evaluated(self) -> Workload:
        """The same with the tasks that would be trained on as those to evaluate on: for a run that learns nothing."""
        return Workload([replace(source, spec=_evaluating(source.spec)) for source in self.sources])


def _evaluating(spec: SourceSpec) -> SourceSpec:
    tasks = "" if isinstance(spec.env, OrsConfig) else spec.tasks
    evaluation = spec.config.evaluation.model_copy(update={"tasks": tasks})
    return spec.model_copy(update={"config": spec.config.model_copy(update={"evaluation": evaluation})})


@dataclass(frozen=True, slots=True)
class Inspector:
    """Of one run. `say` shows a person what takes time."""

    config: SamplingConfig
    run_id: str
    registry: Path
    say: Say

    def inspect(self) -> Workload:
        """Raises ConfigError, TaskError, SetupError, EnvironmentFault, each naming the source that it is in."""
        on_nodes = self.config.rollouts.executor == "ray"
        if on_nodes and not any(source.env.type == "own" for source in self.config.each_source):
            raise ConfigError(
                "--executor ray runs agents in sandboxes on other hosts, and this run has none: leave "
                "rollouts.executor out"
            )
        found = []
        for source in self.config.each_source:
            with naming(source.name):
                settings = own_rollouts(self.config.rollouts, source)
                load_reward(settings.reward)
                settings = settings.model_copy(update={"reward": pin_reward(settings.reward)})
                found.append(self._one(source, settings))
        if on_nodes:
            self.say(require_cluster(self.config.rollouts.ray, self.config.rollouts.max_concurrent))
        return Workload(found)

    def _one(self, source: SourceConfig, settings: RolloutConfig) -> Inspected:
        if isinstance(source.env, OpenEnvHarborConfig):
            return self._server(source, source.env, settings)
        if isinstance(source.env, WHITE_BOX):
            return self._white_box(source, settings)
        return self._agents(source, settings)

    def _server(self, source: SourceConfig, env: OpenEnvHarborConfig, settings: RolloutConfig) -> Inspected:
        gateway = self.config.gateway
        if settings.evaluation.tasks is not None:
            raise ConfigError("rollouts.evaluation.tasks runs in our own sandboxes: leave it out with --env")
        require_reachable(env, gateway.public_url, is_exposed=gateway.expose.type != "none")
        self.say(f"asking the server at {env.url} what it can run")
        found = asyncio.run(inspect_server(env))
        for note in found.notes:
            self.say(note)
        return Inspected(_spec(source, settings, env, "", env.harness), found.tasks, [], [env.harness])

    def _white_box(self, source: SourceConfig, settings: RolloutConfig) -> Inspected:
        """An environment whose turns are ours, or a loop: made and asked here for its tasks."""
        env, evaluation = source.env, settings.evaluation.tasks
        if source.name:
            env = env.model_copy(update={"name": source.name})
        rows = pin_rows(env, source.tasks or "")
        held_out = None if evaluation is None else pin_rows(env, evaluation, held_out=True)
        name, tasks = asyncio.run(inspect_source(env, rows))
        kept = [] if held_out is None else asyncio.run(inspect_source(env, held_out))[1]
        return Inspected(_spec(source, settings, pin_env(env), rows, name, evaluation=held_out), tasks, kept, [name])

    def _agents(self, source: SourceConfig, settings: RolloutConfig) -> Inspected:
        spec = pin_tasks(source.tasks or "")  # every part of the run reads the same commit of a dataset
        tasks = load_tasks(spec)
        held_out = settings.evaluation.tasks
        evaluation = None if held_out is None else pin_tasks(held_out)
        kept = load_tasks(evaluation) if evaluation else []
        harness = source.harness or str(SamplingConfig.model_fields["harness"].default)
        mix = load_mix(harness, [*tasks, *kept], settings)
        require_way_out(self.config)
        if settings.executor == "ray":  # sandboxes and programs are the nodes', and each looks for itself
            require_possible([*tasks, *kept], mix.harnesses.values(), self.config.sandbox, self.config.engine.replicas)
            bins = dict.fromkeys(mix.harnesses, Path("/usr/bin"))
        else:
            asyncio.run(check_tasks([*tasks, *kept], self.config.sandbox, run_id=self.run_id, registry=self.registry))
            bins = {name: ensure_installed(agent, cache_dir(), self.say) for name, agent in mix.harnesses.items()}
        made = _spec(source, settings, source.env, spec, pin_harness(harness), bins=bins, evaluation=evaluation)
        return Inspected(made, tasks, kept, list(bins))


def require_way_out(config: SamplingConfig) -> None:
    """Sandboxes on other machines must be told where the gateway is. Raises ConfigError, before anything slow."""
    gateway = config.gateway
    if config.sandbox.type in ("e2b", "harbor") and gateway.public_url is None and gateway.expose.type == "none":
        raise ConfigError(
            f"sandboxes of {config.sandbox.type} run on other machines and cannot reach the gateway on this one: open "
            "it with --gateway.expose cloudflared (or gradio, command, direct), or give its --gateway.public-url"
        )


def _spec(
    source: SourceConfig,
    settings: RolloutConfig,
    env: EnvConfig,
    tasks: str,
    harness: str,
    *,
    bins: dict[str, Path] | None = None,
    evaluation: str | None = None,
) -> SourceSpec:
    of_evaluation = settings.evaluation.model_copy(update={"tasks": evaluation})
    return SourceSpec(
        name=source.name,
        weight=source.weight,
        config=settings.model_copy(update={"evaluation": of_evaluation}),
        env=env,
        tasks=tasks,
        harness=harness,
        harness_bins=bins or {},
    )

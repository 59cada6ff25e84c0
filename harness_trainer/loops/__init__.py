"""White-box loops: rollouts whose turns we own. `open_source` makes what `rollouts` runs of a run's `--env`."""

from __future__ import annotations

from pathlib import Path

from harness_trainer.environments import EnvConfig, EnvironmentClassConfig, OpenEnvConfig, OrsConfig, OwnLoopConfig
from harness_trainer.loops.base import Environment, EnvironmentFault, Source
from harness_trainer.tasks import Task


def open_source(env: EnvConfig, tasks: str) -> Source:
    """The source that `env` names, on `tasks`; an async context manager. Raises EnvironmentFault for a wrong name.

    What it needs is imported here, so that a run without it never does.
    """
    if isinstance(env, OwnLoopConfig):
        from harness_trainer.loops.loading import load_target
        from harness_trainer.loops.own_loop import OwnLoop

        return OwnLoop(load_target(env.target), Path(tasks), env.name)
    if isinstance(env, EnvironmentClassConfig):
        from harness_trainer.loops.environment_class import ClassEnvironment
        from harness_trainer.loops.tool_loop import ToolLoop

        of_class = ClassEnvironment(env, Path(tasks))
        return ToolLoop(of_class, of_class.group_rewards)
    if isinstance(env, OpenEnvConfig):
        from harness_trainer.loops.openenv.environment import OpenEnvEnvironment
        from harness_trainer.loops.tool_loop import ToolLoop

        return ToolLoop(OpenEnvEnvironment(env, Path(tasks)))
    if isinstance(env, OrsConfig):
        from harness_trainer.loops.tool_loop import ToolLoop

        return ToolLoop(_ors(env, tasks))
    raise EnvironmentFault(f"--env {env.type} is no environment whose turns are ours")


def pin_env(env: EnvConfig) -> EnvConfig:
    """The same with the paths of files made absolute: the runner works in another folder."""
    if isinstance(env, OwnLoopConfig):
        from harness_trainer.loops.loading import pin_target

        return env.model_copy(update={"target": pin_target(env.target)})
    if isinstance(env, EnvironmentClassConfig):
        from harness_trainer.loops.loading import pin_target

        rewards = [pin_target(reward) for reward in env.rewards]
        return env.model_copy(update={"target": pin_target(env.target), "rewards": rewards})
    if isinstance(env, OpenEnvConfig):
        from harness_trainer.loops.loading import pin_target

        named = f"{env.kind}:{pin_target(env.named)}" if env.kind in ("local", "python") else env.target
        return env.model_copy(update={"target": named, "rewards": [pin_target(reward) for reward in env.rewards]})
    if isinstance(env, OrsConfig):
        from harness_trainer.loops.loading import pin_target

        secrets = {name: _pin_secret(source) for name, source in env.secrets.items()}
        rewards = [pin_target(reward) for reward in env.rewards]
        return env.model_copy(update={"secrets": secrets, "rewards": rewards})
    return env


def pin_rows(env: EnvConfig, rows: str, *, held_out: bool = False) -> str:
    """What `open_source` is given as tasks: a file, made absolute; of an ORS environment a choice among its own."""
    if not isinstance(env, OrsConfig):
        return str(Path(rows).expanduser().resolve())
    return rows if held_out else ""


def _ors(env: OrsConfig, chosen: str) -> Environment:
    try:
        from harness_trainer.loops.ors.environment import OrsEnvironment
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(("openreward", "aiohttp")):
            raise
        raise EnvironmentFault("ORS needs OpenReward's SDK: pip install 'harness-trainer[ors]'") from error
    return OrsEnvironment(env, chosen)


def _pin_secret(source: str) -> str:
    kind, _, where = source.partition(":")
    return f"file:{Path(where).expanduser().resolve()}" if kind == "file" else source


async def inspect_source(env: EnvConfig, tasks: str) -> tuple[str, list[Task]]:
    """The source's name and its tasks, before a run starts. Raises EnvironmentFault for all that is wrong with it."""
    async with open_source(env, tasks) as source:
        return source.name, await source.tasks()

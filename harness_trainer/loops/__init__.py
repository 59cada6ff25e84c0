"""White-box loops: rollouts whose turns we own. `open_source` makes what `rollouts` runs of a run's `--env`."""

from __future__ import annotations

from pathlib import Path

from harness_trainer.environments import EnvConfig, EnvironmentClassConfig, OwnLoopConfig
from harness_trainer.loops.base import EnvironmentFault, Source
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

        return ToolLoop(ClassEnvironment(env, Path(tasks)))
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
    return env


async def inspect_source(env: EnvConfig, tasks: str) -> tuple[str, list[Task]]:
    """The source's name and its tasks, before a run starts. Raises EnvironmentFault for all that is wrong with it."""
    async with open_source(env, tasks) as source:
        return source.name, await source.tasks()

"""Opens the sources whose turns are ours: environments and loops that `--env` or one of `sources` names.

Owns what is opened for one and in which order: the source, its tasks, how its rollouts reach the model side. How one
rollout is run is `white_box`'s. A rollout ends with its runner: its environment and its conversation were in that
process. The next one closes it, session included, and runs its slot again (`sealing`). Called by `__main__`.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import replace

from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.loops import inspect_source, open_source
from harness_trainer.loops.places import Places
from harness_trainer.rollouts.config import SourceSpec
from harness_trainer.rollouts.group_scores import group_scores_of
from harness_trainer.rollouts.model_side import ModelSide
from harness_trainer.rollouts.sources import OpenSource, named
from harness_trainer.rollouts.white_box import WhiteBoxMeans, run_rollout

log = logging.getLogger("harness_trainer.rollouts")


async def open_white_box(
    stack: AsyncExitStack, spec: SourceSpec, model_side: ModelSide, places: dict[str, Places]
) -> OpenSource:
    """The source, open until `stack` is left. Raises EnvironmentFault for all that is wrong with it.

    `places` are those of servers, by address: sources that name one server share what it allows.
    """
    source = await stack.enter_async_context(open_source(spec.env, spec.tasks))
    server = spec.env.shared_server if isinstance(spec.env, OpenEnvConfig) else None
    its_places = Places(None) if server is None else places.setdefault(server, Places(None))
    its_places.learn(source.max_episodes)
    tasks = await source.tasks()
    evaluation = spec.config.evaluation.tasks
    held_out = (await inspect_source(spec.env, evaluation))[1] if evaluation is not None else []
    means = WhiteBoxMeans(spec.config, model_side, {source.name: source}, {source.name: its_places})
    return OpenSource(
        spec.config,
        named(spec.name, tasks),
        lambda job: run_rollout(replace(job, harness=source.name), means),  # a server may have been renamed meanwhile
        lambda number, task: source.name,
        name=spec.name,
        weight=spec.weight,
        evaluation_tasks=named(spec.name, held_out),
        group_scores=group_scores_of(source),
    )

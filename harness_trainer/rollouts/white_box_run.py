"""A runner whose rollouts are all white-box: what `__main__` runs where `--env` names an environment or a loop of ours.

Owns what is opened for it and in which order: the source, its tasks, the model side. How one rollout is run is
`white_box`'s, what is run when `runner`'s. A rollout ends with its runner: its environment and its conversation were in
that process. The next one closes it, session included, and runs its slot again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack

from harness_trainer.errors import ConfigError
from harness_trainer.loops import inspect_source, open_source
from harness_trainer.rollouts.config import RunnerSpec
from harness_trainer.rollouts.model_side import ModelSide, open_model_side
from harness_trainer.rollouts.runner import Runner
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job
from harness_trainer.rollouts.white_box import WhiteBoxMeans, run_rollout
from harness_trainer.tasks import Task

log = logging.getLogger("harness_trainer.rollouts")


async def run_white_box(spec: RunnerSpec, store: RolloutStore) -> None:
    """Until it is cancelled. Raises EnvironmentFault, and what `Runner.run` does."""
    if spec.pipeline is None:
        raise ConfigError("the run's spec has no way to the engine (`pipeline`): start it with `harness-trainer train`")
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(open_source(spec.env, spec.tasks))
        tasks = await source.tasks()
        evaluation = spec.config.evaluation.tasks
        held_out = (await inspect_source(spec.env, evaluation))[1] if evaluation is not None else []
        model_side = await stack.enter_async_context(open_model_side(spec.pipeline, spec.store))
        means = WhiteBoxMeans.of(spec.config, model_side, {source.name: source})
        runner = Runner(
            spec.config,
            tasks,
            store,
            lambda job: run_rollout(job, means),
            harness_of=lambda group_id, task: source.name,
            schedule=spec,
            evaluation_tasks=held_out,
            evaluated=_evaluated(source.name, held_out, spec.num_evaluated),
            take_over=lambda: close_lost(store, model_side),
        )
        await runner.run()


async def close_lost(store: RolloutStore, model_side: ModelSide) -> Sequence[Job]:
    """Nothing of a killed runner's rollouts goes on."""
    lost = await asyncio.to_thread(store.unfinished_rollouts)
    await asyncio.to_thread(store.close_lost)
    await asyncio.gather(*(model_side.seal(each.rollout_id) for each in lost))
    if lost:
        log.info("%d rollouts were under way when the last runner ended, and ended with it", len(lost))
    return ()


def _evaluated(source: str, tasks: Sequence[Task], num: int | None) -> list[tuple[str, str]]:
    """As `mix.Mix.evaluated`, for the one source that there is."""
    pairs = [(task.name, source) for task in tasks]
    return [pairs[n % len(pairs)] for n in range(len(pairs) if num is None else num)] if pairs else []

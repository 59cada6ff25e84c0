"""For tests of the rollout policy: the real runner and store, rollouts that cost nothing, a learner of three lines."""

import asyncio
from types import SimpleNamespace

from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.policy_config import Schedule
from harness_trainer.rollouts.runner import Runner
from harness_trainer.rollouts.sources import OpenSource, Sources
from harness_trainer.rollouts.types import Outcome, RolloutResult

TASKS = [SimpleNamespace(name=name) for name in ("a", "b", "c")]


def finished(job, outcome=Outcome.OK, reward=1.0, **facts):
    result = RolloutResult(job.rollout_id, job.group_id, job.task.name, job.harness, job.attempt, outcome, reward)
    for name, value in facts.items():
        setattr(result, name, value)
    return result


def infra(job, detail="no route to engine", **facts):
    return finished(job, Outcome.INFRA_FAILED, None, detail=detail, failed_stage="agent", **facts)


def no_sandbox(job):
    return infra(job, "SetupFailed: image does not build", setup_failed=True)


def sampled_by(*versions):
    """A row trace whose one turn was sampled by these policies."""
    spans = [{"version": f"v{version}", "start": n, "end": n + 1} for n, version in enumerate(versions)]
    return {"turns": [{"loss_mask": [0, *[1] * len(versions)], "metadata": {"policy_versions": spans}}]}


def first_error(error):
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Waits(list):
    """A sleep that takes no time and remembers what it was asked for."""

    async def __call__(self, seconds):
        self.append(seconds)
        await asyncio.sleep(0)


async def run_until(
    store, attempt, done, *, tasks=TASKS, evaluation_tasks=(), schedule=None, sleep=None, harness_of=None, **settings
):
    """Run the scheduler until `done()`, then cancel it, as SIGTERM does. Raises what it raised, unwrapped."""
    config = RolloutConfig(**{"group_size": 2, "max_concurrent": 2, **settings})
    source = OpenSource(config, tasks, attempt, harness_of or (lambda *_: "h"), evaluation_tasks=evaluation_tasks)
    await run_sources(store, [source], done, config=config, schedule=schedule, sleep=sleep)


async def run_sources(store, sources, done, *, config, schedule=None, sleep=None, plan=lambda needs: None):
    """The same with sources that are open."""
    runner = Runner(
        config,
        Sources(sources, plan=plan),
        store,
        schedule=Schedule(**{"max_open_groups": 2, "num_groups": 100, **(schedule or {})}),
        sleep=Waits() if sleep is None else sleep,
    )
    task = asyncio.ensure_future(runner.run())
    try:
        async with asyncio.timeout(20):
            while not task.done() and not done():
                await asyncio.sleep(0.02)
        if task.done():
            task.result()
    except BaseExceptionGroup as error:
        raise first_error(error) from error
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def ready(store, count):
    return lambda: store.group_counts().get("ready", 0) >= count

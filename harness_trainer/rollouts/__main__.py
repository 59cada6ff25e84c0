"""The rollout runner as a process: `python -m harness_trainer.rollouts --spec FILE`, started by the supervisor.

Owns its life cycle: signals, the store's error entry, the exit code. The admin key comes in the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import traceback
from contextlib import AsyncExitStack
from pathlib import Path

from capture_proxy.admin_client import AdminClient
from harness_trainer.environments import WHITE_BOX, OpenEnvHarborConfig
from harness_trainer.errors import HarnessTrainerError
from harness_trainer.rewards.custom import load_reward
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.rollouts.budget import Caps
from harness_trainer.rollouts.config import GATEWAY_PATIENCE_S, RolloutConfig, RunnerSpec
from harness_trainer.rollouts.harbor import open_harbor
from harness_trainer.rollouts.harbor_server import run_on_server
from harness_trainer.rollouts.journal import Journal
from harness_trainer.rollouts.mix import load_mix
from harness_trainer.rollouts.proxies import open_access
from harness_trainer.rollouts.rollout import Means, run_rollout
from harness_trainer.rollouts.runner import Runner
from harness_trainer.rollouts.sealing import sealing
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.takeover import Takeover
from harness_trainer.rollouts.white_box_run import run_white_box
from harness_trainer.tasks import load_tasks
from sandboxes import open_backend
from sandboxes.base import SandboxError
from sandboxes.ownership import keeper_of_this_process
from sandboxes.pool import Bounds, Pool

log = logging.getLogger("harness_trainer.rollouts")

RUNNER_ERROR = "runner_error"  # run-state key that holds the one line a person should read


async def _main(spec: RunnerSpec, store: RolloutStore) -> None:
    current = asyncio.current_task()
    assert current is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, current.cancel)
    admin_key = os.environ["CAPTURE_PROXY_ADMIN_KEY"]
    if isinstance(spec.env, OpenEnvHarborConfig):
        await run_on_server(spec, spec.env, store, admin_key)
        return
    if isinstance(spec.env, WHITE_BOX):
        await run_white_box(spec, store)
        return
    tasks = load_tasks(spec.tasks)
    held_out = load_tasks(spec.config.evaluation.tasks) if spec.config.evaluation.tasks else []
    everything = [*tasks, *held_out]
    mix = load_mix(spec.harness, everything, spec.config)
    reward = load_reward(spec.config.reward)
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(AdminClient(spec.admin_url, admin_key, patience_s=GATEWAY_PATIENCE_S))
        access = await open_access(stack, spec, everything, admin_key, *mix.harnesses.values())
        boxes = {name: Boxes(_spec_for(spec, name), harness, access) for name, harness in mix.harnesses.items()}
        backend = open_backend(spec.sandbox, run_id=spec.run_id, registry=spec.registry, access=access)
        await stack.enter_async_context(backend)
        for task in everything:
            for of_agent in boxes.values():
                of_agent.check(task, backend)
        pool = await stack.enter_async_context(Pool(backend, _bounds(spec.config)))
        harbor = await open_harbor(stack, spec, backend, *mix.harnesses.values())
        caps = Caps(spec.config)
        journal = Journal(store, spec.sandbox.type, keeper_of_this_process(spec.registry))
        means = {
            name: Means(of_agent, backend, pool, caps, admin, reward, harbor, journal)
            for name, of_agent in boxes.items()
        }
        runner = Runner(
            spec.config,
            tasks,
            store,
            sealing(admin, lambda job: run_rollout(job, means[job.harness])),
            harness_of=mix.of_group,
            schedule=spec,
            evaluation_tasks=held_out,
            evaluated=mix.evaluated(held_out, every_agent=spec.every_agent, num=spec.num_evaluated),
            plan=lambda needs: pool.plan([(boxes[agent].spec_of(task), count) for task, agent, count in needs]),
            take_over=Takeover(
                journal,
                backend,
                spec.registry,
                admin,
                tasks={task.name: task for task in tasks},
                evaluation_tasks={task.name: task for task in held_out},
                harnesses=boxes.keys(),
            ),
        )
        try:
            await runner.run()
        finally:
            log.info("sandbox pool: %s", pool.counts)


def _spec_for(spec: RunnerSpec, harness: str) -> RunnerSpec:
    """The run's spec as the rollouts of one of its agents see it."""
    return spec.model_copy(update={"harness_bin": spec.harness_bins.get(harness, spec.harness_bin)})


def _bounds(config: RolloutConfig) -> Bounds:
    return Bounds(
        per_spec=config.warm_per_task,
        total=config.warm_total,
        starting=config.max_creating or config.max_concurrent,
    )


def _judgement(error: BaseException) -> str | None:
    """Why the run cannot go on; None = it is an error that nobody foresaw, and the runner may be started again."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, HarnessTrainerError | SandboxError) else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="harness_trainer.rollouts", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True)
    spec = RunnerSpec.model_validate_json(parser.parse_args().spec.read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    store = RolloutStore(spec.store)
    store.set_state(RUNNER_ERROR, "")
    try:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_main(spec, store))
        return 0
    except Exception as error:
        traceback.print_exc()
        if (judgement := _judgement(error)) is not None:
            store.set_state(RUNNER_ERROR, judgement)
        return 1
    finally:
        store.close()


if __name__ == "__main__":
    sys.exit(main())

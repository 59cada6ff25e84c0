"""The rollout runner as a process: `python -m harness_trainer.rollouts --spec FILE`, started by the supervisor.

Owns its life cycle (signals, the store's error entry, the exit code) and the opening of the run's sources, of whatever
kinds, under one runner. The admin key comes in the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from capture_proxy.admin_client import AdminClient
from harness_trainer.environments import WHITE_BOX, OpenEnvHarborConfig
from harness_trainer.errors import ConfigError, HarnessTrainerError
from harness_trainer.loops.places import Places
from harness_trainer.rollouts.agent_sources import open_agents
from harness_trainer.rollouts.config import GATEWAY_PATIENCE_S, RunnerSpec
from harness_trainer.rollouts.harbor_server import open_server
from harness_trainer.rollouts.model_side import ModelSide, open_model_side
from harness_trainer.rollouts.runner import Runner, TakeOver
from harness_trainer.rollouts.sealing import Seal, close_lost, seal, seal_removed
from harness_trainer.rollouts.sources import OpenSource, Sources, naming
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job
from harness_trainer.rollouts.white_box_run import open_white_box
from sandboxes.base import SandboxError

log = logging.getLogger("harness_trainer.rollouts")

RUNNER_ERROR = "runner_error"  # run-state key that holds the one line a person should read


async def _main(spec: RunnerSpec, store: RolloutStore) -> None:
    current = asyncio.current_task()
    assert current is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, current.cancel)
    async with AsyncExitStack() as stack:
        sources, take_over = await _opened(stack, spec, store, os.environ["CAPTURE_PROXY_ADMIN_KEY"])
        runner = Runner(
            spec.config,
            sources,
            store,
            schedule=spec,
            num_evaluated=spec.num_evaluated,
            take_over=partial(_settled, take_over, spec),
        )
        await runner.run()


async def _opened(
    stack: AsyncExitStack, spec: RunnerSpec, store: RolloutStore, admin_key: str
) -> tuple[Sources, TakeOver]:
    """Every source of the run, in the order of its settings, and who takes over from a killed runner."""
    white_box = [source for source in spec.each_source() if isinstance(source.env, WHITE_BOX)]
    own = [source for source in spec.each_source() if source.env.type == "own"]
    found: dict[str, OpenSource] = {}
    places: dict[str, Places] = {}  # of servers that several sources may name
    model_side = agents = None
    admins: list[AdminClient] = []  # of the gateway, or of each replica's
    if white_box:
        if spec.pipeline is None:
            what = "the run's spec has no way to the engine (`pipeline`)"
            raise ConfigError(f"{what}: start it with `harness-trainer train`")
        model_side = await stack.enter_async_context(open_model_side(spec.pipeline, spec.store))
    if len(white_box) < len(spec.each_source()):
        for url in (spec.admin_url, *(replica.admin_url for replica in spec.replicas)):
            admin = AdminClient(url, admin_key, patience_s=GATEWAY_PATIENCE_S)
            admins.append(await stack.enter_async_context(admin))
    for source in spec.each_source():
        with naming(source.name):
            if isinstance(source.env, OpenEnvHarborConfig):
                found[source.name] = await open_server(spec, source, source.env, admins[0])
            elif model_side is not None and isinstance(source.env, WHITE_BOX):
                found[source.name] = await open_white_box(stack, source, model_side, places)
    if own:
        if spec.config.executor == "ray":
            from harness_trainer.rollouts.on_ray.opened import open_on_ray  # loads ray, which is an extra

            agents = await open_on_ray(stack, spec, own, store, admins)
        else:
            agents = await open_agents(stack, spec, own, store, admins, admin_key)
        found |= {source.name: source for source in agents.sources}
    in_order = [found[source.name] for source in spec.each_source()]
    if agents is None:
        seals: list[Seal] = [partial(seal, admin) for admin in admins]
        return Sources(in_order), partial(close_lost, store, seals if model_side is None else [*seals, model_side.seal])
    return Sources(in_order, plan=agents.plan), lambda: _take_over(agents.take_over, store, model_side)


async def _settled(take_over: TakeOver, spec: RunnerSpec) -> Sequence[Job]:
    """What goes on of a killed runner; all else of it is closed, at replicas too that the run has no more."""
    jobs = await take_over()
    await seal_removed(spec.store, 1 + len(spec.replicas))
    return jobs


async def _take_over(agents: TakeOver, store: RolloutStore, model_side: ModelSide | None) -> Sequence[Job]:
    """Agents go on. What else a killed runner ran has ended with it, and is run again."""
    unfinished = await asyncio.to_thread(store.unfinished_rollouts)
    jobs = await agents()
    if model_side is not None:
        taken = {job.rollout_id for job in jobs}
        await asyncio.gather(*(model_side.seal(each.rollout_id) for each in unfinished if each.rollout_id not in taken))
    return jobs


def _allow_files(spec: RunnerSpec) -> None:
    """As many open files as may be: each sandbox elsewhere is some of ours, and the usual limit is 1,024.

    Agents in local sandboxes are our children, and would inherit what some programs are slowed down by.
    """
    if spec.sandbox.type != "local":
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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
    _allow_files(spec)
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

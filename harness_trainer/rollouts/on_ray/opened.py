"""Opens the sources whose rollouts are agents, for attempts that run on the nodes of a Ray cluster.

Owns what stays with the runner: reading tasks and agents, a person's reward function (its code is on this host), and
what is done about a killed runner's attempts: its workers have ended with it, so each starts over. The counterpart of
`agent_sources.open_agents`; called by `rollouts.__main__`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from capture_proxy.admin_client import AdminClient
from harness_trainer.errors import RunDirError
from harness_trainer.rewards.custom import RewardFunction, load_reward
from harness_trainer.rollouts import scoring
from harness_trainer.rollouts.agent_sources import Agents, read_source
from harness_trainer.rollouts.config import RunnerSpec, SourceSpec
from harness_trainer.rollouts.on_ray.cluster import Cluster
from harness_trainer.rollouts.on_ray.executor import Executor
from harness_trainer.rollouts.on_ray.messages import Setup, SourceAgents
from harness_trainer.rollouts.on_ray.precheck import require_possible
from harness_trainer.rollouts.sealing import close_lost, seal, sealing
from harness_trainer.rollouts.slots import Attempt
from harness_trainer.rollouts.sources import OpenSource, naming
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult
from harness_trainer.tasks import Task

log = logging.getLogger("harness_trainer.rollouts")

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-.*)?\}")
_KEYS = {"e2b": ("E2B_API_KEY", "E2B_ACCESS_TOKEN", "E2B_DOMAIN")}  # of a sandbox service, as its SDK reads them


async def open_on_ray(
    stack: AsyncExitStack,
    spec: RunnerSpec,
    sources: Sequence[SourceSpec],
    store: RolloutStore,
    admins: Sequence[AdminClient],
) -> Agents:
    """Open until `stack` is left. Raises ConfigError, TaskError, SetupError."""
    read = [read_source(source) for source in sources]
    harnesses = [harness for one in read for harness in one.mix.harnesses.values()]
    tasks = [task for one in read for task in one.everything]
    require_possible(tasks, harnesses, spec.sandbox, len(admins))
    (admin,) = admins
    setup = Setup(
        spec,
        [SourceAgents(one.spec, one.mix.harnesses) for one in read],
        [(one.spec.name, task) for one in read for task in one.everything],
        variables(spec, tasks),
    )
    cluster = await Cluster.connect(spec.config.ray.address)
    stack.push_async_callback(cluster.close)
    executor = await stack.enter_async_context(Executor(cluster, setup, admin, tell=_Teller(store).tell))
    opened = []
    for one in read:
        with naming(one.spec.name):
            attempt = scored(executor.attempt, load_reward(one.spec.config.reward), admin)
        source = OpenSource(
            one.spec.config,
            one.tasks,
            sealing(admin, attempt),
            one.mix.of_group,
            name=one.spec.name,
            weight=one.spec.weight,
            evaluation_tasks=one.held_out,
            evaluated=one.mix.evaluated(one.held_out, every_agent=spec.every_agent, num=None),
            agents=one.mix.harnesses,
        )
        opened.append(source)
    return Agents(opened, executor.plan, partial(close_lost, store, [partial(seal, admin)]))


class _Teller:
    """`RolloutStore.tell` off the event loop, in order."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self._last: asyncio.Task[None] | None = None

    def tell(self, kind: str, line: str, **facts: object) -> None:
        self._last = asyncio.create_task(self._tell(self._last, kind, line, facts), name="tell")

    async def _tell(self, before: asyncio.Task[None] | None, kind: str, line: str, facts: dict[str, object]) -> None:
        if before is not None:
            await before
        try:
            await asyncio.to_thread(self._store.tell, kind, line, **facts)
        except RunDirError as error:  # the log has the line, and what writes next will end the run
            log.error("the store did not take a note: %s", error)


def scored(attempt: Attempt, reward: RewardFunction | None, admin: AdminClient) -> Attempt:
    """The attempt, whose result a person's function then scores, here."""
    if reward is None:
        return attempt

    async def run(job: Job) -> RolloutResult:
        result = await attempt(job)
        if result.outcome is Outcome.INFRA_FAILED:
            return result
        began = time.monotonic()
        try:
            await scoring.score(result, await admin.capture(job.rollout_id), reward)
        except Exception as error:  # as `rollout.run_rollout`: one rollout's bad luck must not end its siblings
            log.exception("rollout %s failed in its stage reward", job.rollout_id)
            result.outcome, result.reward, result.failed_stage = Outcome.INFRA_FAILED, None, "reward"
            result.detail = f"{type(error).__name__}: {error}"
        result.stages_s["reward"] = time.monotonic() - began
        return result

    return run


def variables(spec: RunnerSpec, tasks: Sequence[Task]) -> dict[str, str]:
    """Those of this process that tasks name as ${VAR}, or the sandboxes' service needs: nodes do not have them."""
    named = {*_KEYS.get(spec.sandbox.type, ())}
    for task in tasks:
        for value in (*task.env_vars.values(), *task.box.env.values()):
            if match := _TEMPLATE.fullmatch(value):
                named.add(match[1])
    return {name: os.environ[name] for name in sorted(named) if name in os.environ}

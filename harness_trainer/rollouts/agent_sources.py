"""Opens the sources whose rollouts are agents in sandboxes of ours: all of a run's together, on one backend.

Owns what is opened for them and in which order: proxies, sandboxes, their pool, Harbor's agents, who takes over what a
killed runner left. How one rollout is run is `rollout`'s; which agent a group gets, `mix`'s. Called by `__main__`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from capture_proxy.admin_client import AdminClient
from harness_trainer.rewards.custom import load_reward
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.rollouts.budget import Caps
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec, SourceSpec
from harness_trainer.rollouts.harbor import open_harbor
from harness_trainer.rollouts.journal import Journal
from harness_trainer.rollouts.mix import Mix, load_mix
from harness_trainer.rollouts.needs import Need, Plan
from harness_trainer.rollouts.proxies import open_access
from harness_trainer.rollouts.rollout import Means, run_rollout
from harness_trainer.rollouts.sealing import sealing
from harness_trainer.rollouts.sources import OpenSource, named, naming
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.takeover import Takeover
from harness_trainer.tasks import Task, load_tasks
from sandboxes import open_backend
from sandboxes.ownership import keeper_of_this_process
from sandboxes.pool import Bounds, Pool

log = logging.getLogger("harness_trainer.rollouts")


@dataclass(frozen=True, slots=True)
class Agents:
    """What is open. `plan` tells the pool which sandboxes are still to be had, whatever else the run needs."""

    sources: list[OpenSource]
    plan: Plan
    take_over: Takeover


@dataclass(frozen=True, slots=True)
class _Read:
    """One source, read and not opened."""

    spec: SourceSpec
    tasks: list[Task]
    held_out: list[Task]
    mix: Mix

    @property
    def everything(self) -> list[Task]:
        return [*self.tasks, *self.held_out]


async def open_agents(
    stack: AsyncExitStack,
    spec: RunnerSpec,
    sources: Sequence[SourceSpec],
    store: RolloutStore,
    admin: AdminClient,
    admin_key: str,
) -> Agents:
    """Open until `stack` is left. Raises ConfigError, TaskError, SetupError, SandboxError."""
    read = [_read(source) for source in sources]
    tasks = [task for one in read for task in one.everything]
    agents = [agent for one in read for agent in one.mix.harnesses.values()]  # two sources' may have one name
    access = await open_access(stack, spec, tasks, admin_key, *agents)
    backend = open_backend(spec.sandbox, run_id=spec.run_id, registry=spec.registry, access=access)
    await stack.enter_async_context(backend)
    boxes: dict[tuple[str, str], Boxes] = {}  # by task and agent
    means: dict[tuple[str, str], Means] = {}  # by source and agent
    pool = await stack.enter_async_context(Pool(backend, _bounds(spec.config)))
    stack.callback(lambda: log.info("sandbox pool: %s", pool.counts))
    harbor = await open_harbor(stack, spec, backend, *agents)
    caps = Caps(spec.config)
    journal = Journal(store, spec.sandbox.type, keeper_of_this_process(spec.registry))
    opened = []
    for one in read:
        with naming(one.spec.name):
            reward = load_reward(one.spec.config.reward)
            for name, harness in one.mix.harnesses.items():
                of_agent = Boxes(spec.of_source(one.spec, name), harness, access)
                for task in one.everything:
                    of_agent.check(task, backend)
                    boxes[task.name, name] = of_agent
                means[one.spec.name, name] = Means(of_agent, backend, pool, caps, admin, reward, harbor, journal)
        opened.append(_opened(one, spec, admin, means))
    take_over = Takeover(
        journal,
        backend,
        spec.registry,
        admin,
        tasks={task.name: task for one in read for task in one.tasks},
        evaluation_tasks={task.name: task for one in read for task in one.held_out},
        harnesses={agent.name for agent in agents},
        sources=[source.name for source in spec.each_source()],
    )

    def plan(needs: Sequence[Need]) -> None:
        ours = [(boxes[task.name, agent], task, count) for task, agent, count in needs if (task.name, agent) in boxes]
        pool.plan([(of_agent.spec_of(task), count) for of_agent, task, count in ours])

    return Agents(opened, plan, take_over)


def _read(source: SourceSpec) -> _Read:
    with naming(source.name):
        evaluation = source.config.evaluation.tasks
        tasks = named(source.name, load_tasks(source.tasks))
        held_out = named(source.name, load_tasks(evaluation)) if evaluation else []
        return _Read(source, tasks, held_out, load_mix(source.harness, [*tasks, *held_out], source.config))


def _opened(one: _Read, spec: RunnerSpec, admin: AdminClient, means: dict[tuple[str, str], Means]) -> OpenSource:
    name = one.spec.name
    return OpenSource(
        one.spec.config,
        one.tasks,
        sealing(admin, lambda job: run_rollout(job, means[name, job.harness])),
        one.mix.of_group,
        name=name,
        weight=one.spec.weight,
        evaluation_tasks=one.held_out,
        evaluated=one.mix.evaluated(one.held_out, every_agent=spec.every_agent, num=None),
    )


def _bounds(config: RolloutConfig) -> Bounds:
    return Bounds(
        per_spec=config.warm_per_task,
        total=config.warm_total,
        starting=config.max_creating or config.max_concurrent,
    )

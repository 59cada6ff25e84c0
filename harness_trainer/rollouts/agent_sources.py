"""Opens the sources whose rollouts are agents in sandboxes of ours: all of a run's together, on one backend.

Owns what is opened for them and in which order: proxies, sandboxes, their pool, Harbor's agents, who takes over what a
killed runner left. Of several replicas of the engine each has a backend of its own (`lanes`), because its sandboxes
are led to its gateway. How one rollout is run is `rollout`'s; which agent a group gets, `mix`'s. Called by `__main__`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from capture_proxy.admin_client import AdminClient
from harness_trainer.harnesses.base import Harness
from harness_trainer.rewards.custom import load_reward
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.rollouts.budget import Caps
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec, SourceSpec
from harness_trainer.rollouts.harbor import open_harbor
from harness_trainer.rollouts.journal import Journal
from harness_trainer.rollouts.lanes import Lane, Lanes, shares
from harness_trainer.rollouts.means import Means
from harness_trainer.rollouts.mix import Mix, load_mix
from harness_trainer.rollouts.needs import Need, Plan
from harness_trainer.rollouts.proxies import open_access
from harness_trainer.rollouts.runner import TakeOver
from harness_trainer.rollouts.sources import OpenSource, named, naming
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.takeover import Takeover
from harness_trainer.tasks import Task, load_tasks
from sandboxes import open_backend
from sandboxes.base import Backend
from sandboxes.ownership import keeper_of_this_process
from sandboxes.pool import Bounds, Pool, Times

log = logging.getLogger("harness_trainer.rollouts")


@dataclass(frozen=True, slots=True)
class Agents:
    """What is open. `plan` tells the pool which sandboxes are still to be had, whatever else the run needs."""

    sources: list[OpenSource]
    plan: Plan
    take_over: TakeOver


@dataclass(frozen=True, slots=True)
class ReadSource:
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
    admins: Sequence[AdminClient],
    admin_key: str,
) -> Agents:
    """Open until `stack` is left; `admins` are of the replicas' gateways.

    Raises ConfigError, TaskError, SetupError, SandboxError.
    """
    read = [read_source(source) for source in sources]
    tasks = [task for one in read for task in one.everything]
    agents = [agent for one in read for agent in one.mix.harnesses.values()]  # two sources' may have one name
    lanes = [
        await _open_lane(stack, spec.of_replica(replica), admin, tasks, agents, admin_key, num_lanes=len(admins))
        for replica, admin in enumerate(admins)
    ]
    harbor = await open_harbor(stack, spec, lanes[0].backend, *agents)
    caps = Caps(spec.config)
    journal = Journal(store, spec.sandbox.type, keeper_of_this_process(spec.registry))
    boxes: list[dict[tuple[str, str], Boxes]] = [{} for _ in lanes]  # by task and agent
    for one in read:
        with naming(one.spec.name):
            reward = load_reward(one.spec.config.reward)
            for lane, of_lane in zip(lanes, boxes, strict=True):
                for name, harness in one.mix.harnesses.items():
                    of_agent = Boxes(lane.spec.of_source(one.spec, name), harness, lane.access)
                    for task in one.everything:
                        of_agent.check(task, lane.backend)
                        of_lane[task.name, name] = of_agent
                    noting = replace(journal, replica=lane.spec.replica)
                    lane.means[one.spec.name, name] = Means(
                        of_agent, lane.backend, lane.pool, caps, lane.admin, reward, harbor, noting
                    )
    which = Lanes(lanes, lambda: store.serving(len(lanes)))
    take_over = Takeover(
        journal,
        lanes[0].backend,
        spec.registry,
        lanes[0].admin,
        others=[(lane.backend, lane.admin) for lane in lanes[1:]],
        tasks={task.name: task for one in read for task in one.tasks},
        evaluation_tasks={task.name: task for one in read for task in one.held_out},
        harnesses={(one.spec.name, name) for one in read for name in one.mix.harnesses},
        sources=[source.name for source in spec.each_source()],
    )

    def plan(needs: Sequence[Need]) -> None:
        ours = [(task, agent, count) for task, agent, count in needs if (task.name, agent) in boxes[0]]
        for n, (lane, of_lane) in enumerate(zip(lanes, boxes, strict=True)):
            dealt = [(of_lane[task.name, agent], task, shares(count, len(lanes))[n]) for task, agent, count in ours]
            lane.pool.plan([(of_agent.spec_of(task), count) for of_agent, task, count in dealt if count])

    return Agents([_opened(one, spec, which) for one in read], plan, take_over)


async def _open_lane(
    stack: AsyncExitStack,
    spec: RunnerSpec,
    admin: AdminClient,
    tasks: Sequence[Task],
    agents: Sequence[Harness],
    admin_key: str,
    *,
    num_lanes: int,
) -> Lane:
    access = await open_access(stack, spec, tasks, admin_key, *agents)
    backend = open_backend(spec.sandbox, run_id=spec.run_id, registry=spec.registry, access=access)
    await stack.enter_async_context(backend)
    pool = await stack.enter_async_context(open_pool(backend, spec.config, num_lanes))
    stack.callback(lambda: log.info("sandbox pool: %s", pool.counts))
    return Lane(spec, access, admin, backend, pool)


def read_source(source: SourceSpec) -> ReadSource:
    with naming(source.name):
        evaluation = source.config.evaluation.tasks
        tasks = named(source.name, load_tasks(source.tasks))
        held_out = named(source.name, load_tasks(evaluation)) if evaluation else []
        return ReadSource(source, tasks, held_out, load_mix(source.harness, [*tasks, *held_out], source.config))


def _opened(one: ReadSource, spec: RunnerSpec, lanes: Lanes) -> OpenSource:
    return OpenSource(
        one.spec.config,
        one.tasks,
        lanes.attempt(one.spec.name),
        one.mix.of_group,
        name=one.spec.name,
        weight=one.spec.weight,
        evaluation_tasks=one.held_out,
        evaluated=one.mix.evaluated(one.held_out, every_agent=spec.every_agent, num=None),
        agents=one.mix.harnesses,
    )


def open_pool(backend: Backend, config: RolloutConfig, num_lanes: int = 1) -> Pool:
    """Of one lane, to be entered. What a person bounds is all of them together; of starts each needs at least one."""
    whole = (config.warm_per_task, config.warm_total, config.max_creating or config.max_concurrent)
    per_spec, total, starting = (shares(number, num_lanes)[0] for number in whole)
    bounds = Bounds(per_spec=per_spec, total=total, starting=starting)
    return Pool(backend, bounds, Times(start=config.start_timeout_s))  # a start may take as long as one waits for it

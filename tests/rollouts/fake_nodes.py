"""For tests of attempts on nodes: a cluster without Ray, whose nodes and workers do as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from pathlib import Path

from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.on_ray.executor import Executor
from harness_trainer.rollouts.on_ray.messages import Event, Setup, WorkerFailed, WorkerLost
from harness_trainer.rollouts.on_ray.nodes import NodeInfo
from harness_trainer.rollouts.on_ray.worker import facts_here
from harness_trainer.rollouts.types import Job, Outcome
from harness_trainer.tasks import Task
from sandboxes.base import Access, Endpoint
from tests.rollouts.policy import finished

HERE = facts_here()
LOOPBACK = Access(gateway=Endpoint(url="http://127.0.0.1:8101", socket=Path("/run/gateway.sock")))


class FakeWorker:
    """One that does as the test says."""

    def __init__(self, node, bench):
        self.node, self.bench, self.killed, self.told, self.brought = node, bench, False, [], []
        self.gone = asyncio.Event()
        self.hangs, self.bringing = False, []

    async def call(self, method, *arguments):
        if self.hangs:
            await self.gone.wait()
            raise WorkerLost("killed")
        if self.node.node_id in self.bench.dying:
            raise WorkerLost("socket closed")
        if method == "facts":
            return self.bench.facts
        if method == "open":
            return self.bench.problems.get(self.node.node_id, "")
        if method == "bring":
            self.brought.append(arguments[0].task)
            self.bringing.append(len(self.bringing))
            await asyncio.sleep(0.01)
            assert self.bringing.pop() == 0, "two at a time"
            if self.bench.full:
                raise WorkerFailed("No space left on device")
        return None

    def tell(self, method, *arguments):
        self.told.append((method, *arguments))
        if method == "cancel":
            self.bench.go_on.set()

    def kill(self):
        self.killed = True
        self.gone.set()

    async def attempt(self, order):
        self.bench.orders.append((self.node.node_id, order))
        yield Event("box")
        waits = [asyncio.create_task(one.wait()) for one in (self.bench.go_on, self.gone)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        if self.gone.is_set():
            raise WorkerLost("socket closed")
        if self.bench.fails:
            raise WorkerFailed("KeyError: 'x'")
        if order.rollout_id in self.bench.unasked or any(word[0] == "cancel" for word in self.told):
            yield Event("cancelled")
            return
        job = Job(order.rollout_id, order.group_id, order.attempt, TASK, harness=order.harness)
        broken = self.node.node_id in self.bench.broken
        yield Event("result", payload=no_engine(job) if broken else finished(job))


TASK = Task("moon", Path("/none"), "Say moon.", verify_script="true")


def no_engine(job):
    detail = "the Docker engine does not answer"
    return finished(job, Outcome.INFRA_FAILED, None, failed_stage="create", detail=detail)


class FakeBench:
    """A cluster whose nodes the test adds and takes away."""

    def __init__(self):
        self.alive, self.workers, self.orders, self.problems, self.notes = [], {}, [], {}, []
        self.facts, self.fails, self.full, self.go_on = HERE, False, False, asyncio.Event()
        self.broken, self.unasked, self.dying, self.refuses = set(), set(), set(), None

    def add(self, node_id, rollouts=2):
        self.alive.append(NodeInfo(node_id, "10.0.0.2", {"rollouts": float(rollouts)}))

    async def nodes(self):
        return list(self.alive)

    async def put(self, value):
        return pickle.loads(pickle.dumps(value))  # it has to travel

    def own_address(self):
        return "10.0.0.1"

    def start(self, node):
        if self.refuses is not None:
            raise self.refuses
        worker = self.workers[node.node_id] = FakeWorker(node, self)
        return worker

    def executor(self, tmp_path, *, tasks=(TASK,), silent_s=60, settle_s=10, **ray):
        config = RolloutConfig(max_concurrent=8, executor="ray", ray=ray)
        spec = RunnerSpec(
            config=config, tasks="-", harness="-", harness_bin=Path(), store=tmp_path / "s", artifacts=tmp_path / "a",
            registry=tmp_path / "o", run_id="r", model="m", context=1, access=LOOPBACK, admin_url="http://127.0.0.1:9",
            max_open_groups=1, num_groups=1,
        )  # fmt: skip
        tell = lambda kind, line, **facts: self.notes.append((kind, line))  # noqa: E731
        setup = Setup(spec, [], [("", task) for task in tasks])
        return Executor(self, setup, None, tell=tell, look_s=0.02, silent_s=silent_s, settle_s=settle_s)


@contextlib.asynccontextmanager
async def executing(tmp_path, *nodes, **ray):
    bench = FakeBench()
    for node in nodes:
        bench.add(node)
    async with bench.executor(tmp_path, **ray) as executor:
        yield bench, executor


def job(number=0, has_box=lambda: None):
    return Job(f"g0-{number}-x", 0, 0, TASK, has_box=has_box, harness="h")


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)

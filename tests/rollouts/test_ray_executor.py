"""Attempts on nodes without Ray: which node gets one, what a loss means, how the gateway is reached, what is asked."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import pickle
from pathlib import Path

import pytest

from capture_proxy.errors import NotFound
from capture_proxy.types import Session, SessionPolicy
from harness_trainer.errors import SetupError, TaskError, TrainingFailed
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.failures import Breaker
from harness_trainer.rollouts.on_ray import files, reach
from harness_trainer.rollouts.on_ray.config import RayConfig
from harness_trainer.rollouts.on_ray.desk import Desk, Line
from harness_trainer.rollouts.on_ray.executor import Executor
from harness_trainer.rollouts.on_ray.messages import Event, NodeFacts, Setup, WorkerFailed, WorkerLost
from harness_trainer.rollouts.on_ray.nodes import NodeInfo
from harness_trainer.rollouts.on_ray.precheck import summary
from harness_trainer.rollouts.on_ray.worker import facts_here
from harness_trainer.rollouts.slots import FREE_LOSSES
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import NODE, Job, Outcome
from harness_trainer.tasks import Task
from sandboxes.base import Access, BoxSpec, Endpoint
from tests.rollouts.policy import finished, infra, run_until

HERE = facts_here()
ELSEWHERE = dataclasses.replace(HERE, host="far", boot_id="another")


# --- which node takes how many -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "per_node", "expected"),
    [
        ({"CPU": 16.0, "rollouts": 6.0}, 4, 6),  # its own word counts
        ({"rollouts": 6.0}, None, 6),
        ({"CPU": 16.0}, 4, 4),
        ({"CPU": 16.0}, None, 32),
        ({"GPU": 1.0}, 4, 0),  # a head that is kept free
    ],
)
def test_a_node_takes_what_it_says_else_what_the_run_says(resources, per_node, expected):
    assert NodeInfo("id", "10.0.0.3", resources).capacity(per_node, 32) == expected


def test_a_cluster_whose_nodes_take_nothing_is_refused_with_what_to_start():
    head = NodeInfo("a", "10.0.0.1", {})
    with pytest.raises(SetupError, match="no node of the Ray cluster takes rollouts: start one with `ray start"):
        summary([head], RayConfig(), 8)
    two = [head, NodeInfo("b", "10.0.0.2", {"rollouts": 3.0}), NodeInfo("c", "10.0.0.3", {"CPU": 2.0})]
    said = "2 of the Ray cluster's 3 nodes take rollouts, 5 at a time in all"
    assert summary(two, RayConfig(per_node=2), 8) == said


# --- the gateway, from a node ------------------------------------------------------------------------------------

LOOPBACK = Access(gateway=Endpoint(url="http://127.0.0.1:8101", socket=Path("/run/gateway.sock")))


def opened(url, access=LOOPBACK):
    return dataclasses.replace(access, gateway=dataclasses.replace(access.gateway, public_url=url))


def reached(node, access, sandbox="docker"):
    return reach.access_on(node, "far", HERE, access, sandbox, "10.0.0.1")


def test_on_the_gateways_own_host_its_sandboxes_are_led_to_it_as_ever():
    assert reached(dataclasses.replace(HERE, pid=1), LOOPBACK) is LOOPBACK
    other_container = dataclasses.replace(HERE, network="net:[1]")
    with pytest.raises(SetupError, match="another host"):
        reached(other_container, LOOPBACK)


@pytest.mark.parametrize(
    ("access", "said"),
    [
        (LOOPBACK, "listens on loopback .* --gateway.expose direct .*http://10.0.0.1:8000"),
        (opened("http://127.0.0.1:8000"), "is loopback there: give the address .*http://10.0.0.1:8000"),
        (opened("http://localhost:9000"), "http://10.0.0.1:9000"),
        (opened("https://x.tunnel.example"), "need the gateway at an http://HOST:PORT address"),
    ],
)
def test_a_node_elsewhere_that_cannot_reach_the_gateway_is_told_how_to_open_it(access, said):
    with pytest.raises(SetupError, match=said):
        reached(ELSEWHERE, access)


def test_a_node_elsewhere_is_led_to_the_public_address_and_never_to_a_socket_of_this_host():
    access = reached(ELSEWHERE, opened("http://10.0.0.1:8000"))
    assert access.gateway == Endpoint(url="http://10.0.0.1:8000", public_url="http://10.0.0.1:8000")
    tunnel = reached(ELSEWHERE, opened("https://x.tunnel.example"), "e2b")
    assert tunnel.gateway.public_url == "https://x.tunnel.example"


def test_an_address_counts_only_if_this_runs_own_gateway_answers_there():
    own = (401, b'{"error": "unknown token"}')
    assert reach.judge("far", "http://10.0.0.1:8000", own, own) is None
    assert reach.judge("far", "http://10.0.0.1:8000", (401, b"login"), "it is away") is None, "nothing can be said"
    for seen, said in ((401, b"login"), "other words"), ("no route", "no route"), ((200, b""), "it answered 200"):
        assert said in str(reach.judge("far", "http://10.0.0.1:8000", seen, own))


# --- nodes as places ---------------------------------------------------------------------------------------------


class FakeWorker:
    """One that does as the test says."""

    def __init__(self, node, bench):
        self.node, self.bench, self.killed, self.told, self.brought = node, bench, False, [], []
        self.gone = asyncio.Event()

    async def call(self, method, *arguments):
        if method == "facts":
            return self.bench.facts
        if method == "open":
            return self.bench.problems.get(self.node.node_id, "")
        if method == "bring":
            self.brought.append(arguments[0].task)
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
        if any(word[0] == "cancel" for word in self.told):
            yield Event("cancelled")
            return
        job = Job(order.rollout_id, order.group_id, order.attempt, TASK, harness=order.harness)
        yield Event("result", payload=finished(job))


TASK = Task("moon", Path("/none"), "Say moon.", verify_script="true")


class FakeBench:
    """A cluster whose nodes the test adds and takes away."""

    def __init__(self):
        self.alive, self.workers, self.orders, self.problems, self.notes = [], {}, [], {}, []
        self.facts, self.fails, self.go_on = HERE, False, asyncio.Event()

    def add(self, node_id, rollouts=2):
        self.alive.append(NodeInfo(node_id, "10.0.0.2", {"rollouts": float(rollouts)}))

    async def nodes(self):
        return list(self.alive)

    async def put(self, value):
        return pickle.loads(pickle.dumps(value))  # it has to travel

    def own_address(self):
        return "10.0.0.1"

    def start(self, node):
        worker = self.workers[node.node_id] = FakeWorker(node, self)
        return worker

    def executor(self, tmp_path, **ray):
        config = RolloutConfig(max_concurrent=8, executor="ray", ray=ray)
        spec = RunnerSpec(
            config=config, tasks="-", harness="-", harness_bin=Path(), store=tmp_path / "s", artifacts=tmp_path / "a",
            registry=tmp_path / "o", run_id="r", model="m", context=1, access=LOOPBACK, admin_url="http://127.0.0.1:9",
            max_open_groups=1, num_groups=1,
        )  # fmt: skip
        tell = lambda kind, line, **facts: self.notes.append((kind, line))  # noqa: E731
        return Executor(self, Setup(spec, [], [("", TASK)]), None, tell=tell, look_s=0.02)


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


async def test_attempts_go_where_most_is_free_and_wait_where_nothing_is(tmp_path):
    async with executing(tmp_path, "a", "b") as (bench, executor):
        boxes = []
        running = [asyncio.create_task(executor.attempt(job(n, lambda n=n: boxes.append(n)))) for n in range(5)]
        await until(lambda: len(bench.orders) == 4)
        await asyncio.sleep(0.05)
        assert sorted(node for node, _ in bench.orders) == ["a", "a", "b", "b"]
        bench.add("c")  # it joins, and gets what waits
        await until(lambda: len(bench.orders) == 5)
        assert bench.orders[-1][0] == "c" and sorted(boxes) == [0, 1, 2, 3, 4]
        bench.go_on.set()
        results = await asyncio.gather(*running)
    assert [result.outcome for result in results] == [Outcome.OK] * 5
    assert results[4].stages_s["wait"] >= 0.05, "the queue is no part of the rollout's own time"
    assert all(worker.killed for worker in bench.workers.values())


async def test_what_a_lost_node_ran_is_an_infra_failure_of_the_machine(tmp_path):
    async with executing(tmp_path, "a", "b") as (bench, executor):
        running = [asyncio.create_task(executor.attempt(job(n))) for n in range(2)]
        await until(lambda: len(bench.orders) == 2)
        bench.alive = [node for node in bench.alive if node.node_id != "b"]  # Ray says that it is dead
        lost = await asyncio.wait_for(running[[node for node, _ in bench.orders].index("b")], 10)
        assert (lost.outcome, lost.reward, lost.failed_stage) == (Outcome.INFRA_FAILED, None, NODE)
        assert not lost.setup_failed, "its task is not to be quarantined for it"
        assert [kind for kind, _ in bench.notes] == ["node_lost"] and bench.workers["b"].killed
        bench.go_on.set()
        assert {result.outcome for result in await asyncio.gather(*running)} == {Outcome.OK, Outcome.INFRA_FAILED}


async def test_an_error_of_the_workers_own_code_costs_the_rollout_a_try_and_keeps_the_node(tmp_path):
    async with executing(tmp_path, "a") as (bench, executor):
        bench.fails = True
        bench.go_on.set()
        result = await executor.attempt(job())
        assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, "prepare")
        assert "KeyError" in result.detail and not bench.workers["a"].killed


async def test_a_cancelled_attempt_is_ended_on_its_node_before_its_place_is_free(tmp_path):
    async with executing(tmp_path, "a") as (bench, executor):
        running = asyncio.create_task(executor.attempt(job()))
        await until(lambda: bench.orders)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert bench.workers["a"].told == [("cancel", "g0-0-x")]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (dataclasses.replace(HERE, version="0.0.1"), "has harness-trainer 0.0.1, this host .*: install the same"),
        (dataclasses.replace(HERE, python="3.9.1"), "runs Python 3.9.1, this host .*: use one minor version"),
        (ELSEWHERE, "another host than the gateway's"),
    ],
)
async def test_a_first_node_that_cannot_be_used_ends_the_run_with_the_reason(tmp_path, facts, said):
    bench = FakeBench()
    bench.facts = facts
    bench.add("a")
    with pytest.raises(SetupError, match=said):
        async with bench.executor(tmp_path):
            raise AssertionError("it was opened")
    assert bench.workers["a"].killed


async def test_of_several_nodes_one_that_cannot_be_used_is_named_and_left_out(tmp_path):
    bench = FakeBench()
    bench.problems["b"] = "no Docker engine answers"
    bench.add("a")
    bench.add("b")
    async with bench.executor(tmp_path):
        await until(lambda: bench.notes)
        ((kind, line),) = bench.notes
        assert kind == "node_unusable" and "no Docker engine answers" in line


async def test_a_run_without_nodes_waits_for_one_and_then_ends(tmp_path):
    async with executing(tmp_path, "a", patience_s=0.1) as (bench, executor):
        bench.alive = []
        await until(lambda: bench.notes)
        with pytest.raises(TrainingFailed, match="no Ray node has taken rollouts for 0 s .*Run the same command again"):
            await asyncio.wait_for(executor.attempt(job()), 10)


async def test_each_node_has_its_share_of_the_sandboxes_that_are_made_ahead(tmp_path):
    async with executing(tmp_path, "a", "b") as (bench, executor):
        executor.plan([(TASK, "h", 3), (dataclasses.replace(TASK, name="of a server"), "h", 1)])
        await until(lambda: all(worker.told for worker in bench.workers.values()) and len(bench.workers) == 2)
        await until(lambda: all(w.told[-1] == ("plan", [("moon", "h", 2)]) for w in bench.workers.values()))


# --- what losses cost --------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.publish(1)
    yield store
    store.close()


async def test_lost_machines_cost_a_slot_no_try_as_long_as_they_are_few(tmp_path, store):
    tries = []

    async def attempt(job):
        tries.append(job.attempt)
        return lost(job) if job.attempt < FREE_LOSSES else finished(job)

    await run_until(store, attempt, lambda: store.group_counts().get("ready"), infra_retries=0)
    assert sorted(set(tries)) == list(range(FREE_LOSSES + 1))
    assert all(result.reward == 1.0 for result in store.results(0))


async def test_a_rollout_that_takes_every_machine_along_comes_to_an_end(tmp_path, store):
    async def attempt(job):
        return lost(job)

    schedule = {"max_dropped_in_a_row": 1}
    with pytest.raises(TrainingFailed, match="dropped"):
        await run_until(
            store, attempt, lambda: False, infra_retries=1, max_refills=0, schedule=schedule, max_concurrent=4
        )
    assert max(result.attempt for result in store.rollouts()) == FREE_LOSSES + 1


def lost(job):
    result = infra(job, "the node was lost")
    result.failed_stage = NODE
    return result


def test_machines_that_are_lost_together_do_not_break_the_circuit():
    breaker = Breaker(window=2, share=0.5)
    for number in range(10):
        breaker.note(lost(job(number)))
    breaker.note(infra(job()))
    with pytest.raises(TrainingFailed):
        breaker.note(infra(job()))


# --- what travels ------------------------------------------------------------------------------------------------


async def test_the_desk_asks_on_the_attempts_own_line_and_raises_what_the_runner_met():
    line = Line()
    desk = Desk({"s1": line})
    minting = asyncio.create_task(desk.mint("s1", SessionPolicy(), {"task": "t"}))
    events = line.events()
    event = await anext(events)
    assert (event.kind, event.payload[0], pickle.loads(pickle.dumps(event))) == ("mint", "s1", event)
    session = Session("s1", "token", SessionPolicy(), {})
    line.answer(event.number, session, None)
    assert await minting is session
    fetching = asyncio.create_task(desk.capture("s1"))
    event = await anext(events)
    line.answer(event.number, None, pickle.loads(pickle.dumps(NotFound("no session s1"))))
    with pytest.raises(NotFound, match="no session s1"):
        await fetching
    line.answer(event.number, None, None)  # twice, or too late: nobody listens
    line.close()
    assert [one async for one in events] == []


def test_a_tasks_folders_arrive_as_they_are_and_nothing_else_of_it_does(tmp_path):
    home = tmp_path / "task"
    for name in ("tests", "environment", "solution"):
        (home / name).mkdir(parents=True)
    script = home / "tests" / "test.sh"
    script.write_text("exit 0")
    script.chmod(0o755)
    (home / "environment" / "link").symlink_to("Dockerfile")
    (home / "environment" / "Dockerfile").write_text("FROM scratch")
    task = Task(
        "moon", home, "Say moon.", tests_dir=home / "tests", solution_dir=home / "solution",
        box=BoxSpec("moon", build_dir=home / "environment"),
    )  # fmt: skip
    there = files.moved(task, tmp_path / "node")
    files.unbundle(pickle.loads(pickle.dumps(files.bundle(task))), tmp_path / "node")
    assert there.tests_dir.joinpath("test.sh").stat().st_mode & 0o777 == 0o755
    assert (there.box.build_dir / "link").readlink() == Path("Dockerfile")
    assert sorted(path.name for path in (tmp_path / "node").iterdir()) == ["environment", "tests"]
    assert there.solution_dir is None and there.box.name == "moon"
    with pytest.raises(TaskError, match="its folder .* cannot be sent"):
        files.bundle(dataclasses.replace(task, tests_dir=home / "gone"))


def test_large_artifacts_come_back_in_pieces(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "log").write_bytes(bytes(2 * files.CHUNK))
    pieces = list(files.pieces(kept))
    assert len(pieces) == 3 and max(map(len, pieces)) == files.CHUNK
    from sandboxes.archive import unpack

    unpack(io.BytesIO(b"".join(pieces)), tmp_path / "back")
    assert (tmp_path / "back" / "log").stat().st_size == 2 * files.CHUNK
    assert list(files.pieces(tmp_path / "none")) == []


def test_what_a_node_says_of_itself_is_whole():
    facts = facts_here()
    assert isinstance(facts, NodeFacts) and all(dataclasses.astuple(facts))

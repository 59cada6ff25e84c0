"""Attempts on nodes without Ray: which node gets one, what a loss means, how the gateway is reached, what is asked."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import pickle
from pathlib import Path

import pytest

from capture_proxy.errors import NotFound
from capture_proxy.types import Session, SessionPolicy
from harness_trainer.errors import SetupError, TaskError, TrainingFailed
from harness_trainer.rollouts.failures import Breaker
from harness_trainer.rollouts.on_ray import files, reach
from harness_trainer.rollouts.on_ray.config import RayConfig
from harness_trainer.rollouts.on_ray.desk import Desk, Line
from harness_trainer.rollouts.on_ray.messages import NodeFacts
from harness_trainer.rollouts.on_ray.nodes import NodeInfo
from harness_trainer.rollouts.on_ray.precheck import summary
from harness_trainer.rollouts.on_ray.worker import facts_here
from harness_trainer.rollouts.slots import FREE_LOSSES
from harness_trainer.rollouts.types import NODE, Job, Outcome
from harness_trainer.tasks import Task
from sandboxes.base import BoxSpec, Endpoint
from tests.rollouts.fake_nodes import HERE, LOOPBACK, TASK, FakeBench, executing, job, until
from tests.rollouts.policy import finished, infra, run_until

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


async def test_a_worker_that_hangs_is_lost_with_what_it_holds(tmp_path):
    async with executing(tmp_path, "a", silent_s=0.2) as (bench, executor):
        running = asyncio.create_task(executor.attempt(job()))
        await until(lambda: bench.orders)
        hanging = bench.workers["a"]
        hanging.hangs = True  # its host is there, and Ray knows of nothing
        lost = await asyncio.wait_for(running, 10)
        assert (lost.outcome, lost.failed_stage) == (Outcome.INFRA_FAILED, NODE) and hanging.killed
        assert "has not answered for" in bench.notes[0][1]


async def test_a_node_that_can_make_no_sandboxes_does_not_draw_what_others_could_run(tmp_path):
    async with executing(tmp_path, "a", "b") as (bench, executor):
        bench.go_on.set()
        await until(lambda: len(bench.workers) == 2 and not executor._members._opening)
        await executor.attempt(job())
        bench.broken = {bench.orders[0][0]}  # where the next one would go, too: it is as free as the other
        results = [await executor.attempt(job(number)) for number in range(20)]
        assert [result.outcome for result in results].count(Outcome.INFRA_FAILED) == 1
        assert {node for node, _ in bench.orders} == {"a", "b"}
        bench.broken = {"a", "b"}  # none is better than another: what fails is seen, and counted
        results = [await asyncio.wait_for(executor.attempt(job(number)), 10) for number in range(4)]
        assert {result.outcome for result in results} == {Outcome.INFRA_FAILED}


async def test_what_a_node_could_not_take_once_is_sent_again(tmp_path):
    (tmp_path / "tests").mkdir()
    task = dataclasses.replace(TASK, tests_dir=tmp_path / "tests")
    bench = FakeBench()
    bench.add("a")
    bench.full = True
    bench.go_on.set()
    async with bench.executor(tmp_path, tasks=[task]) as executor:
        failed = await executor.attempt(job())
        assert failed.outcome is Outcome.INFRA_FAILED and "No space left" in failed.detail and not bench.orders
        bench.full = False
        assert (await executor.attempt(job(1))).outcome is Outcome.OK
    assert bench.workers["a"].brought == ["moon", "moon"]


async def test_folders_of_many_tasks_are_in_memory_one_at_a_time_for_each_node(tmp_path):
    (tmp_path / "tests").mkdir()
    tasks = [dataclasses.replace(TASK, name=name, tests_dir=tmp_path / "tests") for name in "abcd"]
    bench = FakeBench()
    bench.add("node", rollouts=4)
    bench.go_on.set()
    async with bench.executor(tmp_path, tasks=tasks) as executor:
        jobs = [Job(f"g0-{task.name}", 0, 0, task, harness="h") for task in tasks]
        results = await asyncio.gather(*(executor.attempt(each) for each in jobs))
    assert {result.outcome for result in results} == {Outcome.OK}
    assert sorted(bench.workers["node"].brought) == list("abcd")


async def test_an_attempt_that_its_node_cancels_by_itself_is_an_infra_failure_and_no_end_of_the_run(tmp_path):
    async with executing(tmp_path, "a") as (bench, executor):
        bench.unasked = {job().rollout_id}
        bench.go_on.set()
        result = await executor.attempt(job())
        assert (result.outcome, result.reward) == (Outcome.INFRA_FAILED, None) and "not from here" in result.detail


async def test_no_room_for_what_comes_back_is_an_infra_failure_and_no_end_of_the_run(tmp_path, monkeypatch):
    async with executing(tmp_path, "a") as (bench, executor):
        bench.go_on.set()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
        result = await executor.attempt(job())
        assert (result.outcome, result.reward) == (Outcome.INFRA_FAILED, None) and "temporary folder" in result.detail


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


async def test_a_worker_that_cannot_even_be_asked_for_is_named_and_not_waited_for(tmp_path):
    bench = FakeBench()
    bench.refuses = ConnectionError("the core worker is not connected")
    bench.add("a")
    with pytest.raises(SetupError, match="could be opened on Ray node .*: ConnectionError: the core worker"):
        async with asyncio.timeout(10), bench.executor(tmp_path):
            raise AssertionError("it was opened")


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


async def test_a_runner_that_starts_without_nodes_waits_for_one_and_says_so(tmp_path, caplog):
    bench = FakeBench()
    executor = bench.executor(tmp_path, patience_s=60)
    entering = asyncio.create_task(executor.__aenter__())
    await until(lambda: bench.notes)
    ((kind, line),) = bench.notes
    assert kind == "waiting_for_node" and line.startswith("waiting up to 60 s (rollouts.ray.patience_s) for a Ray node")
    assert line in caplog.text and "ray start --address=HEAD:6379" in line
    bench.add("a")
    assert await asyncio.wait_for(entering, 10) is executor and len(bench.notes) == 1
    bench.go_on.set()
    assert (await executor.attempt(job())).outcome is Outcome.OK
    await executor.__aexit__()


async def test_a_runner_for_which_no_node_comes_ends_when_a_running_one_would(tmp_path):
    bench = FakeBench()
    with pytest.raises(SetupError, match="no Ray node has taken rollouts for 0 s .*Run the same command again"):
        async with asyncio.timeout(5), bench.executor(tmp_path, patience_s=0.1):
            raise AssertionError("it was opened")


async def test_a_first_node_that_dies_while_it_is_opened_is_one_that_has_left(tmp_path):
    bench = FakeBench()
    bench.add("a")
    bench.dying = {"a"}  # Ray does not know it yet
    entering = asyncio.create_task(bench.executor(tmp_path).__aenter__())
    await until(lambda: bench.notes)
    bench.alive = []
    await until(lambda: len(bench.notes) == 2)
    assert [kind for kind, _ in bench.notes] == ["node_unusable", "waiting_for_node"]
    bench.add("b")
    await (await asyncio.wait_for(entering, 10)).__aexit__()
    staying = FakeBench()
    staying.add("a")
    staying.dying = {"a"}
    with pytest.raises(SetupError, match="the worker on Ray node .* failed: socket closed"):
        async with asyncio.timeout(5), staying.executor(tmp_path, settle_s=0.2):
            raise AssertionError("it was opened")


async def test_each_node_has_its_share_of_the_sandboxes_that_are_made_ahead(tmp_path):
    async with executing(tmp_path, "a", "b") as (bench, executor):
        executor.plan([(TASK, "h", 3), (dataclasses.replace(TASK, name="of a server"), "h", 1)])
        await until(lambda: all(worker.told for worker in bench.workers.values()) and len(bench.workers) == 2)
        await until(lambda: all(w.told[-1] == ("plan", [("moon", "h", 2)]) for w in bench.workers.values()))


# --- what losses cost --------------------------------------------------------------------------------------------


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
    (kept / "log").chmod(0o040)  # an agent must not be able to spoil its rollout by it
    (kept / "link").symlink_to("/etc/shadow")
    pieces = list(files.pieces(kept))
    assert len(pieces) == 3 and max(map(len, pieces)) == files.CHUNK
    from sandboxes.archive import unpack

    unpack(io.BytesIO(b"".join(pieces)), tmp_path / "back")
    status = (tmp_path / "back" / "log").stat()
    assert (status.st_size, status.st_mode & 0o777) == (2 * files.CHUNK, 0o440)
    assert list(files.pieces(tmp_path / "none")) == []


def test_what_a_node_says_of_itself_is_whole():
    facts = facts_here()
    assert isinstance(facts, NodeFacts) and all(dataclasses.astuple(facts))

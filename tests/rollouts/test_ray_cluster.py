"""`rollouts.executor: ray` on a real cluster of several nodes: who runs what, and what is left when something dies."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.errors import SetupError
from harness_trainer.rollouts.__main__ import RUNNER_ERROR
from harness_trainer.rollouts.on_ray.config import RayConfig
from harness_trainer.rollouts.on_ray.precheck import require_cluster
from harness_trainer.rollouts.store import RolloutStore
from tests.capture.serving import served, until
from tests.rollouts.ray_cluster import Nodes, RayBench

pytest.importorskip("ray", reason="pip install 'harness-trainer[ray]'")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """With one node, for two rollouts at once; tests add more, and take them away again."""
    made = Nodes(tmp_path_factory.mktemp("ray"))
    made.first = made.add(2)
    yield made
    made.close()


@contextlib.asynccontextmanager
async def bench(tmp_path, nodes, **settings):
    """A started runner; whatever the test does, nothing of it is left anywhere, and that is checked."""
    store = RolloutStore(tmp_path / "store.sqlite")
    store.publish(1)
    async with served(ScriptedEngine("the moon", version="v1"), tmp_path / "store.sqlite") as gateway:
        made = RayBench(tmp_path, gateway, store, nodes, **settings)
        await made.start()
        try:
            yield made
        finally:
            code = await made.end()
            await until(made.nothing_left, timeout_s=30)
            store.close()
    assert code == 0, made.log()[-3000:]


async def test_a_node_that_joins_is_used_and_what_one_takes_with_it_starts_over_elsewhere(tmp_path, nodes):
    async with bench(tmp_path, nodes, infra_retries=0) as run:
        await run.until(lambda: len(run.begun()) == 2)
        assert run.log().count("takes rollouts: 2 at once") == 1, "the head has no CPU and no resource: it takes none"
        first = run.begun()
        second = nodes.add(2)
        await run.until(lambda: len(run.begun()) == 4)
        owners = {box.split("-")[1] for box in run.begun()}
        assert len(owners) == 2, "a worker on each node owns two"

        await asyncio.to_thread(nodes.kill, second)
        await run.until(lambda: run.boxes.ids() == first)  # ended on the node, though its Ray is dead
        await run.until(lambda: len(run.store.rollouts()) == 2)
        lost = run.store.rollouts()
        assert [(one.outcome, one.reward, one.failed_stage) for one in lost] == [("infra_failed", None, "node")] * 2
        run.tell_all()
        await run.until(lambda: len(run.begun() - first) == 2)
        run.tell_all()
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        results = run.store.results(0)
        await run.check_results(0, {one.rollout_id for one in results})
        assert run.store.outcome_counts() == {"infra_failed": 2, "ok": 4}
        assert sorted(one.attempt for one in results) == [0, 0, 1, 1], "no retry is allowed, and losses cost none"
        assert {one.rollout_id for one in lost}.isdisjoint(one.rollout_id for one in results)
        assert run.log().count("is lost with 2 rollouts") == 1
        for one in results:
            kept = tmp_path / "artifacts" / one.rollout_id
            assert (kept / "agent.stdout.log").read_text().strip() == "the moon"
            assert (kept / "verifier" / "reward.txt").read_text().strip() == "1"
        assert {path.name for path in (tmp_path / "artifacts").iterdir()} == {one.rollout_id for one in results}


async def test_a_killed_runner_leaves_nothing_on_the_nodes_and_the_next_one_starts_over(tmp_path, nodes):
    async with bench(tmp_path, nodes, group_size=2) as run:
        await run.until(lambda: len(run.begun()) == 2)
        first = run.begun()
        await run.kill()
        await until(run.nothing_left, timeout_s=30)
        await run.start()
        await run.until(lambda: len(run.begun() - first) == 2)
        assert run.store.outcome_counts() == {"cancelled": 2, "running": 2}
        sessions = {session.session_id: session.sealed for session in await run.gateway.admin.sessions()}
        assert sorted(sessions.values()) == [False, False, True, True], "what is lost gets no more tokens"
        # A stop in good order, in the middle of it.
        assert await run.end() == 0, run.log()[-3000:]
        assert run.nothing_left(), "at once: nobody has to be waited for"
        assert run.store.outcome_counts() == {"cancelled": 4}


async def test_a_runner_that_is_started_again_while_no_node_is_there_waits_for_one(tmp_path, nodes):
    async with bench(tmp_path, nodes, group_size=2) as run:
        await run.until(lambda: len(run.begun()) == 2)
        await run.kill()
        await asyncio.to_thread(nodes.kill, nodes.first)
        await until(run.nothing_left, timeout_s=30)
        await run.start()
        await run.until(lambda: "waiting up to 60 s (rollouts.ray.patience_s) for a Ray node" in run.log())
        nodes.first = nodes.add(2)
        await run.until(lambda: len(run.begun()) == 2)
        assert run.store.outcome_counts() == {"cancelled": 2, "running": 2}


async def test_a_cluster_is_asked_for_before_anything_is_started(nodes):
    said = await asyncio.to_thread(require_cluster, RayConfig(address=nodes.address), 8)
    assert said.endswith("nodes take rollouts, 2 at a time in all")


async def test_no_cluster_ends_the_run_in_seconds_with_what_to_do(tmp_path):
    with socket.socket() as taken:  # and nobody listens there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SetupError, match=f"no Ray cluster at {address}: .*ray start --head"):
            await asyncio.to_thread(require_cluster, RayConfig(address=address), 4)
        store = RolloutStore(tmp_path / "store.sqlite")
        store.publish(1)
        async with served(ScriptedEngine("the moon", version="v1"), tmp_path / "store.sqlite") as gateway:
            run = RayBench(tmp_path, gateway, store, None, ray={"address": address})
            await run.start()
            assert await asyncio.to_thread(run.process.wait, 60) == 1
            await run.end()
        assert str(store.state(RUNNER_ERROR)).startswith(f"no Ray cluster at {address}")
        store.close()

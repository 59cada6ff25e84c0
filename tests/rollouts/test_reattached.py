"""`kill -9` of the rollout runner with agents at work: they go on, and the next runner takes them over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time

import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.rollouts.store import RolloutStore
from sandboxes import bubblewrap
from sandboxes.lifecycle import reap
from tests.capture.serving import served, until
from tests.intercept.intercepting import needs_mitmproxy
from tests.rollouts.reattaching import Bench, Boxes, DockerBoxes

KINDS = ["none", "bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]


@pytest.fixture(params=KINDS)
def boxes(request, tmp_path):
    if request.param == "docker":
        engine, image = (request.getfixturevalue(name) for name in ("docker_engine", "docker_base_image"))
        return DockerBoxes(tmp_path, engine, image)
    return local_boxes(request.param, tmp_path)


@pytest.fixture(params=KINDS[:2])
def local(request, tmp_path):
    return local_boxes(request.param, tmp_path)


def local_boxes(kind, folder):
    if kind == "bubblewrap" and (problem := bubblewrap.find().problem):
        pytest.skip(problem)
    return Boxes(kind, folder)


@contextlib.asynccontextmanager
async def bench(tmp_path, boxes, *, starts=True, hang_up_grace_s=1.0, **settings):
    """A bench with a started runner; whatever the test does, nothing is left, and that is checked."""
    engine = ScriptedEngine("the moon", version="v1")
    store = RolloutStore(tmp_path / "store.sqlite")
    store.publish(1)
    async with served(engine, tmp_path / "store.sqlite", hang_up_grace_s=hang_up_grace_s) as gateway:
        made = Bench(tmp_path, gateway, store, boxes, **settings)
        made.engine = engine
        if starts:
            await made.start()
        try:
            yield made
        finally:
            await made.end()
            made.check_nothing_left()
            store.close()


def ids_of(attempts):
    return {one.rollout_id for one in attempts}


async def test_agents_go_on_and_are_taken_over_also_twice_in_a_row(tmp_path, boxes):
    async with bench(tmp_path, boxes) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts, agents, ids = run.at_work(), run.agents(), run.boxes.ids()
        for kills in (1, 2):
            await run.kill()
            assert run.agents() == agents and run.boxes.ids() >= ids, "they live on without a runner"
            assert await asyncio.to_thread(reap, run.registry) == [], "nor does another run's start end them"
            await run.start()
            await run.until(lambda kills=kills: run.log().count("goes on in") == 2 * kills)
            assert run.at_work() == attempts and run.agents() == agents
        assert run.store.outcome_counts() == {"running": 2}
        run.tell_to_go_on(attempts)
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, ids_of(attempts))
        assert run.store.outcome_counts() == {"ok": 2}
        assert run.log().count("is ready") == 1
        for result in run.store.results(0):
            assert result.stages_s["away"] == 0, "its agent was at work all the time"


@needs_mitmproxy
@pytest.mark.parametrize("boxes", KINDS[1:], indirect=True)  # without walls nobody can be intercepted
async def test_intercepted_agents_go_on_although_their_proxy_ended_with_the_runner(tmp_path, boxes):
    async with bench(tmp_path, boxes, intercepted=True, infra_retries=0) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts = run.at_work()
        await run.kill()
        await run.start()
        await run.until(lambda: run.log().count("goes on in") == 2)
        run.tell_to_go_on(attempts)
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, ids_of(attempts))


async def test_agents_that_ended_while_no_runner_was_there_are_scored_and_their_time_is_their_own(tmp_path, boxes):
    async with bench(tmp_path, boxes) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts = run.at_work()
        await run.kill()
        run.tell_to_go_on(attempts, "quiet")
        await until(lambda: run.agents() == set(), timeout_s=20)
        await asyncio.sleep(2.0)
        await run.start()
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, ids_of(attempts), num_turns=1)
        for result, one in zip(run.store.results(0), attempts, strict=True):
            assert result.stages_s["away"] >= 2.0
            assert 0 < result.stages_s["agent"] < time.time() - one.at_work.facts.started_at - 2.0


async def test_a_killed_supervisor_of_the_runner_does_not_take_the_agents_along(tmp_path, local):
    """Its pid is the one on record (events.jsonl), so that is what gets killed."""
    async with bench(tmp_path, local) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts, agents = run.at_work(), run.agents()
        await run.kill(supervisor=True)
        assert run.agents() == agents
        await run.start()
        run.tell_to_go_on(attempts)
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, ids_of(attempts))


async def test_a_sandbox_that_is_being_created_is_reaped_and_the_attempt_started_over(tmp_path, local):
    async with bench(tmp_path, local, task="unwell", verify="same") as run:
        await run.until(lambda: len(run.boxes.ids()) == 2)
        first = run.boxes.ids()
        await run.kill()
        assert run.boxes.ids() == set(), "nobody could go on with them"
        await run.start()
        await run.until(lambda: len(run.boxes.ids()) == 2)
        assert run.boxes.ids().isdisjoint(first)
        # A box is on record before it exists.
        await run.until(lambda: all(run.boxes.has(box, "/app") for box in run.boxes.ids()))
        for box in run.boxes.ids():
            run.boxes.put(box, "/app/healthy")
        await run.until(lambda: len(run.at_work()) == 2)
        attempts = run.at_work()
        run.tell_to_go_on(attempts)
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, ids_of(attempts))
        assert run.store.outcome_counts() == {"cancelled": 2, "ok": 2}


async def test_a_sandbox_without_an_agent_is_reaped_and_the_attempt_started_over(tmp_path):
    async with bench(tmp_path, local_boxes("none", tmp_path), starts=False) as run:
        sessions = run.gateway.gateway.sessions
        mint, asked = sessions.mint, []

        async def hang(session_id, *_):
            asked.append(session_id)
            await asyncio.sleep(600)

        sessions.mint = hang
        await run.start()
        await run.until(lambda: len(asked) == 2)
        await run.kill()
        assert run.boxes.ids() == set()
        sessions.mint = mint
        await run.start()
        await run.until(lambda: len(run.at_work()) == 2)
        assert ids_of(run.at_work()).isdisjoint(asked)


async def test_an_agent_of_which_nobody_noted_whether_it_was_started_is_ended(tmp_path):
    async with bench(tmp_path, local_boxes("none", tmp_path)) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        lost, kept = run.at_work()
        await run.kill()
        with sqlite3.connect(tmp_path / "store.sqlite") as db:
            db.execute("UPDATE agents_at_work SET job_id = NULL WHERE rollout_id = ?", (lost.rollout_id,))
        await run.start()
        await run.until(lambda: len(run.at_work()) == 2 and lost.rollout_id not in ids_of(run.at_work()))
        assert kept.rollout_id in ids_of(run.at_work())
        assert lost.at_work.sandbox_id not in run.boxes.ids() and len(run.agents()) == 2


async def test_agents_that_have_ended_and_are_not_sealed_yet(tmp_path, local):
    async with bench(tmp_path, local) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts = run.at_work()
        sessions = run.gateway.gateway.sessions
        seal, asked = sessions.seal, []

        async def hang(session_id):
            asked.append(session_id)
            await asyncio.sleep(600)

        sessions.seal = hang
        run.tell_to_go_on(attempts)
        await run.until(lambda: len(asked) == 2)
        await run.kill()
        sessions.seal = seal
        await run.start()
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, ids_of(attempts))
        assert run.store.outcome_counts() == {"ok": 2}


async def test_tests_in_a_sandbox_of_their_own_start_over(tmp_path, boxes):
    verify = "auto" if boxes.kind == "bubblewrap" else "fresh"
    async with bench(tmp_path, boxes, task="tested", verify=verify) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts, first = run.at_work(), run.boxes.ids()
        run.tell_to_go_on(attempts)
        await run.until(lambda: len(_testing(run) - first) == 2)
        tested = _testing(run)
        await run.kill()
        assert run.boxes.ids().isdisjoint(tested), "of a dead runner's sandboxes only its agents' live on"
        await run.start()
        await run.until(lambda: len(_testing(run) - first - tested) == 2)
        for box in _testing(run):
            run.boxes.put(box, "/tmp/tested")
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, ids_of(attempts))


def _testing(run):
    found = set()
    for box in run.boxes.ids():
        with contextlib.suppress(Exception):  # it may end this moment
            if run.boxes.has(box, "/tmp/testing"):
                found.add(box)
    return found


async def test_tests_in_the_agents_own_sandbox_are_not_repeated_there(tmp_path):
    boxes = local_boxes("none", tmp_path)
    async with bench(tmp_path, boxes, task="tested", verify="same") as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts, first = run.at_work(), run.boxes.ids()
        run.tell_to_go_on(attempts)
        await run.until(lambda: len(_testing(run)) == 2)
        await run.kill()
        await run.start()
        await run.until(lambda: len(run.at_work()) == 2 and run.boxes.ids().isdisjoint(first))
        spoiled = run.store.rollouts()
        assert {result.rollout_id for result in spoiled} == ids_of(attempts)
        assert all((r.outcome, r.failed_stage, r.reward) == ("infra_failed", "verify", None) for r in spoiled)
        fresh = run.at_work()
        assert [one.attempt for one in fresh] == [0, 0], "which costs them no retry"
        run.tell_to_go_on(fresh)
        await run.until(lambda: len(_testing(run)) == 2)
        for box in _testing(run):
            run.boxes.put(box, "/tmp/tested")
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, {one.rollout_id for one in fresh})


async def test_a_sandbox_that_is_gone_means_a_fresh_attempt(tmp_path, boxes):
    async with bench(tmp_path, boxes) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        gone, kept = run.at_work()
        await run.kill()
        run.boxes.end(gone.at_work.sandbox_id)
        await run.start()
        await run.until(lambda: len(run.at_work()) == 2 and gone.rollout_id not in ids_of(run.at_work()))
        attempts = run.at_work()
        assert kept.rollout_id in ids_of(attempts)
        run.tell_to_go_on(attempts)
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, ids_of(attempts))
        assert run.store.outcome_counts() == {"cancelled": 1, "ok": 2}
        assert (await run.gateway.admin.session(gone.rollout_id)).sealed


async def test_between_groups_there_is_nothing_to_take_over(tmp_path, local):
    async with bench(tmp_path, local, num_groups=2) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        first = run.at_work()
        run.tell_to_go_on(first)
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.kill()
        await run.start()
        run.store.mark_trained([0], 1)
        run.store.publish(2)
        await run.until(lambda: len(run.at_work()) == 2)
        second = run.at_work()
        run.tell_to_go_on(second)
        await run.until(lambda: run.store.group_counts() == {"trained": 1, "ready": 1})
        await run.check_results(0, ids_of(first))
        await run.check_results(1, ids_of(second))
        assert run.store.outcome_counts() == {"ok": 4}


async def test_a_stop_in_good_order_cancels_what_was_taken_over(tmp_path):
    async with bench(tmp_path, local_boxes("bubblewrap", tmp_path)) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts = run.at_work()
        await run.kill()
        await run.start()
        await run.until(lambda: run.log().count("continues: ") == 1)
        assert await run.end() == 0
        run.check_nothing_left()
        cancelled = run.store.rollouts()
        assert {result.rollout_id for result in cancelled} == ids_of(attempts)
        assert all(result.detail == "cancelled: the run was stopped" for result in cancelled)
        assert all([(await run.gateway.admin.session(one)).sealed for one in ids_of(attempts)])


async def test_what_was_taken_over_is_cancelled_when_it_is_too_old(tmp_path):
    async with bench(tmp_path, local_boxes("none", tmp_path), max_staleness=0) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        first = run.at_work()
        await run.kill()
        await run.start()
        await run.until(lambda: run.log().count("goes on in") == 2)
        run.store.announce(2)
        run.store.publish(2)
        await run.until(lambda: run.store.group_counts().get("dropped") == 1)
        assert run.store.fate(0) == ("dropped", "stale")
        await run.until(lambda: len(run.at_work()) == 2 and ids_of(run.at_work()).isdisjoint(ids_of(first)))
        assert {result.detail for result in run.store.rollouts()} == {
            "cancelled: its group had become too old for any step"
        }


async def test_the_deadline_of_an_agent_is_its_own_whoever_watches(tmp_path):
    async with bench(tmp_path, local_boxes("none", tmp_path), timeout_s=6) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts = run.at_work()
        await run.kill()
        await asyncio.sleep(1.0)
        await run.start()
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        for result in run.store.results(0):
            assert result.rollout_id in ids_of(attempts)
            assert (result.outcome, result.timed_out) == ("truncated", True)
            assert 5.5 < result.stages_s["agent"] < 7.5


async def test_an_agent_that_fails_after_the_kill_is_not_blamed(tmp_path):
    async with bench(tmp_path, local_boxes("none", tmp_path), infra_retries=1) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts = run.at_work()
        await run.kill()
        await run.start()
        run.tell_to_go_on(attempts, "3")
        await run.until(lambda: len(run.at_work()) == 2 and ids_of(run.at_work()).isdisjoint(ids_of(attempts)))
        for result in run.store.rollouts():
            assert (result.outcome, result.reward, result.failed_stage) == ("infra_failed", None, "agent")
            assert "the runner was killed while the agent worked" in result.detail and "exit code 3" in result.detail
        fresh = run.at_work()
        assert [one.attempt for one in fresh] == [1, 1]
        run.tell_to_go_on(fresh)
        await run.until(lambda: run.store.group_counts() == {"ready": 1})


async def test_rollouts_of_an_evaluation_go_on_too_and_warm_spares_do_not(tmp_path):
    settings = {"evaluation": {"tasks": str(tmp_path / "plain"), "samples": 4}, "warm_total": 2, "warm_per_task": 2}
    async with bench(tmp_path, local_boxes("bubblewrap", tmp_path), task="tested", **settings) as run:
        await run.until(lambda: len(run.at_work()) == 2 and len(run.boxes.ids()) == 4)
        attempts, before = run.at_work(), run.boxes.ids()
        spares = before - {one.at_work.sandbox_id for one in attempts}
        assert all(one.group_id < 0 for one in attempts) and len(spares) == 2
        await run.kill()
        assert run.boxes.ids() == before - spares
        await run.start()
        await run.until(lambda: run.log().count("goes on in") == 2)
        assert run.at_work() == attempts
        run.tell_to_go_on(attempts)
        await run.until(lambda: len(run.at_work()) == 2 and ids_of(run.at_work()).isdisjoint(ids_of(attempts)))
        second = run.at_work()
        run.tell_to_go_on(second)
        await run.until(lambda: run.store.evaluations())
        (report,) = run.store.evaluations()
        assert (report["num_scored"], report["pass_at_1"]) == (4, 1.0)
        await run.check_results(-1, ids_of(attempts) | ids_of(second))


async def test_taken_over_agents_keep_their_places(tmp_path):
    """Four wanted, two at a time: the fresh ones wait until those that go on are over."""
    async with bench(tmp_path, local_boxes("none", tmp_path), group_size=4) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts = run.at_work()
        await run.kill()
        await run.start()
        await run.until(lambda: run.log().count("goes on in") == 2)
        await asyncio.sleep(1.5)
        assert run.at_work() == attempts and len(run.boxes.ids()) == 2
        run.tell_to_go_on(attempts)
        await run.until(lambda: len(run.at_work()) == 2 and ids_of(run.at_work()).isdisjoint(ids_of(attempts)))
        second = run.at_work()
        run.tell_to_go_on(second)
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, ids_of(attempts) | ids_of(second))


async def test_a_run_that_ends_without_another_runner_leaves_nothing(tmp_path, boxes):
    async with bench(tmp_path, boxes) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        await run.kill()
        assert len(run.agents()) == 2
        await run.end()  # as the supervisor does with every part, also one that has ended
        run.check_nothing_left()


async def test_what_nobody_takes_over_in_time_is_any_reapers(tmp_path):
    async with bench(tmp_path, local_boxes("none", tmp_path)) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        await run.kill()
        assert await asyncio.to_thread(reap, run.registry) == []
        for record in run.registry.glob("sandbox-*.json"):
            record.write_text(json.dumps({**json.loads(record.read_text()), "kept_until": time.time() - 1}))
        ended = await asyncio.to_thread(reap, run.registry)
        assert len(ended) == 2 and not any(one.problem for one in ended)
        run.check_nothing_left()


@pytest.mark.parametrize("boxes", KINDS[1:], indirect=True)
async def test_a_call_that_the_kill_cut_is_made_again_by_the_agent(tmp_path, boxes):
    """The way out of a sealed box goes through the runner. Nobody comes back in time, so the call is aborted."""
    async with bench(tmp_path, boxes) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts = run.at_work()
        run.engine.hold = lambda _: asyncio.sleep(600)
        run.tell_to_go_on(attempts)
        await run.until(lambda: run.engine.in_flight == 2)
        await run.kill()
        await until(lambda: run.engine.num_aborted == 2, timeout_s=20)
        run.engine.hold = None
        await run.start()
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        results = run.store.results(0)
        assert {result.rollout_id for result in results} == ids_of(attempts)
        assert [(result.outcome, result.reward) for result in results] == [("ok", 1.0)] * 2
        for one in attempts:
            turns = (await run.gateway.admin.capture(one.rollout_id)).turns
            assert [turn.status for turn in turns] == ["ok", "aborted", "ok"]


async def test_a_call_that_the_kill_cut_is_joined_when_the_next_runner_is_there_in_time(tmp_path):
    """Where starting takes less than the gateway's grace: the agent gets the very reply that was under way."""
    boxes, answers = local_boxes("bubblewrap", tmp_path), asyncio.Event()
    async with bench(tmp_path, boxes, hang_up_grace_s=60.0) as run:
        await run.until(lambda: len(run.at_work()) == 2)
        attempts = run.at_work()
        run.engine.hold = lambda _: answers.wait()
        run.tell_to_go_on(attempts)
        await run.until(lambda: run.engine.in_flight == 2)
        await run.kill()
        await run.start()
        await run.until(lambda: run.gateway.gateway.metrics.retries.total(how="joined") == 2)
        answers.set()
        await run.until(lambda: run.store.group_counts() == {"ready": 1})
        await run.check_results(0, ids_of(attempts))
        assert len(run.engine.requests) == 4 and run.engine.num_aborted == 0

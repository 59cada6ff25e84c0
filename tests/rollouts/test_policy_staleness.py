"""No rollout starts that could only be consumed too old, and one that has become so is ended for good (B38, B40)."""

import asyncio
import random
import time

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.errors import TrainingFailed
from harness_trainer.rollouts.admission import is_too_old, may_open, staleness_ahead
from harness_trainer.rollouts.group import sampled_versions
from harness_trainer.rollouts.lineage import Lineage, PolicyVersion
from harness_trainer.rollouts.policy_config import Schedule
from harness_trainer.rollouts.policy_records import Versions
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.sealing import sealing
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, Outcome
from tests.rollouts.policy import finished, infra, ready, run_until, sampled_by
from tests.rollouts.rolling import CALL, rolling, shell_agent, task


@pytest.fixture
def store(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.announce(1)
    store.publish(1)
    yield store
    store.close()


# -- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "learner", "ahead", "before", "per_step", "expected"),
    [
        (1, 1, 0, 0, 2, 0),  # the next step takes it
        (1, 1, 0, 1, 2, 0),
        (1, 1, 0, 2, 2, 1),  # two others fill the next step
        (1, 1, 0, 5, 2, 2),
        (3, 3, 1, 0, 2, 1),  # a step was taken, its weights have no name yet
        (3, 4, 0, 0, 2, 1),  # they have, and are on their way
        (3, 4, 0, 2, 2, 2),
    ],
)
def test_how_old_a_group_will_be_when_it_is_consumed(engine, learner, ahead, before, per_step, expected):
    assert staleness_ahead(Versions(engine, learner, ahead), before, per_step) == expected


# v1 to v4 are steps 0 to 3; the learner died, and v5 is v2 published again.
RESUMED = Lineage([PolicyVersion(n, n - 1, n - 1) for n in range(1, 5)] + [PolicyVersion(5, 1, 2)])


def test_after_a_resume_a_group_is_opened_by_the_steps_between_and_not_by_the_numbers():
    half_way = Versions(engine=4, learner=2, lineage=RESUMED)  # the engine lives on, and has what the learner lost
    assert staleness_ahead(half_way, 0, 2) == 2
    assert not may_open(schedule(), half_way, {})
    resumed = Versions(engine=5, learner=5, lineage=RESUMED)
    assert staleness_ahead(resumed, 0, 2) == 0 and may_open(schedule(), resumed, {"ready": 3})


@pytest.mark.parametrize(
    ("sampled", "age"), [({2}, 0), ({5}, 0), ({1}, 1), ({3}, 1), ({4}, 2), ({2, 4}, 2), ({5, 1}, 1)]
)
def test_after_a_resume_a_running_group_is_as_old_as_the_most_distant_policy_that_sampled_it(sampled, age):
    resumed = Versions(5, 5, lineage=RESUMED)
    assert [is_too_old(schedule(max_staleness=limit), resumed, sampled) for limit in (0, 1, 2)] == [
        age > limit for limit in (0, 1, 2)
    ]
    assert is_too_old(schedule(max_staleness=age), Versions(5, 5, 1, RESUMED), sampled), "a step is under way"


def schedule(**settings):
    return Schedule(**{"max_open_groups": 99, "num_groups": 10, "groups_per_step": 2, "max_staleness": 1, **settings})


@pytest.mark.parametrize(
    ("settings", "versions", "counts", "expected"),
    [
        ({}, (1, 1), {"running": 3}, True),
        ({}, (1, 1), {"running": 2, "ready": 2}, False),
        ({}, (1, 1, 1), {"running": 1}, True),
        ({}, (1, 2), {"running": 1}, True),
        ({}, (1, 1, 1), {"running": 2}, False),
        ({}, (1, 2), {"running": 2}, False),
        ({}, (0, 1), {}, False),  # the engine has no policy of this run yet
        ({"max_staleness": 0}, (1, 1), {"ready": 1}, True),
        ({"max_staleness": 0}, (1, 1), {"ready": 2}, False),
        ({"max_staleness": 0}, (1, 2), {}, False),
        ({"max_staleness": None}, (1, 2), {"ready": 50}, False),  # more than the run will train
        ({"max_staleness": None, "num_groups": 100}, (1, 2), {"ready": 50}, True),
        ({"max_staleness": None, "num_groups": 100, "max_open_groups": 50}, (1, 2), {"ready": 50}, False),
        ({}, (9, 9), {"trained": 9, "ready": 1}, False),
        ({}, (9, 9), {"trained": 9, "dropped": 7}, True),
    ],
)
def test_when_another_group_may_be_opened(settings, versions, counts, expected):
    assert may_open(schedule(**settings), Versions(*versions), counts) is expected


def test_when_a_running_group_is_too_old():
    assert not is_too_old(schedule(), Versions(3, 3), {2})
    assert is_too_old(schedule(), Versions(3, 4), {2, 3}), "the next step will be of version 4"
    assert is_too_old(schedule(), Versions(3, 3, 1), {2}), "or of one that has no name yet"
    assert not is_too_old(schedule(), Versions(9, 9), set()), "nothing of it was sampled yet"
    assert not is_too_old(schedule(max_staleness=None), Versions(9, 9), {1})


def test_the_policies_of_a_trace_are_those_of_trained_turns():
    trace = sampled_by(5, 4)
    trace["turns"].append({"loss_mask": [0, 0], "metadata": {"policy_versions": [{"version": "v1"}]}})
    assert sampled_versions(trace) == {4, 5}
    assert sampled_versions({"turns": []}) == set()


def test_the_versions_that_staleness_counts_from(store):
    assert store.versions() == Versions(engine=1, learner=1)
    store.open_group(0, "a", "h")
    store.mark_trained([0], step=1)
    assert store.versions() == Versions(engine=1, learner=1, ahead=1), "the weights have no name yet"
    store.announce(2)
    assert store.versions() == Versions(engine=1, learner=2), "and are not on the engine"
    store.publish(2)
    assert store.versions() == Versions(2, 2)
    store.forget_engine()
    assert store.versions() == Versions(0, 2)
    assert store.policy_version() == 2, "the count goes on"
    assert store.versions().next_sampled == 2, "what gets its sandbox now is sampled by v2's weights at the oldest"
    store.announce(5)
    store.publish(5)
    assert store.versions() == Versions(5, 5)
    assert store.versions().age(2) == 0 and store.versions().age(1) == 1


def test_two_weights_never_share_a_number(store):
    store.announce(2)
    store.announce(2)  # the same weights, sent once more
    store.mark_trained([], 1)
    for used in (1, 2):
        with pytest.raises(TrainingFailed, match=f"v{used} is used up"):
            store.announce(used)
    store.announce(3)


def test_an_open_connection_sees_the_versions_that_come(tmp_path, store):
    other = RolloutStore(tmp_path / "store.sqlite")
    for step in (1, 2):
        store.open_group(step, "a", "h")
        store.mark_trained([step], step)
        store.announce(step + 1)
        store.publish(step + 1)
        assert other.versions().age(1) == step
    store.rewind(1)
    store.continue_from(2, 1)
    store.announce(7)
    assert other.versions() == Versions(3, 7) and [other.versions().age(v) for v in (2, 3, 7)] == [0, 1, 0]
    other.close()


# -- the runner with a learner ---------------------------------------------------------------------------------------


class Learner:
    """Takes whole steps of ready groups, oldest first, and publishes a version after each, some time later."""

    def __init__(self, store, groups_per_step, max_staleness, *, drops=(), slow=(), sync_s=0.4):
        self.store, self.size, self.bound = store, groups_per_step, max_staleness
        self.drops, self.slow, self.sync_s = set(drops), set(slow), sync_s
        self.steps, self.staleness, self.too_old = store.steps_taken(), [], 0
        self.while_publishing = 0

    async def attempt(self, job):
        version = self.store.versions()
        job.has_box()
        self.while_publishing += version.ahead
        is_slow = job.group_id in self.slow
        await asyncio.sleep(60 if is_slow else random.Random(job.rollout_id).uniform(0, 0.05))
        return finished(job, trace=sampled_by(version.engine))

    async def run(self):
        taken = []
        while True:
            await asyncio.sleep(0.01)
            group = self.store.take_ready({group.group_id for group in taken})
            if group is None:
                continue
            version = self.store.policy_version()
            age = version - min(min(sampled_versions(result.trace)) for result in group.results)
            if age > self.bound or group.group_id in self.drops:
                self.too_old += age > self.bound
                self.store.mark_dropped(group.group_id, "stale" if age > self.bound else "no_spread")
                continue
            self.staleness.append(age)
            taken.append(group)
            if len(taken) == self.size:
                await asyncio.sleep(0.03)  # the optimizer
                self.steps += 1
                self.store.mark_trained([group.group_id for group in taken], self.steps)
                await asyncio.sleep(self.sync_s)  # the weights travel
                self.store.publish(version + 1)
                taken = []


@pytest.mark.parametrize(("max_staleness", "per_step", "steps"), [(0, 1, 4), (0, 2, 3), (1, 2, 5), (2, 1, 6)])
async def test_nothing_that_is_sampled_is_too_old_and_steps_go_on(store, max_staleness, per_step, steps):
    learner = Learner(store, per_step, max_staleness, drops=[1])  # publishing takes longer than the runner's poll
    learning = asyncio.ensure_future(learner.run())
    bounds = {
        "max_open_groups": per_step * (max_staleness + 1),
        "num_groups": per_step * steps,
        "groups_per_step": per_step,
        "max_staleness": max_staleness,
    }
    await run_until(store, learner.attempt, lambda: learner.steps >= steps, schedule=bounds, max_concurrent=8)
    learning.cancel()
    assert max(learner.staleness) <= max_staleness
    assert learner.too_old == 0, "work that could only be thrown away"
    if max_staleness == 0:
        assert learner.while_publishing == 0, "strictly one after the other"
    counts = store.group_counts()
    assert (counts["trained"], counts["dropped"]) == (per_step * steps, 1), "the dropped one was replaced"


async def test_a_slow_group_holds_nothing_up_and_a_restart_trains_no_group_twice_and_loses_none(store):
    bounds = {"max_open_groups": 5, "num_groups": 24, "groups_per_step": 1, "max_staleness": 4}

    async def live(until_step):
        learner = Learner(store, 1, 4, slow=[2], sync_s=0.02)
        learning = asyncio.ensure_future(learner.run())
        done = lambda: learner.steps >= until_step  # noqa: E731
        await run_until(store, learner.attempt, done, schedule=bounds, max_concurrent=10)
        learning.cancel()
        await asyncio.gather(learning, return_exceptions=True)
        return learner

    first = await live(14)
    assert store.fate(2) == ("dropped", "stale"), "four steps went by while it ran"
    kept = {group: store.fate(group)[0] for group in range(store.next_group_id())}
    store.forget_engine()
    store.rewind(10)  # the last checkpoint; four steps and whatever was in flight are lost with the process
    store.publish(store.policy_version() + 1)
    second = await live(24)
    steps = [[result.group_id for result in store.trained_results(step)] for step in range(1, 25)]
    trained = [group for (group, _) in steps]
    assert len(set(trained)) == 24, "each step has a group of its own"
    assert store.group_counts()["trained"] == 24
    assert kept[2] == store.fate(2)[0] == "dropped"
    lost = [group for group, state in kept.items() if state in ("trained", "ready", "running") and group not in trained]
    assert all(store.fate(group) == ("dropped", "stale") for group in lost), "too old by then, and counted"
    assert max(first.staleness + second.staleness) <= 4


async def test_after_a_restart_nothing_runs_before_the_new_engine_has_its_weights(store):
    store.open_group(0, "a", "h")
    store.forget_engine()
    started = []

    async def attempt(job):
        started.append(job.rollout_id)
        return finished(job)

    publishing = asyncio.get_running_loop().call_later(0.8, store.publish, 2)
    seen = asyncio.get_running_loop().call_later(0.7, lambda: early.extend(started))
    early: list[str] = []
    await run_until(store, attempt, ready(store, 2))
    assert early == [] and started
    assert not publishing.cancelled() and not seen.cancelled()


# -- cancelling ------------------------------------------------------------------------------------------------------

BOUNDS = {"groups_per_step": 1, "max_staleness": 0, "max_open_groups": 2}


async def test_a_running_group_that_every_step_would_find_too_old_is_cancelled_counted_and_replaced(store):
    at_work, most, ended, blocked = 0, 0, [], True

    async def attempt(job):
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        job.has_box()
        try:
            await asyncio.sleep(60 if blocked else 0)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # ending a sandbox takes its time, and the place is not free before
            ended.append(job.rollout_id)
            raise
        finally:
            at_work -= 1
        return finished(job)

    def publish():
        nonlocal blocked
        blocked = False
        store.publish(2)

    asyncio.get_running_loop().call_later(0.6, publish)
    await run_until(store, attempt, ready(store, 1), group_size=4, max_concurrent=4, schedule=BOUNDS)
    assert len(ended) == 4 and most == 4
    assert store.fate(0) == ("dropped", "stale")
    assert store.fate(1) == ("ready", None)
    assert store.outcome_counts() == {"cancelled": 4, "ok": 4}
    cancelled = [result for result in store.rollouts() if result.outcome == "cancelled"]
    assert all(result.reward is None and "too old" in result.detail for result in cancelled)


@pytest.mark.parametrize("late", [finished, infra])
async def test_the_late_result_of_a_cancelled_rollout_is_ignored(store, late):
    tried = []

    async def attempt(job):
        job.has_box()
        if job.group_id == 0:
            tried.append(job.attempt)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return late(job)  # as if it had ended at the same moment
        return finished(job)

    asyncio.get_running_loop().call_later(0.5, store.publish, 2)
    await run_until(store, attempt, ready(store, 1), schedule=BOUNDS)
    assert tried == [0, 0], "nor is it tried again"
    assert store.fate(0) == ("dropped", "stale")
    assert store.take_ready(set()).group_id == 1


async def test_a_group_is_as_old_as_the_oldest_token_of_any_of_its_rollouts(store):
    async def attempt(job):
        job.has_box()
        if job.group_id == 0 and job.rollout_id.startswith("g00000-1-"):
            await asyncio.sleep(60)  # not too old by itself: its sandbox came after version 2
        return finished(job, trace=sampled_by(1 if job.group_id == 0 else 2))

    store.publish(2)
    await run_until(store, attempt, ready(store, 1), schedule=BOUNDS)
    assert store.fate(0) == ("dropped", "stale")


async def test_a_rollout_that_has_no_sandbox_yet_is_not_old(store):
    async def attempt(job):
        if job.group_id == 0:
            await asyncio.sleep(1.2)  # its image is built; meanwhile the policy changes
        job.has_box()
        return finished(job, trace=sampled_by(2))

    asyncio.get_running_loop().call_later(0.5, store.publish, 2)
    await run_until(store, attempt, lambda: store.group_counts().get("ready", 0) >= 1, schedule=BOUNDS)
    assert store.fate(0) == ("ready", None)


async def test_groups_that_are_always_too_old_end_the_run_with_what_to_do(store):
    async def attempt(job):
        job.has_box()
        await asyncio.sleep(60)

    async def publish():
        for version in range(2, 30):
            await asyncio.sleep(0.4)
            store.publish(version)

    publishing = asyncio.ensure_future(publish())
    with pytest.raises(TrainingFailed, match=r"2 groups in a row .*stale 2.*max_staleness"):
        await run_until(store, attempt, lambda: False, schedule={**BOUNDS, "max_dropped_in_a_row": 2})
    publishing.cancel()


async def test_a_stopped_run_is_no_stale_group(store):
    async def attempt(job):
        job.has_box()
        await asyncio.sleep(60)

    await run_until(store, attempt, lambda: store.outcome_counts().get("running", 0) == 2, schedule=BOUNDS)
    assert store.group_counts() == {"running": 1}
    assert {result.detail for result in store.rollouts()} == {"cancelled: the run was stopped"}


async def test_rollouts_of_a_runner_that_was_killed_are_accounted_for(store):
    store.open_group(0, "a", "h")
    store.start_rollout("lost", 0, 0, 0)

    async def attempt(job):
        return finished(job)

    await run_until(store, attempt, ready(store, 1), schedule={"num_groups": 1})
    assert store.outcome_counts() == {"cancelled": 1, "ok": 2}


async def test_cancelling_reaches_sandbox_session_and_engine_within_seconds(tmp_path):
    engine = ScriptedEngine([Reply("hm", stall=True)])
    async with rolling(tmp_path, engine, shell_agent(f"while true; do {CALL}; done")) as means:
        attempt = sealing(means.admin, lambda job: run_rollout(job, means))
        running = [asyncio.ensure_future(attempt(Job(f"g0-{n}-a", 0, 0, task(tmp_path)))) for n in range(4)]
        async with asyncio.timeout(30):
            while engine.in_flight < 4:
                await asyncio.sleep(0.05)
        began = time.monotonic()
        for one in running:
            one.cancel()
        assert [type(end) for end in await asyncio.gather(*running, return_exceptions=True)] == (
            [asyncio.CancelledError] * 4
        )
        assert time.monotonic() - began < 5
        assert (engine.in_flight, engine.num_aborted) == (0, 4)
        sessions = [(await means.admin.capture(f"g0-{n}-a")).session for n in range(4)]
        assert all(session.sealed for session in sessions)
        assert list((tmp_path / "boxes").glob("*")) == [], "sandboxes are gone before the places are free"


async def test_a_rollout_that_the_machinery_spoils_while_its_agent_works_is_sealed(tmp_path):
    engine = ScriptedEngine([Reply("hm", stall=True)])
    async with rolling(tmp_path, engine, shell_agent(f"while true; do {CALL}; done")) as means:
        attempt = sealing(means.admin, lambda job: run_rollout(job, means))
        running = asyncio.ensure_future(attempt(Job("g0-0-a", 0, 0, task(tmp_path))))
        async with asyncio.timeout(30):
            while not engine.in_flight:
                await asyncio.sleep(0.05)
        await means.backend.__aexit__(None, None, None)  # every sandbox is taken away
        result = await asyncio.wait_for(running, 60)
        assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, "agent")
        assert (await means.admin.capture("g0-0-a")).session.sealed
        assert engine.in_flight == 0

"""The scheduler: whole groups, bounded, retried only for infra, stopped when nothing works, continued after a kill."""

import asyncio
from pathlib import Path

import pytest

from harness_trainer.errors import TrainingFailed
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.curriculum import task_of_group
from harness_trainer.rollouts.sources import OpenSource
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult
from tests.rollouts.policy import TASKS, finished, run_sources


@pytest.fixture
def store(tmp_path: Path):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.set_state("policy_version", "1")
    yield store
    store.close()


async def run_until(
    store, attempt, done, *, max_open_groups=2, num_groups=100, plan=lambda needs: None, agent="h", **settings
):
    """Run the scheduler until `done()`, then cancel it, as SIGTERM does."""
    config = RolloutConfig(**{"group_size": 2, "max_concurrent": 2, **settings})
    schedule = {"max_open_groups": max_open_groups, "num_groups": num_groups}
    sources = [OpenSource(config, TASKS, attempt, lambda *_: agent)]
    await run_sources(store, sources, done, config=config, schedule=schedule, plan=plan)


def test_every_pass_holds_every_task_once_and_an_id_always_means_the_same_task():
    passes = [[task_of_group(p * 3 + i, TASKS, seed=1).name for i in range(3)] for p in range(20)]
    assert all(sorted(names) == ["a", "b", "c"] for names in passes)
    assert len({tuple(names) for names in passes}) > 1, "passes have orders of their own"
    assert passes[7][2] == task_of_group(7 * 3 + 2, TASKS, seed=1).name


async def test_open_groups_never_exceed_their_bound(store):
    async def attempt(job):
        return finished(job)

    await run_until(store, attempt, lambda: store.group_counts().get("ready", 0) >= 2, max_open_groups=2)
    await asyncio.sleep(0)
    assert store.group_counts() == {"ready": 2}


async def test_no_group_is_opened_that_the_run_will_not_train_and_a_dropped_one_is_replaced(store):
    async def attempt(job):
        return finished(job)

    await run_until(store, attempt, lambda: store.group_counts().get("ready", 0) == 2, max_open_groups=5, num_groups=2)
    store.mark_trained([0], step=1)
    store.mark_dropped(1, "no spread")
    await run_until(store, attempt, lambda: store.group_counts().get("ready", 0) == 1, max_open_groups=5, num_groups=2)
    assert store.group_counts() == {"trained": 1, "dropped": 1, "ready": 1}


async def test_no_more_rollouts_run_at_once_than_allowed(store):
    running, most = 0, 0

    async def attempt(job):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return finished(job)

    await run_until(
        store, attempt, lambda: store.group_counts().get("ready", 0) >= 5, max_open_groups=5, max_concurrent=3
    )
    assert 2 <= most <= 3


@pytest.mark.parametrize(
    "fields",
    [{"detail": "\ud83d"}, {"findings": ["\ud83d"]}, {"rewards": {"\ud83d": 1.0}}],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_an_agent_said_that_utf_8_cannot_hold_ends_nothing(store, fields):
    async def attempt(job):
        return finished(job, **fields)

    await run_until(store, attempt, lambda: store.group_counts().get("ready", 0) >= 2, max_open_groups=2)
    assert store.outcome_counts() == {"ok": 4}


async def test_nothing_starts_before_a_policy_is_published(store):
    store.set_state("policy_version", "0")
    started = asyncio.Event()

    async def attempt(job):
        started.set()
        return finished(job)

    publish = asyncio.get_running_loop().call_later(0.5, store.set_state, "policy_version", "1")
    early = asyncio.get_running_loop().call_later(0.4, lambda: seen.append(started.is_set()))
    seen: list[bool] = []
    await run_until(store, attempt, started.is_set)
    assert seen == [False]
    assert publish.cancelled() is False and early.cancelled() is False


async def test_an_infra_failure_is_tried_again_and_an_agents_failure_is_not(store):
    attempts: dict[int, list[int]] = {}

    async def attempt(job):
        attempts.setdefault(job.group_id, []).append(job.attempt)
        if job.group_id == 0 and job.attempt == 0:
            return finished(job, Outcome.INFRA_FAILED, None)
        return finished(job, Outcome.AGENT_FAILED, 0.0)

    await run_until(store, attempt, lambda: store.group_counts().get("ready", 0) >= 2, infra_retries=1)
    assert sorted(attempts[0]) == [0, 0, 1, 1]
    assert attempts[1] == [0, 0]
    assert [r.attempt for r in store.results(0)] == [1, 1]


async def test_after_the_last_retry_a_slot_stays_unscored_and_a_fresh_sample_makes_the_group_whole(store):
    async def attempt(job):
        broken = job.group_id == 0 and job.rollout_id.startswith("g00000-1-")
        return finished(job, Outcome.INFRA_FAILED if broken else Outcome.OK, None if broken else 1.0)

    await run_until(store, attempt, lambda: store.group_counts().get("ready", 0) >= 2, infra_retries=0)
    assert [r.reward for r in store.results(0)] == [1.0, None, 1.0]


async def test_a_loop_in_which_nothing_works_stops_with_the_last_reason(store):
    async def attempt(job):
        failed = finished(job, Outcome.INFRA_FAILED, None)
        failed.detail = "model side: no route to engine"
        return failed

    with pytest.raises(TrainingFailed, match=r"3 of the last 3 rollouts.*no route to engine"):
        await run_until(store, attempt, lambda: False, infra_retries=0, infra_window=3, infra_share=1)


async def test_a_restart_runs_only_the_missing_slots(store):
    store.open_group(0, "b", "h")
    store.start_rollout("old", 0, 1, 0)
    store.finish_rollout(RolloutResult("old", 0, "b", "h", 0, Outcome.OK, 0.25), final=True)
    jobs = []

    async def attempt(job):
        jobs.append(job)
        return finished(job)

    await run_until(store, attempt, lambda: store.group_counts().get("ready", 0) >= 1, max_open_groups=1)
    assert [(job.group_id, job.task.name) for job in jobs] == [(0, "b")]
    assert [r.reward for r in store.results(0)] == [1.0, 0.25]


async def test_cancelling_cancels_the_running_rollouts(store):
    cancelled = []

    async def attempt(job):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(job.rollout_id)
            raise
        return finished(job)

    await run_until(store, attempt, lambda: store.outcome_counts().get("running", 0) == 2)
    assert len(cancelled) == 2
    assert store.group_counts() == {"running": 1}
    assert store.outcome_counts() == {"cancelled": 2}


async def test_a_task_whose_sandbox_cannot_be_had_is_not_tried_again_and_again(store):
    tried = []

    async def attempt(job):
        if job.group_id != 0:
            return finished(job)
        tried.append(job.rollout_id)
        failed = finished(job, Outcome.INFRA_FAILED, None)
        failed.setup_failed, failed.detail = True, "SetupFailed: image does not build"
        return failed

    settings = {"group_size": 6, "max_concurrent": 2, "infra_retries": 5, "setup_tries": 2, "infra_window": 4}
    await run_until(store, attempt, lambda: store.group_counts().get("ready", 0) >= 2, **settings)
    assert store.fate(0) == ("dropped", "setup_failed")
    assert len(tried) <= 3, "two, and one that was under way; not six slots, and not six tries of each"
    results = store.results(0)
    assert [r.reward for r in results] == [None] * 6 and all(r.setup_failed for r in results)
    assert sum("not tried" in r.detail and "does not build" in r.detail for r in results) >= 6 - len(tried)
    assert len(store.results(1)) == 6, "other tasks go on"


async def test_a_setup_failure_that_passes_is_tried_again(store):
    async def attempt(job):
        if job.group_id == 0 and job.attempt == 0 and job.rollout_id.startswith("g00000-0-"):
            failed = finished(job, Outcome.INFRA_FAILED, None)
            failed.setup_failed = True
            return failed
        return finished(job)

    await run_until(store, attempt, lambda: store.group_counts().get("ready", 0) >= 1, max_open_groups=1)
    assert [r.reward for r in store.results(0)] == [1.0, 1.0]


async def test_tasks_that_all_cannot_be_had_still_stop_the_run(store):
    async def attempt(job):
        failed = finished(job, Outcome.INFRA_FAILED, None)
        failed.setup_failed, failed.detail = True, "no engine"
        return failed

    with pytest.raises(TrainingFailed, match="no engine"):
        await run_until(store, attempt, lambda: False, group_size=4, max_open_groups=9, infra_window=5)


async def test_the_plan_names_what_has_no_sandbox_yet_and_what_comes_next_and_ends_empty(store):
    plans, gates = [], asyncio.Event()

    async def attempt(job):
        job.has_box()
        job.has_box()  # a second word changes nothing
        await gates.wait()
        return finished(job)

    def plan(needs):
        plans.append([(task.name, count) for task, _, count in needs])
        if len(plans) > 3 and plans[-1]:
            gates.set()

    first, second = (task_of_group(n, TASKS, 0).name for n in (0, 1))
    await run_until(
        store,
        attempt,
        lambda: store.group_counts().get("ready", 0) == 2,
        group_size=3,
        max_concurrent=2,
        max_open_groups=2,
        num_groups=2,
        plan=plan,
    )
    assert plans[0] == [(first, 3)]
    assert [(first, 1), (second, 3)] in plans, "what waits for a slot, then the group after it"
    assert plans[-1] == []
    assert all(count > 0 for needs in plans for _, count in needs)


async def test_waiting_for_a_slot_is_told_apart_from_the_rollouts_own_stages(store):
    async def attempt(job):
        await asyncio.sleep(0.05)
        result = finished(job)
        result.stages_s["agent"] = 0.05
        return result

    await run_until(
        store, attempt, lambda: store.group_counts().get("ready", 0) >= 1, max_concurrent=1, max_open_groups=1
    )
    queues = sorted(r.stages_s["queue"] for r in store.results(0))
    assert queues[0] < 0.04 < queues[1]
    assert list(store.results(0)[0].stages_s) == ["queue", "agent"]

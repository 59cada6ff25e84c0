"""What infra failures lead to: waits, fresh samples, whole groups or none, quarantine, and a run that stops (B27)."""

import asyncio
import random

import pytest

from capture_proxy.types import GATEWAY_RESTARTED
from harness_trainer.errors import TrainingFailed
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.failures import Backoff, Breaker
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, Outcome
from tests.rollouts.policy import TASKS, Waits, finished, infra, no_sandbox, ready, run_until

# -- retries and refills ---------------------------------------------------------------------------------------------


def test_waits_double_up_to_their_bound_and_differ():
    backoff = Backoff(2.0, 10.0, random.Random(0))
    for attempt, longest in enumerate([2, 4, 8, 10, 10]):
        waits = {backoff.wait_s(attempt) for _ in range(50)}
        assert longest / 2 <= min(waits) < max(waits) <= longest
        assert len(waits) > 40
    assert 5 <= backoff.wait_s(10_000) <= 10


async def test_retries_wait_as_long_as_the_settings_say(store):
    waits = Waits()

    async def attempt(job):
        return infra(job) if job.attempt < 2 and job.group_id == 0 else finished(job)

    settings = {"infra_retries": 2, "retry_backoff_s": 8, "retry_backoff_max_s": 10}
    await run_until(store, attempt, ready(store, 1), sleep=waits, **settings)
    assert len(waits) == 4
    assert all(4 <= wait <= 10 for wait in waits) and max(waits) > 5


async def test_who_waits_for_a_retry_holds_no_place(store):
    sibling = asyncio.Event()

    async def attempt(job):
        if job.attempt == 0 and job.rollout_id.startswith("g00000-0-"):
            return infra(job)
        sibling.set()
        return finished(job)

    async def until_the_sibling_ran(seconds):
        await sibling.wait()

    await run_until(store, attempt, ready(store, 1), max_concurrent=1, sleep=until_the_sibling_ran)
    assert [r.attempt for r in store.results(0)] == [1, 0]


async def test_a_group_below_its_minimum_is_dropped_and_replaced(store):
    async def attempt(job):
        return infra(job) if job.group_id == 0 and job.rollout_id.split("-")[1] != "0" else finished(job)

    await run_until(store, attempt, ready(store, 1), group_size=3, infra_retries=0, max_refills=2, infra_window=50)
    assert store.fate(0) == ("dropped", "too_few_scored")
    assert [r.reward for r in store.results(0)] == [1.0, None, None, None, None], "two of its own and two refills"
    assert store.fate(1)[0] == "ready"
    assert store.drop_counts() == {"too_few_scored": 1}


@pytest.mark.parametrize(("min_group", "state"), [(3, "ready"), (4, "dropped"), (None, "dropped")])
async def test_the_minimum_decides_whether_a_group_with_holes_is_trained(store, min_group, state):
    async def attempt(job):
        return infra(job) if job.group_id == 0 and job.rollout_id.split("-")[1] == "1" else finished(job)

    settings = {"group_size": 4, "infra_retries": 0, "max_refills": 0, "min_group": min_group}
    await run_until(store, attempt, ready(store, 1), **settings)
    assert store.fate(0)[0] == state


async def test_a_rollout_that_was_left_out_on_purpose_is_no_hole(store):
    async def attempt(job):
        slot = int(job.rollout_id.split("-")[1])
        return finished(job, reward=None if slot == 2 else float(slot))

    await run_until(store, attempt, ready(store, 1), group_size=3)
    assert [r.reward for r in store.results(0)] == [0.0, 1.0, None]


RAISED = "reward: warning reward_failed: mine.py:reward raised TypeError: no number"


@pytest.mark.parametrize("said", ["reward_failed", "reward_timeout", "reward_unusable"])
async def test_a_rollout_that_its_reward_function_failed_on_is_a_hole_and_replaced(store, said):
    async def attempt(job):
        slot = int(job.rollout_id.split("-")[1])
        if job.group_id == 0 and slot == 1:
            return finished(job, reward=None, findings=[f"reward: warning {said}: mine.py:reward"])
        return finished(job, reward=float(slot))

    await run_until(store, attempt, ready(store, 1), group_size=3)
    assert [r.reward for r in store.results(0)] == [0.0, None, 2.0, 3.0]
    notes = [note for note in store.notes(after=0) if note.kind == "reward_failed"]
    assert len(notes) == 1 and f"{said}: mine.py:reward" in notes[0].detail["line"]


async def test_groups_that_are_dropped_for_their_reward_function_name_it(store):
    async def attempt(job):
        return finished(job, reward=None, findings=[RAISED])

    with pytest.raises(TrainingFailed, match=r"2 groups in a row .*no reward: reward_failed: mine.py:reward raised"):
        await run_until(store, attempt, lambda: False, infra_window=50, schedule={"max_dropped_in_a_row": 2})


@pytest.mark.parametrize("rewards", [[None, None], [1.0, None]])
async def test_no_group_has_fewer_than_two_scored_rollouts(store, rewards):
    async def attempt(job):
        return finished(job, reward=rewards[int(job.rollout_id.split("-")[1])] if job.group_id == 0 else 1.0)

    await run_until(store, attempt, ready(store, 1))
    assert store.fate(0) == ("dropped", "too_few_scored")


async def test_an_agents_failure_is_scored_and_never_replaced(store):
    async def attempt(job):
        return finished(job, Outcome.AGENT_FAILED, 0.0)

    await run_until(store, attempt, ready(store, 1))
    assert [r.reward for r in store.results(0)] == [0.0, 0.0]


async def test_groups_that_are_dropped_one_after_the_other_end_the_run_with_the_reason(store):
    async def attempt(job):
        return finished(job, reward=None)

    with pytest.raises(TrainingFailed, match=r"4 groups in a row .*too_few_scored 4.*traces ls"):
        await run_until(store, attempt, lambda: False, schedule={"max_dropped_in_a_row": 4})
    assert store.group_counts()["dropped"] == 4


async def test_a_continued_group_keeps_its_refills_and_asks_for_no_more_than_its_share(store):
    store.open_group(0, "a", "h")
    for slot, outcome in enumerate([Outcome.OK, Outcome.INFRA_FAILED, Outcome.INFRA_FAILED]):
        job = Job(f"g00000-{slot}-x", 0, 0, TASKS[0], harness="h")
        store.start_rollout(job.rollout_id, 0, slot, 0)
        reward = 1.0 if outcome is Outcome.OK else None
        store.finish_rollout(finished(job, outcome, reward), final=True)
    tried = []

    async def attempt(job):
        tried.append(job.rollout_id)
        return infra(job) if job.group_id == 0 else finished(job)

    await run_until(store, attempt, ready(store, 1), infra_retries=0, max_refills=2)
    assert [name[:9] for name in tried if name.startswith("g00000-")] == ["g00000-3-"], "slot 2 was the first refill"
    assert store.fate(0) == ("dropped", "too_few_scored")


# -- quarantine ------------------------------------------------------------------------------------------------------


async def test_a_task_that_fails_at_set_up_for_every_sibling_is_quarantined_and_drawn_no_more(store):
    tried = []

    async def attempt(job):
        tried.append((job.group_id, job.task.name))
        return no_sandbox(job) if job.task.name == "b" else finished(job)

    def trained():
        counts = store.group_counts()
        for group in list(range(40)):
            if counts.get("ready") and _state(store, group) == "ready":
                store.mark_trained([group], group + 1)
                store.publish(group + 2)
        return counts.get("trained", 0) >= 16

    await run_until(store, attempt, trained, infra_window=50, quarantine_after=2)
    assert len({group for group, task in tried if task == "b"}) == 2
    assert store.drop_counts() == {"setup_failed": 2}
    assert store.quarantined() == {"b": "SetupFailed: image does not build"}
    (note,) = store.notes(after=0)
    assert (note.kind, note.detail["task"], note.detail["groups"]) == ("quarantined", "b", 2)
    assert "b is quarantined" in note.detail["line"] and "does not build" in note.detail["line"]


def _state(store, group):
    try:
        return store.fate(group)[0]
    except KeyError:
        return None


async def test_quarantine_outlives_a_restart_and_a_person_can_end_it(tmp_path):
    path = tmp_path / "store.sqlite"
    store = RolloutStore(path)
    store.publish(1)
    for _ in range(2):
        store.setup_failed("b", "no image", 2)
    store.close()
    store, drawn = RolloutStore(path), []

    async def attempt(job):
        drawn.append(job.task.name)
        return finished(job)

    await run_until(store, attempt, ready(store, 6), schedule={"max_open_groups": 6})
    assert "b" not in drawn
    await run_until(store, attempt, ready(store, 14), schedule={"max_open_groups": 14}, forget_quarantine=True)
    assert "b" in drawn and store.quarantined() == {}
    store.close()


def test_only_failures_in_a_row_lead_to_quarantine(store):
    assert not store.setup_failed("b", "no image", 2)
    store.setup_worked("b")
    assert not store.setup_failed("b", "no image", 2)
    assert store.setup_failed("b", "no image", 2)
    assert not store.setup_failed("b", "no image", 2), "and it is said once"
    store.setup_worked("b")  # a group of it was still under way
    assert store.quarantined() == {"b": "no image"}


async def test_when_all_tasks_are_quarantined_the_run_stops_with_the_reasons(store):
    async def attempt(job):
        return no_sandbox(job)

    with pytest.raises(TrainingFailed, match=r"all 3 tasks are quarantined.*does not build.*forget-quarantine"):
        await run_until(store, attempt, lambda: False, infra_window=100, quarantine_after=1)
    assert sorted(store.quarantined()) == ["a", "b", "c"]


async def test_a_sibling_that_gets_its_sandbox_shows_that_the_task_is_not_to_blame(store):
    async def attempt(job):
        return no_sandbox(job) if job.attempt < 2 and not job.rollout_id.startswith("g00000-0-") else finished(job)

    await run_until(
        store, attempt, ready(store, 1), group_size=3, max_concurrent=1, infra_retries=2, setup_tries=2, infra_window=50
    )
    assert store.fate(0)[0] == "ready"
    assert store.quarantined() == {}


async def test_tries_that_got_no_sandbox_do_not_end_what_is_on_record_of_a_task(store):
    store.setup_failed("b", "no image", 2)

    async def attempt(job):
        return finished(job, Outcome.INFRA_FAILED, None, detail="engine away", failed_stage="create")

    await run_until(store, attempt, store.drop_counts, tasks=TASKS[1:2], infra_window=200)
    assert store.setup_failed("b", "no image", 2), "the second in a row, with nothing known in between"


# -- the circuit breaker ---------------------------------------------------------------------------------------------

JOB = Job("r", 0, 0, TASKS[0])


def test_the_breaker_opens_at_its_share_of_a_full_window_and_not_before():
    breaker = Breaker(window=8, share=0.75)
    for _ in range(7):
        breaker.note(infra(JOB))
    breaker.note(finished(JOB))  # 7 of 8, but the newest shows that things work again
    with pytest.raises(TrainingFailed):
        breaker.note(infra(JOB))
    calm = Breaker(window=8, share=0.75)
    for number in range(200):
        calm.note(infra(JOB) if number % 8 < 5 else finished(JOB, Outcome.AGENT_FAILED, 0.0))


def test_a_gateway_that_was_restarted_is_no_reason_for_the_breaker_to_open():
    breaker = Breaker(window=4, share=0.5)
    for _ in range(8):  # of all rollouts of that moment
        breaker.note(infra(JOB, f"model side: {GATEWAY_RESTARTED}: it was started again"))
    for _ in range(3):
        breaker.note(infra(JOB))
    with pytest.raises(TrainingFailed):
        breaker.note(infra(JOB))


def test_the_breaker_names_the_most_frequent_reasons_and_takes_numbers_for_one():
    breaker = Breaker(window=6, share=1.0)
    with pytest.raises(TrainingFailed) as caught:
        for number in range(6):
            breaker.note(infra(JOB, f"port {number} refused" if number != 3 else "disk full"))
    said = str(caught.value)
    assert "6 of the last 6" in said and "5 x agent: port 0 refused; 1 x agent: disk full" in said
    assert "run the same command again" in said and "\n" not in said


async def test_a_run_in_which_most_rollouts_fail_stops(store):
    seen = []

    async def attempt(job):
        seen.append(job)
        return finished(job) if len(seen) % 5 == 0 else infra(job, "gateway: 502")

    with pytest.raises(TrainingFailed, match="x agent: gateway: 502"):
        await run_until(
            store, attempt, lambda: False, infra_window=10, infra_share=0.75, schedule={"max_open_groups": 9}
        )
    assert len(seen) <= 14


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_size": 4, "min_group": 5}, "min_group"),
        ({"min_group": 1}, "min_group"),
        ({"reward_weights": {"a": 1}, "reward": "x:y"}, "only one"),
        ({"reward_weights": {"a": float("nan")}}, "finite"),
        ({"infra_share": 0}, "infra_share"),
        ({"curriculum": {"low": 0.9, "high": 0.1}}, "exchange"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        RolloutConfig(**settings)

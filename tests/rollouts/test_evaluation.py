"""Evaluations: their arithmetic, when they are due, that training never sees them, and that a restart loses none."""

import asyncio
import random
import statistics
from types import SimpleNamespace

import pytest

from harness_trainer.learner.store_source import StoreGroupSource
from harness_trainer.rollouts.evaluation import mean_interval, proportion_interval, summarise
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome
from tests.rollouts.policy import TASKS, finished, infra, run_until

HELD_OUT = [SimpleNamespace(name=name) for name in ("x", "y")]
EVERY_2 = {"tasks": "-", "every": 2, "samples": 2}


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_means_are_of_tasks_and_unscored_rollouts_are_in_none():
    report = summarise({"a": [1.0, 0.5, None], "b": [0.0, None, None], "c": [None, None, None]}, pass_reward=1.0)
    assert (report.pass_at_1, report.reward_mean) == (0.25, 0.375)
    assert (report.num_tasks, report.num_scored, report.num_unscored) == (2, 3, 6)
    assert report.pass_at_1_ci[0] < 0.25 < report.pass_at_1_ci[1]
    assert "pass@1 0.250 [" in report.line and "6 unscored" in report.line


def test_nothing_scored_is_unknown_and_not_zero():
    report = summarise({"a": [None], "b": []}, pass_reward=1.0)
    assert (report.pass_at_1, report.reward_mean, report.pass_at_1_ci, report.reward_ci) == (None, None, None, None)
    assert report.num_unscored == 1 and "unknown" in report.line


def test_wilsons_interval_by_hand():
    none_of_five = proportion_interval([0.0] * 5, 5)
    assert none_of_five == pytest.approx((0.0, 0.4345), abs=1e-3), "which is not certainly 0"
    assert proportion_interval([1.0] * 5, 5) == pytest.approx((0.5655, 1.0), abs=1e-3)
    assert proportion_interval([1.0], 1)[0] == pytest.approx(0.2065, abs=1e-3)


def test_the_mean_interval_by_hand():
    assert mean_interval([0.0, 1.0]) == (pytest.approx(0.5 - 1.96 * 0.5, abs=1e-3), pytest.approx(1.48, abs=1e-3))
    assert mean_interval([0.4]) is None


@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_hold_the_truth_about_as_often_as_they_say(samples):
    """Tasks of very different difficulty: rollouts of one task are alike, and the interval must know."""
    rng, hits, rounds = random.Random(0), 0, 400
    for _ in range(rounds):
        difficulties = [rng.choice([0.1, 0.5, 0.9]) for _ in range(40)]
        rewards = {str(n): [float(rng.random() < p) for _ in range(samples)] for n, p in enumerate(difficulties)}
        low, high = summarise(rewards, 1.0).pass_at_1_ci
        hits += low <= 0.5 <= high
    assert 0.92 <= hits / rounds <= 0.985


# -- when, and on what -----------------------------------------------------------------------------------------------


def train(store, group_id, step):
    """As the learner does: the step is taken, then its policy is published."""
    store.mark_trained([group_id], step)
    store.publish(store.policy_version() + 1)


def test_due_are_the_start_every_second_step_and_the_last(store):
    due = []
    for step in range(6):
        due.append(store.due_evaluation(2, last_step=5))
        if due[-1] is not None:
            store.start_evaluation(step, [("x", "h")])
            store.finish_evaluation(step, {}, "")
        assert store.due_evaluation(2, last_step=5) is None
        store.open_group(step, "a", "h")
        train(store, step, step + 1)
    assert due == [0, None, 2, None, 4, 5]


def test_none_is_due_before_the_engine_has_the_policy(store):
    store.forget_engine()
    assert store.due_evaluation(2) is None
    store.publish(2)
    assert store.due_evaluation(2) == 0
    store.open_group(0, "a", "h")
    store.mark_trained([0], step=2)
    assert store.due_evaluation(2) is None, "the weights are on their way"
    store.publish(3)
    assert store.due_evaluation(2) == 2


async def test_evaluations_run_with_one_policy_and_training_never_sees_them(store, tmp_path):
    source = StoreGroupSource(
        tmp_path / "store.sqlite", alive=lambda: None, starved_after_s=60, evaluate_every=EVERY_2["every"]
    )
    policies, trained, steps = {}, [], 0

    async def attempt(job):
        held_out = job.group_id < 0
        assert (job.task.name in "xy") == held_out
        started = store.policy_version()
        await asyncio.sleep(0.05)
        if held_out:
            policies.setdefault(store.steps_taken(), set()).update({started, store.policy_version()})
        return finished(job, reward=float(job.task.name in "xa"))

    async def learn():
        nonlocal steps
        while steps < 5:
            group = await asyncio.to_thread(source.next_group, 0.2)
            if group is not None:
                steps += 1
                trained.append(group)
                source.on_trained([group.group_id], steps)
                source.policy_changed(steps + 1)

    learning = asyncio.ensure_future(learn())
    bounds = {"num_groups": 5, "groups_per_step": 1, "max_staleness": 1}
    await run_until(
        store,
        attempt,
        lambda: len(store.evaluations()) == 4,
        evaluation_tasks=HELD_OUT,
        evaluation=EVERY_2,
        schedule=bounds,
    )
    await learning
    source.stop()
    assert policies == {0: {1}, 2: {3}, 4: {5}, 5: {6}}
    assert [group.group_id for group in trained] == [0, 1, 2, 3, 4], "ids are those of a run without evaluations"
    assert {group.task for group in trained} <= {task.name for task in TASKS}
    reports = store.evaluations()
    assert [(report["step"], report["policy_version"]) for report in reports] == [(0, 1), (2, 3), (4, 5), (5, 6)]
    assert all((report["pass_at_1"], report["num_scored"]) == (0.5, 4) for report in reports)
    assert store.group_counts() == {"trained": 5}
    notes = [note for note in store.notes(after=0) if note.kind == "evaluation"]
    assert [note.detail["step"] for note in notes] == [0, 2, 4, 5] and "pass@1 0.500 [" in notes[0].detail["line"]


def test_the_learner_waits_while_an_evaluation_is_due_and_goes_on_after_it(store, tmp_path):
    source = StoreGroupSource(tmp_path / "store.sqlite", alive=lambda: None, starved_after_s=60, evaluate_every=2)
    store.open_group(0, "a", "h")
    store.group_ready(0)
    assert source.next_group(0.2) is None
    store.start_evaluation(0, [("x", "h")])
    assert source.next_group(0.2) is None
    store.finish_evaluation(0, {}, "")
    assert source.next_group(0.2).group_id == 0
    source.stop()


def test_the_learner_waits_for_the_next_engine_when_one_dies_before_or_in_an_evaluation(store, tmp_path):
    """That one gets the same policy from a learner that waits; nobody else may wait for it (`run` might for ever)."""
    source = StoreGroupSource(tmp_path / "store.sqlite", alive=lambda: None, starved_after_s=60, evaluate_every=2)
    store.open_group(0, "a", "h")
    store.group_ready(0)
    store.forget_engine()
    assert source.next_group(0.0) is None
    store.publish(1)
    store.start_evaluation(0, [("x", "h")])
    store.forget_engine()
    assert source.next_group(0.0) is None
    assert store.due_evaluation(2) is None
    store.publish(1)
    assert store.due_evaluation(2) == 0
    store.finish_evaluation(0, {}, "")
    store.forget_engine()
    assert source.next_group(0.0).group_id == 0, "nothing is measured now"
    source.stop()


async def test_a_restart_continues_an_evaluation_and_runs_only_what_is_missing(tmp_path):
    path = tmp_path / "store.sqlite"
    store = RolloutStore(path)
    store.publish(1)
    gate = asyncio.Event()

    async def first_life(job):
        if not job.rollout_id.startswith("e00001-0-"):
            await gate.wait()
        return finished(job, reward=0.0)

    def one_is_done():
        return bool(store.results_by_slot(-1))

    settings = {"evaluation_tasks": HELD_OUT, "evaluation": EVERY_2, "max_concurrent": 4}
    await run_until(store, first_life, one_is_done, **settings)
    store.close()

    store, ran = RolloutStore(path), []

    async def second_life(job):
        ran.append(job)
        return finished(job)

    await run_until(store, second_life, lambda: store.evaluations(), **settings)
    assert sorted(job.rollout_id[:8] for job in ran if job.group_id < 0) == ["e00001-1", "e00002-0", "e00002-1"]
    (report,) = store.evaluations()
    assert (report["step"], report["num_scored"], report["reward_mean"]) == (0, 4, 0.75)
    assert store.drop_counts() == {}
    store.close()


async def test_steps_that_are_taken_again_are_evaluated_again(store):
    for step in (1, 2):
        store.open_group(step - 1, "a", "h")
        train(store, step - 1, step)
    store.start_evaluation(2, [("x", "h")])
    store.finish_evaluation(2, {"old": True}, "old")
    store.rewind(1)
    assert store.evaluations() == [] and store.evaluation_groups(2) == []
    train(store, 1, 2)
    assert store.due_evaluation(2) == 2
    store.start_evaluation(2, [("x", "h")])
    ((group_id, task, harness, over),) = store.evaluation_groups(2)
    assert (group_id, task, harness, over) == (-2, "x", "h", False)
    assert store.next_group_id() == 2


async def test_an_evaluation_that_ends_after_the_learner_has_gone_back_behind_its_step_is_none(store):
    store.open_group(0, "a", "h")
    train(store, 0, 1)
    store.start_evaluation(1, [("x", "h")])
    store.rewind(0)
    store.finish_evaluation(1, {"old": True}, "old")
    assert store.evaluations() == [] and store.notes(0) == []


async def test_an_evaluation_under_way_when_the_learner_goes_back_has_no_part_in_the_next_one(store):
    """Its step had no checkpoint. What its agents still come to is of a policy that is no more."""
    for step in (1, 2):
        store.open_group(step - 1, "a", "h")
        train(store, step - 1, step)
    is_old, going_on = True, asyncio.Event()

    async def attempt(job):
        if is_old:
            await going_on.wait()
            return finished(job, reward=1.0)
        return finished(job, reward=0.0)

    def learner():
        nonlocal is_old
        num_at_work = len(store.unfinished_rollouts())
        if num_at_work == 2 and not going_on.is_set():  # it was killed, and its successor settles
            store.rewind(1)
            going_on.set()
        elif num_at_work == 0 and going_on.is_set() and is_old:
            is_old = False
            train(store, 1, 2)
        return bool(store.evaluations())

    settings = {"evaluation_tasks": HELD_OUT, "evaluation": {**EVERY_2, "samples": 1}}
    await run_until(store, attempt, learner, schedule={"num_groups": 2}, **settings)
    (report,) = store.evaluations()
    assert (report["step"], report["policy_version"], report["num_scored"], report["reward_mean"]) == (2, 4, 2, 0.0)
    assert [store.fate(group_id)[0] for group_id in (-1, -2, -3, -4)] == ["dropped"] * 2 + ["evaluated"] * 2
    assert store.outcome_counts() == {"ok": 4}, "every attempt has its end"


async def test_rollouts_that_infra_spoils_are_tried_again_and_then_counted_as_unscored(store):
    async def attempt(job):
        return infra(job) if job.task.name == "y" else finished(job, Outcome.TRUNCATED, 1.0)

    await run_until(
        store,
        attempt,
        lambda: store.evaluations(),
        evaluation_tasks=HELD_OUT,
        evaluation=EVERY_2,
        infra_window=99,
        infra_retries=1,
        max_refills=0,
    )
    (report,) = store.evaluations()
    assert (report["num_scored"], report["num_unscored"], report["pass_at_1"]) == (2, 2, 1.0)
    assert report["reward_ci"] is None and statistics.fmean([report["reward_mean"]]) == 1.0

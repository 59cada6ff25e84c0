"""What failures of a reward function lead to: rests, and a run that ends for a function, not for an outage."""

import asyncio

import pytest

from harness_trainer.errors import TrainingFailed
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.failures import OUTAGE_S, ScoringBreaker
from harness_trainer.rollouts.group import Group
from harness_trainer.rollouts.needs import Needs
from harness_trainer.rollouts.slots import Slots
from harness_trainer.rollouts.sources import OpenSource, Sources
from harness_trainer.rollouts.types import Job
from tests.rollouts.policy import TASKS, finished, first_error

JOB = Job("r", 0, 0, TASKS[0])
SCORED = finished(JOB)
UNSCORED = finished(JOB, reward=None, findings=["reward: warning reward_failed: mine.py:reward raised TypeError: 5"])


class Clock:
    """Time passes only where somebody sleeps."""

    def __init__(self):
        self.now = 1000.0
        self.waits = []

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Judge:
    """Scores groups, and what each try comes to where rewards compare nobody."""

    def __init__(self, works):
        self.works = works
        self.num_calls = 0

    async def attempt(self, job):
        self.num_calls += 1
        return finished(job) if self.works() else finished(job, reward=None, findings=list(UNSCORED.findings))

    async def score(self, results):
        self.num_calls += 1
        works = self.works()
        for result in results:
            result.awaits_group, result.reward = False, 1.0 if works else None
            result.findings += [] if works else UNSCORED.findings

    async def drop(self, results):
        pass


async def awaiting(job):
    return finished(job, reward=None, awaits_group=True)


async def fill(store, clock, judge, *, size, together, num_groups):
    """Groups one after the other; gives them."""
    config = RolloutConfig(group_size=size, max_concurrent=4)
    attempt, scores = (awaiting, judge) if together else (judge.attempt, None)
    sources = Sources([OpenSource(config, TASKS, attempt, lambda *_: "h", group_scores=scores)])
    needs = Needs(sources.plan)
    slots = Slots(config, store, sources, needs, engine_version=lambda: 1, sleep=clock.sleep, clock=clock)
    groups = [Group(number, TASKS[0], "h", size) for number in range(num_groups)]
    try:
        for group in groups:
            store.open_group(group.group_id, "a", "h")
            await slots.fill(group)
    except BaseExceptionGroup as error:
        raise first_error(error) from error
    return groups


def test_one_call_counts_once_whatever_it_leaves_unscored():
    clock = Clock()
    calls = ScoringBreaker(4, clock=clock)
    for _ in range(3):
        calls.note([UNSCORED] * 16)
        clock.now += OUTAGE_S
    with pytest.raises(TrainingFailed, match=r"failed 4 times in a row, for 15 min: 4 x reward_failed: mine.py:reward"):
        calls.note([UNSCORED] * 16)


@pytest.mark.parametrize("scored", [[SCORED], [UNSCORED, SCORED], [finished(JOB, reward=None)]])
def test_a_call_that_works_ends_the_row(scored):
    clock = Clock()
    calls = ScoringBreaker(2, clock=clock)
    assert not calls.note([UNSCORED])
    for _ in range(20):
        clock.now += OUTAGE_S
        assert not calls.note(scored), "a reward left out on purpose is none that failed"
        assert not calls.note([UNSCORED])
    assert calls.note([UNSCORED]), "two in a row"


def test_a_hundred_calls_that_meet_one_moment_of_an_outage_end_no_run():
    clock = Clock()
    calls = ScoringBreaker(12, clock=clock)
    for _ in range(100):
        calls.note([UNSCORED])
    clock.now += OUTAGE_S - 1
    calls.note([UNSCORED])
    clock.now += 1
    with pytest.raises(TrainingFailed, match="failed 102 times in a row, for 5 min"):
        calls.note([UNSCORED])


async def test_one_failed_call_of_a_large_groups_reward_function_costs_that_group_only(store):
    clock = Clock()
    answers = iter([True, True, False, True])
    judge = Judge(lambda: next(answers))
    groups = await fill(store, clock, judge, size=16, together=True, num_groups=4)
    assert [group.num_scored for group in groups] == [16, 16, 0, 16]
    assert clock.waits == [], "one failure may be bad luck"


@pytest.mark.parametrize("together", [False, True])
async def test_a_reward_function_that_always_raises_ends_the_run_within_minutes_and_says_why(store, together):
    clock = Clock()
    judge = Judge(lambda: False)
    with pytest.raises(TrainingFailed, match=r"reward function failed \d+ times in a row.*reward_failed: mine.py:rew"):
        await fill(store, clock, judge, size=4, together=together, num_groups=100)
    assert OUTAGE_S <= clock.now - 1000 <= 2 * OUTAGE_S
    assert 12 <= judge.num_calls <= 60, "and few rollouts were spent on it"
    assert [note.kind for note in store.notes(after=0)] == ["reward_failed"]


@pytest.mark.parametrize("together", [False, True])
async def test_an_outage_of_a_judge_for_some_minutes_is_outlived(store, together):
    clock = Clock()
    judge = Judge(lambda: clock.now >= 1240)
    groups = await fill(store, clock, judge, size=4, together=together, num_groups=20)
    assert not groups[0].num_scored and groups[-1].num_scored == 4
    assert 8 <= len(clock.waits) <= 14 and max(clock.waits) <= 60, "they double, as those of infra failures do"


async def test_while_a_reward_function_rests_nothing_of_its_source_begins_and_others_have_the_places(store):
    resting, over, begun, answers = asyncio.Event(), asyncio.Event(), [], iter([False, False])

    async def attempt(job):
        begun.append(job.task.name)
        works = job.task.name == "b" or next(answers, True)
        return finished(job) if works else finished(job, reward=None, findings=list(UNSCORED.findings))

    async def sleep(seconds):
        resting.set()
        await over.wait()

    config = RolloutConfig(group_size=2, max_concurrent=1)
    sources = Sources([OpenSource(config, [task], attempt, lambda *_: "h", task.name) for task in TASKS[:2]])
    slots = Slots(config, store, sources, Needs(sources.plan), engine_version=lambda: 1, sleep=sleep)
    a, b = TASKS[:2]
    judged, later, other = (Group(number, task, "h", 2) for number, task in enumerate((a, a, b)))
    for group in (judged, later, other):
        store.open_group(group.group_id, group.task.name, "h")
    async with asyncio.timeout(10), asyncio.TaskGroup() as running:
        running.create_task(slots.fill(judged))
        await resting.wait()
        running.create_task(slots.fill(later))
        await slots.fill(other)
        await asyncio.sleep(0.1)
        assert begun == ["a", "a", "b", "b"]
        over.set()
    assert judged.num_scored == later.num_scored == 2 and begun.count("a") == 6

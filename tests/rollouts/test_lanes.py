"""Which replica of the engine a rollout is pinned to."""

import asyncio
from types import SimpleNamespace

import pytest

from harness_trainer.rollouts import lanes as room
from harness_trainer.rollouts.lanes import Lane, Lanes, shares
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult

TASK = SimpleNamespace(name="moon")


class Attempts:
    """Rollouts that run until they are let go, each noted with the lane that it began in."""

    def __init__(self, monkeypatch, num_lanes, serving):
        self.at = {}
        self.ending = {}
        self.serving = serving
        self.lanes = [
            Lane(SimpleNamespace(replica=n), None, None, None, None, {("", "h"): n}) for n in range(num_lanes)
        ]
        self.which = Lanes(self.lanes, lambda: self.serving)
        monkeypatch.setattr(room, "run_rollout", self._run)

    async def _run(self, job, means):
        self.at[job.rollout_id] = means
        await self.ending.setdefault(job.rollout_id, asyncio.Event()).wait()
        return RolloutResult(job.rollout_id, 0, "moon", "h", 0, Outcome.OK, 1.0)

    async def begin(self, name, taken=None):
        job = Job(name, 0, 0, TASK, harness="h", taken=taken)
        running = asyncio.create_task(self.which.attempt("")(job))
        while name not in self.at:
            await asyncio.sleep(0.001)
        return running

    async def end(self, name, running):
        self.ending[name].set()
        await running


@pytest.fixture
def attempts(monkeypatch):
    return lambda num_lanes, serving: Attempts(monkeypatch, num_lanes, serving)


async def test_a_rollout_begins_where_the_fewest_are_open(attempts):
    runs = attempts(2, {0, 1})
    running = {name: await runs.begin(name) for name in "abc"}
    assert runs.at == {"a": 0, "b": 1, "c": 0}
    await runs.end("a", running["a"])
    await runs.end("c", running["c"])
    assert [lane.num_open for lane in runs.lanes] == [0, 1]
    for name in "def":
        await runs.begin(name)
    assert sorted(runs.at[name] for name in "def") == [0, 0, 1] and runs.at["d"] == 0
    assert sum(lane.num_open for lane in runs.lanes) == 4 and runs.lanes[0].num_open == 2


async def test_a_replica_without_a_policy_gets_nothing_new(attempts):
    runs = attempts(3, {0, 2})
    for name in "abcd":
        await runs.begin(name)
    assert sorted(runs.at.values()) == [0, 0, 2, 2]
    runs.serving = {1}
    await runs.begin("e")
    assert runs.at["e"] == 1
    runs.serving = set()  # all are being started again: it waits wherever it is
    await runs.begin("f")
    assert runs.at["f"] == 1


async def test_a_rollout_that_is_gone_on_with_stays_with_its_replica(attempts):
    runs = attempts(2, {0})
    taken = SimpleNamespace(facts=SimpleNamespace(replica=1))
    await runs.begin("a", taken)
    assert runs.at["a"] == 1 and [lane.num_open for lane in runs.lanes] == [0, 1]


async def test_a_cancelled_rollout_is_open_no_more(attempts):
    runs = attempts(2, {0, 1})
    sealed = []

    class Admin:
        async def seal(self, session_id):
            sealed.append(session_id)

    for lane in runs.lanes:
        lane.admin = Admin()
    running = await runs.begin("a")
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled() and sealed == ["a"] and runs.lanes[0].num_open == 0


def test_what_is_started_ahead_of_need_is_shared_out():
    assert shares(5, 2) == [3, 2] and shares(0, 3) == [0, 0, 0] and shares(2, 3) == [1, 1, 0] and shares(7, 1) == [7]

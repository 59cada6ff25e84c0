"""A continued run whose agents are called otherwise: what the old ones began is dropped, and others take its place."""

from types import SimpleNamespace

import pytest

from harness_trainer.audit.groups import one_fate
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.sources import OpenSource
from harness_trainer.rollouts.stored import read_stored
from harness_trainer.rollouts.types import Job
from tests.rollouts.policy import TASKS, finished, ready, run_sources
from tests.rollouts.test_evaluation import EVERY_2, HELD_OUT

GONE = ("dropped", "agent_gone")


@pytest.fixture
def ran(store):
    return []


async def continued(store, ran, done, *, agents, **settings):
    async def attempt(job):
        ran.append((job.group_id, job.task.name, job.harness))
        if agents is not None and job.harness not in agents:
            raise KeyError("", job.harness)  # as where rollouts are run
        return finished(job)

    config = RolloutConfig(group_size=2, max_concurrent=4, **settings)
    held_out = HELD_OUT if settings else ()
    evaluated = [("x", "new"), ("y", "kept")] if settings else None
    source = OpenSource(
        config, TASKS, attempt, lambda *_: "new", evaluation_tasks=held_out, evaluated=evaluated, agents=agents
    )
    await run_sources(store, [source], done, config=config)


async def test_another_group_takes_the_place_of_one_whose_agent_has_left_the_run(store, ran, tmp_path):
    store.open_group(0, "a", "old")
    store.open_group(1, "b", "kept")
    await continued(store, ran, ready(store, 2), agents={"new", "kept"})
    assert store.fate(0) == GONE and store.drop_counts() == {"agent_gone": 1}
    assert {(group, agent) for group, _, agent in ran} == {(1, "kept"), (2, "new")}
    (note,) = store.notes(after=0)
    assert note.kind == "agent_gone" and "group 0 (a) is dropped: its agent 'old'" in note.detail["line"]
    assert list(one_fate(SimpleNamespace(stored=read_stored(tmp_path / "store.sqlite")))) == []


async def test_a_source_whose_one_agent_was_renamed_meanwhile_goes_on(store, ran):
    store.open_group(0, "a", "EchoEnv")
    await continued(store, ran, ready(store, 1), agents=None)
    assert store.fate(0)[0] == "ready" and (0, "a", "EchoEnv") in ran


async def test_in_an_evaluation_the_task_is_given_to_the_agent_that_has_it_now(store, ran):
    store.start_evaluation(0, [("x", "old"), ("y", "old"), ("y", "kept")])
    task = HELD_OUT[1]
    for slot in (0, 1):  # what is over counts, whoever it was
        store.start_rollout(f"r{slot}", -2, slot, 0)
        store.finish_rollout(finished(Job(f"r{slot}", -2, 0, task, harness="old"), reward=0.0), final=True)
    store.group_evaluated(-2)
    await continued(store, ran, store.evaluations, agents={"new", "kept"}, evaluation=EVERY_2)
    assert [store.fate(group_id) for group_id in (-1, -2, -3, -4)] == [GONE, *[("evaluated", None)] * 3]
    assert {each for each in ran if each[0] < 0} == {(-3, "y", "kept"), (-4, "x", "new")}
    (report,) = store.evaluations()
    assert (report["num_tasks"], report["num_scored"]) == (2, 6) and store.notes(after=0)[0].kind == "agent_gone"


async def test_an_evaluated_group_that_nobody_has_now_is_dropped_alone(store, ran):
    store.start_evaluation(0, [("x", "old"), ("x", "new"), ("y", "kept")])
    await continued(store, ran, store.evaluations, agents={"new", "kept"}, evaluation=EVERY_2)
    assert {each for each in ran if each[0] < 0} == {(-2, "x", "new"), (-3, "y", "kept")}
    store.replace_evaluated(-2, "agent_gone", "kept")
    assert store.fate(-2) == ("evaluated", None), "it is over"

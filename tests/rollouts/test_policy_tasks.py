"""Which task is drawn, what a rollout's named rewards sum up to, and what a person is told at the end."""

from collections import Counter

import pytest

from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.curriculum import Curriculum, task_of_group, weight_of
from harness_trainer.rollouts.policy_config import CurriculumConfig
from harness_trainer.rollouts.scoring import weigh
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.summary import summary_lines
from harness_trainer.rollouts.types import Job
from tests.rollouts.policy import TASKS, finished, infra, ready, run_until


def fill(store, group_id, task, rewards, state="ready"):
    store.open_group(group_id, task, "h")
    for slot, reward in enumerate(rewards):
        job = Job(f"g{group_id}-{slot}", group_id, 0, TASKS["abc".index(task)], harness="h")
        store.start_rollout(job.rollout_id, group_id, slot, 0)
        store.finish_rollout(infra(job) if reward is None else finished(job, reward=reward), final=True)
    if state != "running":
        store.group_ready(group_id)


# -- curriculum ------------------------------------------------------------------------------------------------------


def test_pass_rates_are_of_the_newest_groups_and_of_scored_rollouts_only(store):
    fill(store, 0, "a", [1.0, 1.0])
    fill(store, 1, "a", [0.0, 0.5])
    fill(store, 2, "a", [1.0, None])
    fill(store, 3, "b", [None, None])
    fill(store, 4, "c", [0.7, 0.2], state="running")
    assert store.pass_rates(1.0, window=2) == {"a": pytest.approx(1 / 3)}
    assert store.pass_rates(0.5, window=2) == {"a": pytest.approx(2 / 3)}
    assert store.pass_rates(1.0, window=9) == {"a": pytest.approx(3 / 5)}


def test_weights():
    config = CurriculumConfig(by="pass_rate", low=0.2, high=0.8, outside=0.05)
    assert [weight_of(rate, config) for rate in (None, 0.0, 0.2, 0.5, 0.8, 1.0)] == [1, 0.05, 1, 1, 1, 0.05]


def test_tasks_between_the_bounds_are_drawn_more_often_and_the_others_now_and_then(store):
    fill(store, 0, "a", [1.0, 1.0, 1.0])
    fill(store, 1, "b", [0.0, 1.0, 0.0])
    config = RolloutConfig(curriculum={"by": "pass_rate", "outside": 0.1})
    drawn = Counter(Curriculum(config, TASKS, store).draw(group).name for group in range(2, 2102))
    assert drawn["b"] == pytest.approx(1000, rel=0.1) and drawn["c"] == pytest.approx(1000, rel=0.1)
    assert drawn["a"] == pytest.approx(100, rel=0.4)


def test_a_restart_draws_the_same_tasks(store, tmp_path):
    fill(store, 0, "a", [1.0, 0.0])
    fill(store, 1, "b", [0.0, 0.0])
    config = RolloutConfig(seed=3, curriculum={"by": "pass_rate"})
    again = RolloutStore(tmp_path / "store.sqlite")
    drawn, redrawn = (
        [Curriculum(config, TASKS, one).draw(group).name for group in range(2, 42)] for one in (store, again)
    )
    again.close()
    assert drawn == redrawn and len(set(drawn)) == 3


def test_by_default_every_task_comes_once_per_pass_also_without_the_quarantined(store):
    curriculum = Curriculum(RolloutConfig(), TASKS, store)
    assert [curriculum.draw(n).name for n in range(9)] == [task_of_group(n, TASKS, 0).name for n in range(9)]
    store.setup_failed("b", "no image", 1)
    passes = [{curriculum.draw(2 * n + i).name for i in range(2)} for n in range(5)]
    assert passes == [{"a", "c"}] * 5


# -- partial credit --------------------------------------------------------------------------------------------------

JOB = Job("r", 0, 0, TASKS[0], harness="h")


def test_named_rewards_are_weighed_into_one():
    result = finished(JOB, reward=1.0, rewards={"tests": 0.5, "style": 1.0, "speed": 9.0})
    weigh(result, {"tests": 0.8, "style": 0.2})
    assert result.reward == pytest.approx(0.6) and result.findings == []
    weigh(result, {})
    assert result.reward == pytest.approx(0.6), "no weights, no change"


def test_a_missing_part_leaves_the_rollout_unscored_and_says_so():
    result = finished(JOB, reward=1.0, rewards={"tests": 0.5})
    weigh(result, {"tests": 0.8, "style": 0.2})
    assert result.reward is None
    (finding,) = result.findings
    assert finding == "reward: warning reward_missing: the tests gave no style to weigh (named rewards: tests)"


def test_what_was_not_scored_stays_so():
    result = infra(JOB, rewards={})
    weigh(result, {"tests": 1.0})
    assert result.reward is None and result.findings == []


async def test_the_weighed_reward_is_what_the_learner_gets(store):
    async def attempt(job):
        return finished(job, reward=1.0, rewards={"tests": 0.5, "style": 0.0})

    await run_until(store, attempt, ready(store, 1), reward_weights={"tests": 0.5, "style": 0.5})
    assert [r.reward for r in store.take_ready(set()).results] == [0.25, 0.25]


# -- what a person is told -------------------------------------------------------------------------------------------


def test_the_summary_says_what_was_evaluated_quarantined_and_dropped(store):
    store.open_group(0, "a", "h")
    store.mark_dropped(0, "no_spread")
    fill(store, 1, "a", [0.0, None])
    store.setup_failed("b", "no image", 1)
    store.start_evaluation(0, [("c", "h")])
    store.finish_evaluation(0, {"pass_at_1": 0.25}, "evaluation after step 0: pass@1 0.250")
    assert summary_lines(store) == [
        "evaluation after step 0: pass@1 0.250",
        "task b is quarantined, because nothing could be set up for it: no image",
        "1 groups were dropped and replaced: no_spread 1",
        "rollouts: 1 infra_failed, 1 ok",
    ]


def test_an_evaluation_whose_step_is_taken_again_is_in_no_summary(store):
    for group, step in ((0, 1), (1, 2)):
        fill(store, group, "a", [1.0, 0.0])
        store.mark_trained([group], step)
        store.publish(step + 1)
        store.start_evaluation(step, [("c", "h")])
        store.finish_evaluation(step, {}, f"evaluation after step {step}")
    store.rewind(1)
    assert [line for line in summary_lines(store) if "evaluation" in line] == ["evaluation after step 1"]

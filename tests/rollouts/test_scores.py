"""What rollouts came to, by agent and task: what is unscored is no failure, and pass@k is not the best of k seen."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_trainer.rollouts.evaluation import summarise
from harness_trainer.rollouts.scores import pass_at, scores, stored_scores
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult


def result(harness, task, reward, outcome=Outcome.OK, n=itertools.count()):  # noqa: B008
    return RolloutResult(f"r{next(n)}", -1, task, harness, 0, outcome, reward)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_pass(numbers):
    num, passed, k = numbers
    rollouts = [True] * passed + [False] * (num - passed)
    choices = list(itertools.combinations(rollouts, k))
    assert pass_at(k, num, passed) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_of_fewer_than_k_is_unknown():
    assert pass_at(4, 3, 3) is None
    assert pass_at(1, 3, 1) == pytest.approx(1 / 3)


def test_one_task_and_all_tasks_of_each_agent():
    found = scores(
        [
            *[result("pi", "moon", reward) for reward in (1.0, 0.0, 0.5, 1.0)],
            *[result("pi", "star", reward) for reward in (0.0, 0.0, 0.0, 0.0)],
            result("codex", "moon", 1.0, Outcome.TRUNCATED),
        ],
        k=2,
        pass_reward=1.0,
    )
    moon, star, pi, codex = found
    assert [(s.harness, s.task) for s in found] == [("pi", "moon"), ("pi", "star"), ("pi", None), ("codex", "moon")]
    assert (moon.pass_at_1, star.pass_at_1, pi.pass_at_1) == (0.5, 0.0, 0.25)
    assert moon.pass_at_k == pytest.approx(1 - 1 / 6) and star.pass_at_k == 0 and pi.pass_at_k == pytest.approx(5 / 12)
    assert (moon.reward_mean, pi.reward_mean) == (0.625, 0.3125)
    assert star.pass_at_1_ci[0] == 0 and 0 < star.pass_at_1_ci[1] < 1, "none of four is not never"
    assert pi.num_scored == 8 and pi.outcomes == {"ok": 8} and codex.outcomes == {"truncated": 1}
    assert codex.pass_at_k is None and codex.reward_ci is None, "one rollout says nothing of two"


def test_all_tasks_of_an_agent_come_to_what_an_evaluation_says():
    rewards = {"moon": [1.0, 0.0, None], "star": [1.0, 1.0, 1.0], "sun": [0.0, 0.5, 0.0]}
    found = scores([result("pi", t, r) for t, rs in rewards.items() for r in rs], k=1, pass_reward=1.0)[-1]
    report = summarise(rewards, 1.0)
    assert (found.pass_at_1, found.pass_at_1_ci) == (report.pass_at_1, report.pass_at_1_ci)
    assert (found.reward_mean, found.reward_ci) == (report.reward_mean, report.reward_ci)
    assert (found.num_scored, found.num_unscored) == (report.num_scored, report.num_unscored) == (8, 1)


def test_what_could_not_be_scored_is_in_no_mean():
    lost = [result("pi", "moon", None, Outcome.INFRA_FAILED) for _ in range(3)]
    (nothing,) = scores(lost, k=1, pass_reward=1.0)
    assert nothing.pass_at_1 is nothing.reward_mean is nothing.pass_at_1_ci is nothing.pass_at_k is None
    assert (nothing.num_scored, nothing.num_unscored) == (0, 3)
    moon, star, both = scores([*lost, result("pi", "star", 1.0)], k=1, pass_reward=1.0)
    assert (moon.num_unscored, star.pass_at_1) == (3, 1.0)
    assert (both.pass_at_1, both.reward_mean, both.num_scored, both.num_unscored) == (1.0, 1.0, 1, 3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=6), min_size=2, max_size=5))
def test_every_interval_holds_its_share_and_stays_between_0_and_1(rewards):
    results = [result("pi", f"t{n}", r) for n, of_task in enumerate(rewards) for r in of_task]
    for score in scores(results, k=1, pass_reward=1.0):
        assert score.num_scored + score.num_unscored == sum(score.outcomes.values())
        if score.pass_at_1_ci is not None:
            low, high = score.pass_at_1_ci
            assert 0 <= low <= score.pass_at_1 + 1e-9 and score.pass_at_1 - 1e-9 <= high <= 1
            assert math.isfinite(low) and math.isfinite(high)


def test_only_the_evaluation_that_is_asked_for_counts(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.announce(1)
    store.publish(1)
    store.start_evaluation(0, [("moon", "pi"), ("moon", "codex")])
    for (group_id, task, harness, _), reward in zip(store.evaluation_groups(0), (1.0, 0.0), strict=True):
        store.start_rollout(f"e{group_id}", group_id, 0, 0)
        done = RolloutResult(f"e{group_id}", group_id, task, harness, 0, Outcome.OK, reward)
        store.finish_rollout(done, final=True)
    store.open_group(0, "moon", "pi")
    store.start_rollout("g0", 0, 0, 0)
    store.finish_rollout(RolloutResult("g0", 0, "moon", "pi", 0, Outcome.OK, 1.0), final=True)
    found = stored_scores(store, 0, 1, 1.0)
    assert [(s.harness, s.pass_at_1, s.num_scored) for s in found] == [("pi", 1.0, 1), ("codex", 0.0, 1)]
    assert stored_scores(store, 10, 1, 1.0) == []
    store.close()

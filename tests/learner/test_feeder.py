"""Groups become steps: one reward per rollout, whole groups, drops with reasons, no endless wait."""

import math
from collections import deque

import pytest

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.feeder import FeederOptions, GroupFeeder
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.learner.rows import Row
from harness_trainer.rollouts.lineage import Lineage, PolicyVersion
from harness_trainer.rollouts.types import Outcome, RolloutResult


class Source:
    """A source with a fixed list of groups; it is out of work, hence unhealthy, when they are used up."""

    def __init__(self, *groups):
        self.groups = deque(groups)
        self.dropped = []
        self.trained = []
        self.versions = []
        self.empty_polls = 0
        self.tree = Lineage()

    def start(self): ...
    def stop(self): ...

    def next_group(self, timeout_s):
        return self.groups.popleft() if self.groups else None

    def lineage(self):
        return self.tree

    def on_trained(self, group_ids, step):
        self.trained.append((list(group_ids), step))

    def on_dropped(self, group_id, reason):
        self.dropped.append((group_id, str(reason)))

    def policy_changed(self, version):
        self.versions.append(version)

    def check_health(self):
        if not self.groups:
            raise TrainingFailed("the rollout runner is gone: see its log")


def row(version=1, num_prompt=2, num_sampled=3):
    n = num_prompt + num_sampled
    return Row(
        ids_N=list(range(n)),
        mask_N=[0] * num_prompt + [1] * num_sampled,
        logprobs_N=[0.0] * num_prompt + [-1.0] * num_sampled,
        versions_N=[-1] * num_prompt + [version] * num_sampled,
        turn_ids=["t"],
    )


def group(group_id, rewards, rows=None):
    results = [
        RolloutResult(f"r{group_id}-{i}", group_id, "task", "h", 0, Outcome.OK, reward)
        for i, reward in enumerate(rewards)
    ]
    return TrainGroup(group_id, "task", results, [[row()] for _ in rewards] if rows is None else rows)


def feeder(source, objective=None, **changes):
    options = {"groups_per_step": 1, "token_budget": 100, "max_staleness": 2}
    objective = ObjectiveConfig(**({"advantage": "group_mean"} | (objective or {})))
    fed = GroupFeeder(source, FeederOptions(**(options | changes), objective=objective))
    fed.update_model_version(1)
    return fed


def test_the_baseline_counts_a_rollout_once_however_many_rows_it_has():
    source = Source(group(0, [1.0, 0.0], rows=[[row(), row(), row()], [row()]]))
    batch = feeder(source).next_step()
    assert [sample["advantage"] for sample in batch.samples] == [0.5, 0.5, 0.5, -0.5]
    assert batch.rewards == [1.0, 0.0]
    assert batch.num_trained_tokens == 12


def test_forty_rows_of_one_rollout_leave_the_advantages_alone():
    source = Source(group(0, [1.0, 0.0], rows=[[row() for _ in range(40)], [row()]]))
    assert {s["advantage"] for s in feeder(source).next_step().samples} == {0.5, -0.5}


def test_an_unscored_rollout_is_left_out_and_does_not_lower_the_mean():
    batch = feeder(Source(group(0, [1, 3, 2, None]))).next_step()
    assert [sample["advantage"] for sample in batch.samples] == [-1, 1, 0]
    assert batch.reward_mean == 2


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (group(0, [None] * 4), "too_few_rewards"),
        (group(0, [0.5, None, None]), "too_few_rewards"),
        (group(0, [1, 1, 1, 1]), "no_spread"),
        (group(0, [1, 0], rows=[[], []]), "no_trainable_rows"),
        (group(0, [1, 0, 0.5], rows=[[], [], [row()]]), "no_trainable_rows"),
        (group(0, [1, 0], rows=[[row(num_prompt=99)], [row()]]), "over_token_budget"),
        (group(0, [1, 0], rows=[[row(version=-2)], [row()]]), "stale"),
    ],
)
def test_a_group_that_cannot_be_trained_is_dropped_whole_and_counted(bad, reason):
    source = Source(bad, group(1, [1, 0]))
    batch = feeder(source).next_step()
    assert batch.group_ids == [1]
    assert source.dropped == [(0, reason)]
    assert batch.dropped == {reason: 1}


def test_staleness_is_taken_from_the_oldest_trained_token():
    source = Source(group(0, [1, 0], rows=[[row(version=3)], [row(version=5)]]))
    fed = feeder(source)
    fed.update_model_version(5)
    assert fed.next_step().staleness == [2, 0]
    assert source.versions == [1, 5]


@pytest.mark.parametrize(("sampled", "age"), [(2, 0), (5, 0), (1, 1), (3, 1), (4, 2)])
def test_after_a_resume_age_is_counted_in_steps_and_not_in_numbers(sampled, age):
    """v1 to v4 are steps 0 to 3; the learner died and went on from v2, whose weights v5 are."""
    for limit in (0, 1, 2):
        source = Source(group(0, [1, 0], rows=[[row(version=sampled)], [row(version=5)]]), group(1, [1, 0]))
        source.groups[1].rows = [[row(version=5)], [row(version=5)]]
        source.tree = Lineage([PolicyVersion(n, n - 1, n - 1) for n in range(1, 5)] + [PolicyVersion(5, 1, 2)])
        fed = feeder(source, max_staleness=limit)
        fed.update_model_version(5)
        batch = fed.next_step()
        assert (batch.group_ids, batch.staleness) == (([0], [age, 0]) if age <= limit else ([1], [0, 0]))
        assert source.dropped == ([] if age <= limit else [(0, "stale")])


def test_a_row_that_spans_an_update_is_as_old_as_its_most_distant_token():
    spanning = row(version=5)
    spanning.versions_N[-1] = 4  # from the branch that died
    spanning.versions_N[0] = 99  # not trained: no token of it counts
    source = Source(group(0, [1, 0], rows=[[spanning], [row(version=5)]]))
    source.tree = Lineage([PolicyVersion(n, n - 1, n - 1) for n in range(1, 5)] + [PolicyVersion(5, 1, 2)])
    fed = feeder(source)
    fed.update_model_version(5)
    assert fed.next_step().staleness == [2, 0]


def test_only_stale_groups_end_the_run_with_the_reason_instead_of_waiting_for_ever():
    source = Source(*[group(i, [1, 0], rows=[[row(version=-9)], [row()]]) for i in range(10)])
    with pytest.raises(TrainingFailed, match=r"4 groups in a row .*stale 4.*max_staleness"):
        feeder(source, max_dropped_in_a_row=4).next_step()
    assert len(source.dropped) == 4


def test_drops_between_trained_groups_never_add_up_to_the_limit():
    groups = [group(i, [1, 1] if i % 2 else [1, 0]) for i in range(9)]
    batch = feeder(Source(*groups), groups_per_step=5, max_dropped_in_a_row=2).next_step()
    assert batch.group_ids == [0, 2, 4, 6, 8]
    assert batch.dropped == {"no_spread": 4}


def test_a_dead_source_ends_the_wait_with_its_own_error():
    with pytest.raises(TrainingFailed, match="rollout runner is gone"):
        feeder(Source(group(0, [1, 0])), groups_per_step=2).next_step()


@pytest.mark.parametrize("reward", [math.nan, math.inf, True, "1"])
def test_a_reward_that_is_no_number_is_refused_with_the_rollout_id(reward):
    with pytest.raises(TrainingFailed, match="rollout r0-1 "):
        feeder(Source(group(0, [1, reward, 0]))).next_step()


def cut(group_, *indices):
    """The same group with these rollouts ended by a limit."""
    for index in indices:
        group_.results[index].outcome = Outcome.TRUNCATED
    return group_


def test_a_masked_truncated_rollout_is_not_trained_but_its_reward_counts():
    source = Source(cut(group(0, [1.0, 0.0, 0.5, 0.5]), 1))
    batch = feeder(source, {"truncated": "mask"}).next_step()
    assert [sample["advantage"] for sample in batch.samples] == [0.5, 0, 0]
    assert batch.num_masked == 1 and batch.rewards == [1.0, 0.0, 0.5, 0.5]


def test_a_truncated_rollout_is_trained_like_others_unless_told_otherwise():
    batch = feeder(Source(cut(group(0, [1.0, 0.0]), 1))).next_step()
    assert [sample["advantage"] for sample in batch.samples] == [0.5, -0.5]
    assert batch.num_masked == 0


def test_a_penalty_comes_before_the_baseline_and_not_into_the_reported_rewards():
    source = Source(cut(group(0, [1.0, 1.0]), 1))
    batch = feeder(source, {"truncated": "penalize", "truncation_penalty": 0.5}).next_step()
    assert [sample["advantage"] for sample in batch.samples] == [0.25, -0.25]
    assert batch.rewards == [1.0, 1.0]


def test_a_masked_rollout_that_was_not_scored_is_not_counted_as_masked():
    batch = feeder(Source(cut(group(0, [None, 1.0, 0.0]), 0)), {"truncated": "mask"}).next_step()
    assert batch.num_masked == 0


def test_a_penalty_never_makes_a_reward_of_none():
    source = Source(cut(group(0, [None, 1.0, 0.0]), 0))
    batch = feeder(source, {"truncated": "penalize", "truncation_penalty": 0.5}).next_step()
    assert [sample["advantage"] for sample in batch.samples] == [0.5, -0.5]


def test_a_group_whose_only_signal_is_masked_is_dropped():
    source = Source(cut(group(0, [1.0, 0.0]), 0, 1), group(1, [1, 0]))
    batch = feeder(source, {"truncated": "mask"}).next_step()
    assert batch.group_ids == [1] and source.dropped == [(0, "no_trainable_rows")]


def test_with_a_global_baseline_a_group_of_equals_is_compared_with_the_others():
    source = Source(group(0, [1, 1]), group(1, [0, 0]))
    batch = feeder(source, {"advantage": "global"}, groups_per_step=2).next_step()
    assert [s["advantage"] for s in batch.samples] == pytest.approx([1, 1, -1, -1])
    assert source.dropped == []


def test_a_whole_step_of_equals_is_dropped_and_replaced():
    source = Source(group(0, [1, 1]), group(1, [1, 1]), group(2, [1, 0]), group(3, [1, 1]))
    batch = feeder(source, {"advantage": "global"}, groups_per_step=2).next_step()
    assert batch.group_ids == [2, 3]
    assert source.dropped == [(0, "no_spread"), (1, "no_spread")] and batch.dropped == {"no_spread": 2}


def test_steps_of_equals_without_end_stop_the_run():
    source = Source(*[group(i, [1, 1]) for i in range(20)])
    with pytest.raises(TrainingFailed, match="no_spread 6"):
        feeder(source, {"advantage": "global"}, groups_per_step=2, max_dropped_in_a_row=6).next_step()


def two_turns(version=1):
    """ids 0 1 | 2 3 (turn a) | 4 | 5 (turn b)."""
    made = row(version, num_sampled=4)
    made.mask_N[4], made.logprobs_N[4], made.versions_N[4] = 0, 0.0, -1
    made.turn_ids[:] = ["a", "b"]
    made.turn_spans[:] = [(2, 4), (5, 6)]
    return made


def test_turn_rewards_give_each_turn_an_advantage_of_its_own():
    judged = group(0, [1.0, 0.0], rows=[[two_turns()], [two_turns()]])
    judged.results[0].turn_rewards = {"a": 0.0, "b": 1.0}
    judged.results[1].turn_rewards = {"a": 0.0, "b": None}
    batch = feeder(Source(judged), {"turn_reward_weight": 3.0}).next_step()
    # Mean 1/3: turn b of the first is worth 2/3, its turn a 2/3 - 1/3; turn a of the second -1/3.
    assert batch.samples[0]["advantages"][[2, 3, 5]] == pytest.approx([1.5, 1.5, 2.5])
    assert batch.samples[1]["advantages"][[2, 3, 5]] == pytest.approx([-1.5, -1.5, -0.5])


def test_turn_rewards_without_a_weight_change_nothing():
    judged = group(0, [1.0, 0.0], rows=[[two_turns()], [two_turns()]])
    judged.results[0].turn_rewards = {"a": 0.0, "b": 1.0}
    batch = feeder(Source(judged)).next_step()
    assert set(batch.samples[0]["advantages"]) == {0.5}


def test_turns_may_differ_where_the_outcomes_do_not():
    judged = group(0, [1.0, 1.0], rows=[[two_turns()], [two_turns()]])
    judged.results[0].turn_rewards = {"a": 1.0, "b": 0.0}
    batch = feeder(Source(judged), {"turn_reward_weight": 1.0}).next_step()
    assert batch.samples[0]["advantages"][[2, 3, 5]] == pytest.approx([0, 0, -0.5])
    assert not batch.samples[1]["advantages"].any()


def test_a_turns_reward_that_is_no_number_is_refused_with_the_rollout_id():
    judged = group(0, [1.0, 0.0])
    judged.results[1].turn_rewards = {"t": math.nan}
    with pytest.raises(TrainingFailed, match="rollout r0-1 "):
        feeder(Source(judged)).next_step()


def test_each_rollout_of_a_step_has_a_number_that_its_rows_share():
    source = Source(group(0, [1, 0], rows=[[row(), row()], [row()]]), group(1, [None, 1, 0]))
    batch = feeder(source, groups_per_step=2).next_step()
    assert [sample["rollout"] for sample in batch.samples] == [0, 0, 1, 2, 3]

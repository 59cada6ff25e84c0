"""Groups become steps: one reward per rollout, whole groups, drops with reasons, no endless wait."""

import math
from collections import deque

import pytest

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.feeder import FeederOptions, GroupFeeder
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.rows import Row
from harness_trainer.rollouts.types import Outcome, RolloutResult


class Source:
    """A source with a fixed list of groups; it is out of work, hence unhealthy, when they are used up."""

    def __init__(self, *groups):
        self.groups = deque(groups)
        self.dropped = []
        self.trained = []
        self.versions = []
        self.empty_polls = 0

    def start(self): ...
    def stop(self): ...

    def next_group(self, timeout_s):
        return self.groups.popleft() if self.groups else None

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


def feeder(source, **changes):
    options = {"groups_per_step": 1, "token_budget": 100, "max_staleness": 2, "advantage_scale": "none"}
    fed = GroupFeeder(source, FeederOptions(**(options | changes)))
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

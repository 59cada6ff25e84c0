"""Group-relative advantages: None is never 0, and odd rewards are refused by position."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_trainer.learner.advantages import Estimator, group_advantages, step_advantages, turn_advantages


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 3, 2, None], [-1, 1, 0, None]),
        ([None] * 4, [None] * 4),
        ([0.5, None, None, None], [None] * 4),
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([0.1, 0.1, 0.1], [0, 0, 0]),
        ([1, 0], [0.5, -0.5]),
        ([], []),
    ],
)
@pytest.mark.parametrize("scale", ["none"])
def test_baseline_is_the_mean_of_the_rewards_that_are_known(rewards, expected, scale):
    assert group_advantages(rewards, scale) == expected


@pytest.mark.parametrize(
    ("rewards", "index"),
    [
        ([math.nan, 1, 0, 1], 0),
        ([math.inf, 0, 1, 1], 0),
        ([0, 1, -math.inf], 2),
        ([True, 0.5, 1, 0], 0),
        ([1, "0.5", 1, 0], 1),
        ([1, [1], 0], 1),
    ],
)
def test_a_reward_that_is_no_finite_number_is_refused_with_its_index(rewards, index):
    with pytest.raises(ValueError, match=f"reward {index} "):
        group_advantages(rewards)


def test_std_scale_gives_unit_deviation():
    advantages = group_advantages([0.0, 1.0, 2.0, None, 7.0])
    known = [a for a in advantages if a is not None]
    assert math.isclose(sum(known), 0.0, abs_tol=1e-9)
    assert math.isclose(sum(a * a for a in known) / len(known), 1.0, rel_tol=1e-6)


@given(
    st.lists(st.none() | st.floats(-1e3, 1e3), max_size=12),
    st.sampled_from(["std", "none"]),
)
def test_none_stays_none_and_the_rest_is_finite_and_sums_to_zero(rewards, scale):
    advantages = group_advantages(rewards, scale)
    num_known = sum(r is not None for r in rewards)
    assert len(advantages) == len(rewards)
    if num_known < 2:
        assert advantages == [None] * len(rewards)
        return
    assert [a is None for a in advantages] == [r is None for r in rewards]
    known = [a for a in advantages if a is not None]
    assert all(math.isfinite(a) for a in known)
    assert abs(sum(known)) < 1e-6


GROUPS = [[1.0, 0.0, None, 0.5], [0.0, 0.0], [2.0, None]]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("group_mean", [[0.5, -0.5, None, 0.0], [0, 0], [None, None]]),
        ("leave_one_out", [[0.75, -0.75, None, 0.0], [0, 0], [None, None]]),
        ("group_std", [[math.sqrt(1.5), -math.sqrt(1.5), None, 0.0], [0, 0], [None, None]]),
        # Five known rewards in usable groups: 1, 0, 0.5, 0, 0 with mean 0.3 and variance 0.16.
        ("global", [[0.7 / 0.4, -0.3 / 0.4, None, 0.2 / 0.4], [-0.75, -0.75], [None, None]]),
        # Centred: 0.5, -0.5, 0, 0, 0 with variance 0.1.
        ("global_std", [[0.5 / math.sqrt(0.1), -0.5 / math.sqrt(0.1), None, 0], [0, 0], [None, None]]),
    ],
)
def test_every_estimator_on_groups_worked_by_hand(estimator, expected):
    got = step_advantages(GROUPS, estimator)
    assert [[a is None for a in group] for group in got] == [[a is None for a in group] for group in expected]
    for group, wanted in zip(got, expected, strict=True):
        for advantage, value in zip(group, wanted, strict=True):
            assert advantage == (None if value is None else pytest.approx(value, abs=1e-6))


def test_leave_one_out_is_the_distance_from_the_mean_of_the_others():
    rewards = [0.3, None, 1.1, -2.0, 0.3]
    known = [r for r in rewards if r is not None]
    (got,) = step_advantages([rewards], "leave_one_out")
    for reward, advantage in zip(rewards, got, strict=True):
        if reward is not None:
            assert advantage == pytest.approx(reward - (sum(known) - reward) / (len(known) - 1))


@given(
    st.lists(st.lists(st.none() | st.floats(-1e3, 1e3), max_size=6), max_size=4),
    st.sampled_from(get_args(Estimator)),
)
def test_every_estimator_is_finite_keeps_none_and_is_zero_where_all_rewards_are_equal(groups, estimator):
    got = step_advantages(groups, estimator)
    for rewards, advantages in zip(groups, got, strict=True):
        usable = sum(r is not None for r in rewards) >= 2
        assert [a is None for a in advantages] == [r is None or not usable for r in rewards]
        assert all(math.isfinite(a) for a in advantages if a is not None)
        if estimator != "global" and len({r for r in rewards if r is not None}) == 1:
            assert not any(advantages)
    known = [a for advantages in got for a in advantages if a is not None]
    assert abs(sum(known)) < 1e-5 * max(1, len(known))


@pytest.mark.parametrize("estimator", get_args(Estimator))
@pytest.mark.parametrize("odd", [math.nan, math.inf, True, "1"])
def test_every_estimator_refuses_a_reward_that_is_no_finite_number(estimator, odd):
    with pytest.raises(ValueError, match="reward 1 "):
        step_advantages([[1, 0], [0, odd]], estimator)


def test_a_turn_is_judged_by_what_comes_from_it_to_the_end():
    assert turn_advantages([[1, 0], [0, None]], "none") == [
        pytest.approx([1 / 3, -1 / 3]),
        pytest.approx([-1 / 3, 0]),
    ]
    (first, second) = turn_advantages([[1, 0, 0], [0]], "std")
    std = math.sqrt(3) / 4
    assert first == pytest.approx([0.25 / std, -0.5 / std, -0.25 / std])
    assert second == pytest.approx([-0.25 / std])


def test_turns_that_are_all_alike_or_hardly_known_say_nothing():
    assert turn_advantages([[1, 1], [1]]) == [[0, 0], [0]]
    assert turn_advantages([[None, 1], [None]]) == [[0, 0], [0]]
    assert turn_advantages([[], []]) == [[], []]
    with pytest.raises(ValueError, match="nan"):
        turn_advantages([[math.nan, 1]])

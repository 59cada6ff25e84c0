"""Group-relative advantages: None is never 0, and odd rewards are refused by position."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_trainer.learner.advantages import group_advantages


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

"""Advantages: how much better a rollout, or a turn of it, did than what it is compared with.

Pure functions over rewards. The feeder (`feeder`) calls them with one reward per rollout, however many rows a rollout
became, so that no baseline and no spread ever counts a rollout twice. None = unknown: it stays None, and is in no mean.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Literal

Scale = Literal["std", "none"]
Estimator = Literal["group_std", "group_mean", "leave_one_out", "global_std", "global"]

# Keeps the division finite when rewards differ by rounding only; the same constant as TRL's asynchronous worker.
_STD_EPSILON = 1e-8


def step_advantages(groups: Sequence[Sequence[float | None]], estimator: Estimator) -> list[list[float | None]]:
    """Advantages of every rollout of a step, group by group, from one reward r each.

    group_std      (r - mean_group) / std_group           GRPO, arXiv 2402.03300 section 4.1.2
    group_mean     r - mean_group                         Dr. GRPO, arXiv 2503.20783
    leave_one_out  r - mean of the group's others         RLOO, arXiv 2402.14740
    global_std     (r - mean_group) / std_step of that    REINFORCE++-baseline, arXiv 2501.03262
    global         (r - mean_step) / std_step             REINFORCE++, arXiv 2501.03262

    Standard deviations are the population's. A group with fewer than two known rewards gets None throughout and is in
    no statistic of the step. Raises ValueError as `group_advantages` does.
    """
    if estimator == "group_std":
        return [group_advantages(rewards_G, "std") for rewards_G in groups]
    centred = [group_advantages(rewards_G, "none") for rewards_G in groups]
    if estimator == "group_mean":
        return centred
    if estimator == "leave_one_out":
        return [_leave_one_out(advantages_G) for advantages_G in centred]
    if estimator == "global":
        centred = [
            [None if centre is None else reward for reward, centre in zip(rewards_G, centres_G, strict=True)]
            for rewards_G, centres_G in zip(groups, centred, strict=True)
        ]
    known = [value for group in centred for value in group if value is not None]
    # What is centred by group has a mean of 0 but for rounding, which must not move a group without a difference.
    normalise = _normaliser(known, "std", mean=None if estimator == "global" else 0.0)
    return [[None if value is None else normalise(value) for value in group] for group in centred]


def group_advantages(rewards_G: Sequence[float | None], scale: Scale = "std") -> list[float | None]:
    """Advantages of the G rollouts of one group, from one reward each. None stays None and out of the baseline.

    scale="std": (r - mean) / std, the population standard deviation, as in GRPO (arXiv 2402.03300, eq. for outcome
    supervision). scale="none": r - mean, as in Dr. GRPO (arXiv 2503.20783), which does not up-weight groups of small
    spread. Example: [1, 3, 2, None] with "none" gives [-1, 1, 0, None].

    With fewer than two rewards there is no baseline: all None, and the caller drops the group. Equal rewards give
    zeros. Raises ValueError with the index for a reward that is not a finite real number (NaN, inf, bool, str).
    """
    for index, reward in enumerate(rewards_G):
        if reward is not None and not is_finite_number(reward):
            raise ValueError(f"reward {index} of the group is {reward!r}: not a finite number")
    known = [float(reward) for reward in rewards_G if reward is not None]
    if len(known) < 2:
        return [None] * len(rewards_G)
    normalise = _normaliser(known, scale)
    return [None if reward is None else normalise(reward) for reward in rewards_G]


def turn_advantages(rewards_GT: Sequence[Sequence[float | None]], scale: Scale = "std") -> list[list[float]]:
    """For every turn of every rollout of a group: what it and the turns after it earned above the group's usual.

    Process supervision of GRPO (arXiv 2402.03300 section 4.1.3): every turn's reward is normalised by the mean and,
    with scale="std", the population standard deviation of all turn rewards of the group; a turn's advantage is the sum
    of the normalised rewards from it to its rollout's end. A turn whose reward is None counts as usual, neither good
    nor bad; with fewer than two known rewards in the group all advantages are 0.
    Example: [[1, 0], [0, None]] with "none" has the mean 1/3 and gives [[1/3, -1/3], [-1/3, 0]].

    Raises ValueError for a reward that is not a finite real number.
    """
    known = [reward for rewards_T in rewards_GT for reward in rewards_T if reward is not None]
    if odd := [reward for reward in known if not is_finite_number(reward)]:
        raise ValueError(f"the reward of a turn is {odd[0]!r}: not a finite number")
    if len(known) < 2:
        return [[0.0] * len(rewards_T) for rewards_T in rewards_GT]
    normalise = _normaliser(known, scale)
    result: list[list[float]] = []
    for rewards_T in rewards_GT:
        to_go = 0.0
        advantages_T: list[float] = []
        for reward in reversed(rewards_T):
            to_go += 0.0 if reward is None else normalise(reward)
            advantages_T.append(to_go)
        result.append(advantages_T[::-1])
    return result


def is_finite_number(value: object) -> bool:
    """Whether a verifier may give this as a reward."""
    # bool is a Real in Python, but as a reward it is a verifier's mistake that should be seen.
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value))


def _leave_one_out(centred_G: Sequence[float | None]) -> list[float | None]:
    """r - mean of the other n - 1 is n / (n - 1) times r - mean of all n."""
    num = sum(value is not None for value in centred_G)
    return [None if value is None else value * num / (num - 1) for value in centred_G]


def _normaliser(values: Sequence[float], scale: Scale, mean: float | None = None) -> Callable[[float], float]:
    """The function that takes a value to its distance from the mean; exactly 0 where all values are equal.

    `mean` None = that of the values.
    """
    if not values or max(values) == min(values):
        return lambda value: 0.0
    centre = math.fsum(values) / len(values) if mean is None else mean
    if scale == "none":
        return lambda value: float(value) - centre
    std = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / len(values))
    return lambda value: (float(value) - centre) / (std + _STD_EPSILON)

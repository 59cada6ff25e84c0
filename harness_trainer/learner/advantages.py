"""Group-relative advantages: how much better a rollout did than its siblings on the same task.

Pure functions over rewards. The feeder (`feeder`) calls them with one reward per rollout, however many rows a
rollout became, so that the baseline never counts a rollout twice.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Literal

# Keeps the division finite when rewards differ by rounding only; the same constant as TRL's asynchronous worker.
_STD_EPSILON = 1e-8


def group_advantages(rewards_G: Sequence[float | None], scale: Literal["std", "none"] = "std") -> list[float | None]:
    """Advantages of the G rollouts of one group, from one reward each. None stays None and out of the baseline.

    scale="std": (r - mean) / std, the population standard deviation, as in GRPO (arXiv 2402.03300, eq. for outcome
    supervision). scale="none": r - mean, as in Dr. GRPO (arXiv 2503.20783), which does not up-weight groups of small
    spread. Example: [1, 3, 2, None] with "none" gives [-1, 1, 0, None].

    With fewer than two rewards there is no baseline: all None, and the caller drops the group. Equal rewards give
    zeros. Raises ValueError with the index for a reward that is not a finite real number (NaN, inf, bool, str).
    """
    for index, reward in enumerate(rewards_G):
        if reward is not None and not _is_finite_number(reward):
            raise ValueError(f"reward {index} of the group is {reward!r}: not a finite number")
    known = [float(reward) for reward in rewards_G if reward is not None]
    if len(known) < 2:
        return [None] * len(rewards_G)
    if max(known) == min(known):
        return [None if reward is None else 0.0 for reward in rewards_G]
    mean = math.fsum(known) / len(known)
    divisor = 1.0
    if scale == "std":
        divisor = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / len(known)) + _STD_EPSILON
    return [None if reward is None else (float(reward) - mean) / divisor for reward in rewards_G]


def _is_finite_number(value: object) -> bool:
    # bool is a Real in Python, but as a reward it is a verifier's mistake that should be seen.
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value))

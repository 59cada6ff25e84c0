"""Rewards of single turns: reading them strictly, and matching them with the turns that they are of.

They come beside the rollout's reward and never in its place: from the tests' `turn_rewards.json`, or from a person's
reward function. The learner adds them as `learner.objective.turn_reward_weight` says. Called by `verifier`, `custom`
and `rollouts`.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence

from capture_proxy.types import Capture
from harness_trainer.rewards.outcome import main_turns

FILE = "turn_rewards.json"

# In order of the agent's own answered calls, or by the call's node_id; None = this turn was not judged.
TurnRewards = Sequence[float | None] | Mapping[str, float | None]


def parse_turn_rewards(text: str) -> list[float | None]:
    """The tests' list, e.g. "[0, null, 0.5]". Raises ValueError with what is there instead."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{FILE} is no JSON") from None
    if not isinstance(data, list):
        raise ValueError(f"{FILE} is no list with a number or null for each of the agent's calls")
    return [checked(value) for value in data]


def checked(value: object) -> float | None:
    """Raises ValueError for anything but a finite number or None."""
    if value is None:
        return None
    try:
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    except OverflowError:  # an integer beyond any float
        pass
    raise ValueError(f"the reward {repr(value)[:60]} of a turn is no finite number")


def by_turn(rewards: TurnRewards, capture: Capture) -> dict[str, float | None]:
    """The rewards by turn id, for every one of the agent's own answered calls, in their order.

    Raises ValueError where they do not fit these calls: a number too many or too few would reward the wrong turns.
    """
    ids = [turn.turn_id for turn in main_turns(capture)]
    if isinstance(rewards, Mapping):
        if unknown := [str(key) for key in rewards if key not in ids]:
            raise ValueError(f"there is no turn {unknown[0][:60]} of the agent's own")
        return {turn_id: rewards.get(turn_id) for turn_id in ids} if rewards else {}
    if rewards and len(rewards) != len(ids):
        raise ValueError(f"{len(rewards)} rewards of turns, but the agent made {len(ids)} answered calls")
    return dict(zip(ids, rewards, strict=True)) if rewards else {}

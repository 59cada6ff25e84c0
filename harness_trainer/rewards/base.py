"""What scoring came to, and the strict reading of reward files.

Owns data and parsing only; `verifier` runs the tests. A reward that is missing, unreadable or out of range is None and
never 0: the rollout then counts as not scored, and a finding says why.

As in Harbor, reward.json wins over reward.txt, and may hold several named rewards. Training needs one number: see
`tasks.grading`. Unlike Harbor, true and false are no numbers, and neither are words that Python's float() would take.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness_trainer.tasks.grading import GradingRules, Range

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class VerifyMode(enum.StrEnum):
    """Where a task's tests run once its agent is done."""

    AUTO = "auto"  # fresh where nothing inside keeps the agent's user from the tests', same otherwise
    SAME = "same"  # the agent's own sandbox, its processes stopped, as another user where there is one
    FRESH = "fresh"  # a new sandbox that gets the working directory and the task's artifacts, nothing else


class Code(enum.StrEnum):
    """What can be noteworthy about a scoring. Those of the first block mean that there is no reward."""

    REWARD_MISSING = "reward_missing"  # no regular file, an empty one, or a name that the weights need is absent
    REWARD_UNREADABLE = "reward_unreadable"  # not one number, or not an object of numbers
    REWARD_AMBIGUOUS = "reward_ambiguous"  # several names, and nothing says which counts
    REWARD_NOT_FINITE = "reward_not_finite"
    REWARD_OUT_OF_RANGE = "reward_out_of_range"
    VERIFIER_TIMEOUT = "verifier_timeout"
    VERIFIER_OOM = "verifier_oom"  # the memory limit ended something while tests ran: what they wrote may be wrong
    WORKSPACE_TOO_LARGE = "workspace_too_large"  # it cannot be copied into a fresh sandbox

    WORKSPACE_MISSING = "workspace_missing"  # the working directory is gone, or is no folder: tests see an empty one
    NOT_SEPARATED = "not_separated"  # tests ran where the agent's user could have prepared anything
    NOT_CONNECTED = "not_connected"  # tests ran without the network that the task asks for them
    AGENT_NOT_STOPPED = "agent_not_stopped"  # its sandbox would not end its processes; tests ran in another one
    LINK_DROPPED = "link_dropped"  # of the workspace, because it leaves it or leads to the tests
    ENTRY_DROPPED = "entry_dropped"  # special files of the workspace
    PATH_DROPPED = "path_dropped"  # an entry of PATH and the like that the agent could write to
    TURN_REWARDS_UNUSABLE = "turn_rewards_unusable"  # not a number or null per call; the rollout's reward stands
    FILES_NOT_KEPT = "files_not_kept"  # logs or artifacts: too large, or not readable


@dataclass(frozen=True, slots=True)
class Finding:
    """Example: Finding(Code.REWARD_MISSING, "they wrote neither reward.txt nor reward.json")."""

    code: Code
    detail: str  # one line for people

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


class RewardUnreadable(Exception):
    """There is no reward that counts; the message says what is there instead."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class VerifierResult:
    """Example: VerifierResult(0.5, "", "2 of 4 words found\\n", 0.08, False). `reward` None = could not be scored."""

    reward: float | None  # what is trained on
    detail: str  # one line for people: why there is no reward; "" when there is one
    output: str  # what the tests printed, stdout then stderr
    duration_s: float  # of the tests alone
    timed_out: bool
    rewards: Mapping[str, float] = field(default_factory=dict)  # by name, all finite; empty when `reward` is None
    turn_rewards: tuple[float | None, ...] = ()  # of the agent's calls, in order; () = the tests judged no turns
    exit_code: int | None = None  # of the tests; None = killed at the time limit, or they never ran
    oom: bool = False
    mode: VerifyMode = VerifyMode.SAME  # where they ran: SAME or FRESH
    findings: tuple[Finding, ...] = ()
    stages_s: Mapping[str, float] = field(default_factory=dict)  # seconds: stop, copy, box, prepare, tests, keep


def parse_text(text: str, rules: GradingRules) -> dict[str, float]:
    """The number in reward.txt, as `reward`: decimal, alone, white space around it allowed. Raises RewardUnreadable."""
    stripped = text.strip(" \t\r\n")
    if not stripped:
        raise RewardUnreadable(Code.REWARD_MISSING, "reward.txt is empty")
    if re.fullmatch(r"[+-]?(nan|inf|infinity)", stripped, re.IGNORECASE | re.ASCII):
        raise RewardUnreadable(Code.REWARD_NOT_FINITE, f"reward.txt holds {stripped}")
    if not _NUMBER.fullmatch(stripped):
        raise RewardUnreadable(Code.REWARD_UNREADABLE, f"reward.txt is not one number: {_shown(text)}")
    rewards = {"reward": _finite("reward.txt", stripped, float(stripped))}
    trained_reward(rewards, rules, "reward.txt")
    return rewards


def parse_json(text: str, rules: GradingRules) -> dict[str, float]:
    """The rewards in reward.json, a flat object of numbers, all of them finite. Raises RewardUnreadable."""
    if not text.strip():
        raise RewardUnreadable(Code.REWARD_MISSING, "reward.json is empty")
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise RewardUnreadable(Code.REWARD_UNREADABLE, f"reward.json is not valid: {_shown(text)}") from e
    if not isinstance(data, dict):
        raise RewardUnreadable(Code.REWARD_UNREADABLE, f"reward.json is no object of named numbers: {_shown(text)}")
    if not data:
        raise RewardUnreadable(Code.REWARD_MISSING, "reward.json names no reward")
    rewards = {name: _json_number(name, value) for name, value in data.items()}
    trained_reward(rewards, rules, "reward.json")
    return rewards


def trained_reward(rewards: Mapping[str, float], rules: GradingRules, where: str) -> float:
    """The one number to train on: the declared weighting, else `reward`, else the only one there is.

    Raises RewardUnreadable, also when a name lies outside the range that the task declares for it.
    """
    for name, (low, high) in rules.ranges.items():
        if name in rewards:
            _in_range(rewards[name], (low, high), f"{where}: {_shown(name)}")
    if rules.weights:
        if missing := sorted(rules.weights.keys() - rewards.keys()):
            raise RewardUnreadable(Code.REWARD_MISSING, f"{where} lacks {', '.join(missing)}, which the weights need")
        value = sum(weight * rewards[name] for name, weight in rules.weights.items())
        for bound in rules.reward_range:  # 0.7 + 0.2 + 0.1 is not quite 1
            value = bound if math.isclose(value, bound, rel_tol=1e-9, abs_tol=1e-9) else value
        return _in_range(value, rules.reward_range, f"{where}: the weighted sum")
    if "reward" not in rewards and len(rewards) != 1:
        named = _shown(", ".join(rewards))
        raise RewardUnreadable(
            Code.REWARD_AMBIGUOUS, f"{where} needs the key `reward`, one value, or reward_weights: {named}"
        )
    return _in_range(rewards.get("reward", next(iter(rewards.values()))), rules.reward_range, where)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _json_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RewardUnreadable(Code.REWARD_UNREADABLE, f"reward.json: {_shown(name)} is no number: {_shown(value)}")
    try:
        return _finite(f"reward.json: {_shown(name)}", value, float(value))
    except OverflowError:  # an integer beyond any float
        return _finite(f"reward.json: {_shown(name)}", "a huge integer", math.inf)


def _finite(where: str, written: object, value: float) -> float:
    if not math.isfinite(value):
        raise RewardUnreadable(Code.REWARD_NOT_FINITE, f"{where} holds {str(written)[:20]}, which is not finite")
    return value


def _in_range(value: float, allowed: Range, where: str) -> float:
    low, high = allowed
    if not low <= value <= high:  # also false for nan, which a weighted sum of huge numbers can be
        raise RewardUnreadable(
            Code.REWARD_OUT_OF_RANGE, f"{where} holds {value:.20g}, outside the task's range {low:g} to {high:g}"
        )
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."

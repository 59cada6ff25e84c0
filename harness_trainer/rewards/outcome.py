"""A finished rollout as a reward function sees it.

Owns the shape (TRL's `HarnessRolloutOutcome` and more) and the counting of tools. Tool calls are counted from the
capture: they are what the model asked for, whatever the agent made of them. Called by `rollouts.rollout`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from capture_proxy.trace import to_training_trace
from capture_proxy.types import Capture, Turn, TurnRole, TurnStatus

# How agents put a command's exit code at the start or the end of what its tool returned.
_EXIT_CODE = re.compile(
    r"(?:exit(?:ed)?[ _-]?(?:with )?(?:code|status)|returncode|return code)\W{1,6}(-?\d+)", re.IGNORECASE
)
_WHERE = 400  # characters from either end in which it is looked for: what a program itself printed is no evidence


@dataclass(frozen=True, slots=True)
class HarnessRolloutOutcome:
    """What a rollout came to. Example of a reward function over it:

    def reward(outcome):
        return None if outcome.timed_out else (outcome.env_reward or 0.0) - 0.01 * outcome.tool_call_count
    """

    env_reward: float | None  # the verifier's
    completion: list[dict[str, Any]]  # chat messages of the agent's last call, its reply included
    trace: list[dict[str, Any]]  # each captured call as OpenEnv's TraceEntry: ids, log-probabilities, mask, ...
    tool_call_count: int
    tool_failure_count: int  # known to have failed; 0 = nothing says so: see the next
    tool_outcome_unknown_count: int  # of `tool_call_count`, those of which no result says whether they failed
    tool_calls_by_name: dict[str, int]
    timed_out: bool
    harness: str
    task: str
    outcome: str  # "ok", "truncated", "agent_failed" or "capture_invalid"
    exit_code: int | None  # the agent's; None = it was ended
    stages_s: dict[str, float] = field(default_factory=dict)  # seconds
    findings: list[str] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)  # by name, as the tests gave them


def main_turns(capture: Capture) -> list[Turn]:
    """The agent's own calls that were answered, in order of arrival: no titles, no other side calls."""
    turns = sorted(capture.turns, key=lambda turn: turn.index)
    return [turn for turn in turns if turn.role is TurnRole.AGENT and turn.status is TurnStatus.OK]


def calls_by_name(turns: Iterable[Turn]) -> dict[str, int]:
    """How often the model asked for each tool. Example: {"bash": 3, "edit": 1}."""
    return dict(Counter(name for turn in turns for _, name in _calls(turn)))


def num_failures(turns: Iterable[Turn]) -> int:
    """How many tool results say that their tool failed. What says nothing is in `num_outcomes_unknown`."""
    return sum(_told(turns)[0].values())


def num_outcomes_unknown(turns: Sequence[Turn]) -> int:
    """How many of the calls have no result that says whether they failed."""
    told, names = _told(turns)
    return sum(calls_by_name(turns).values()) - len(told.keys() & names.keys())


def failures_by_name(turns: Iterable[Turn]) -> dict[str, int] | None:
    """The same by tool, a tool of which no result tells left out. Example: {"bash": 1, "edit": 0}."""
    told, names = _told(turns)
    failures: dict[str, int] = {}
    for call_id, failed in told.items():
        # A result of a call that is in no recorded reply: the agent's own history, say.
        name = names.get(call_id, "unknown")
        failures[name] = failures.get(name, 0) + failed
    return failures or None


def _told(turns: Iterable[Turn]) -> tuple[dict[str, bool], dict[str, str]]:
    """Whether a call failed, of those whose result tells, and the tool that each recorded call is of, by call id."""
    told: dict[str, bool] = {}
    names: dict[str, str] = {}
    for turn in turns:
        names |= dict(_calls(turn))
        for message in turn.request.get("messages") or ():
            if message.get("role") == "tool" and (failed := _failed(message)) is not None:
                told[str(message.get("tool_call_id"))] = failed
    return told, names


def completion(turns: list[Turn]) -> list[dict[str, Any]]:
    """The conversation as the agent last had it."""
    return [] if not turns else [*(turns[-1].request.get("messages") or []), turns[-1].message]


def trace_entries(capture: Capture) -> list[dict[str, Any]]:
    """Raises ValueError when OpenEnv's validators refuse the capture."""
    entries: list[dict[str, Any]] = to_training_trace(capture).to_trace_entries()
    return entries


def _calls(turn: Turn) -> Iterator[tuple[str, str]]:
    for call in turn.message.get("tool_calls") or ():
        function = call.get("function") or call
        if function.get("name"):
            yield str(call.get("id")), str(function["name"])


def _failed(message: dict[str, Any]) -> bool | None:
    if "is_error" in message:
        return bool(message["is_error"])
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    text = str(content or "").strip()
    if text.startswith("Error:"):  # also what a dialect's own error flag becomes
        return True
    found = _EXIT_CODE.search(text[:_WHERE]) or _EXIT_CODE.search(text[-_WHERE:])
    return None if found is None else int(found[1]) != 0

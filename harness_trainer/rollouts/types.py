"""The nouns of rollouts: what is to be run, and what it came to. Owns data only; the learner makes rows of it."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness_trainer.loops.base import ToolUse
    from harness_trainer.rollouts.at_work import Facts
    from harness_trainer.tasks import Task
    from sandboxes.base import Sandbox


NODE = "node"  # the `failed_stage` of a rollout whose machine was lost under it


class Outcome(enum.StrEnum):
    """How a rollout ended. Only INFRA_FAILED is retried; a reward of None is never 0."""

    OK = "ok"
    TRUNCATED = "truncated"  # a limit (turns, context, deadline) cut it; still verified
    AGENT_FAILED = "agent_failed"  # the agent exited with an error of its own; still verified
    INFRA_FAILED = "infra_failed"  # sandbox, engine, network or verifier machinery failed; reward None
    CAPTURE_INVALID = "capture_invalid"  # nothing in the capture may be trained on; reward kept, rows empty
    CANCELLED = "cancelled"  # ended by us: its group had become too old, or the run was stopped; reward None


# What a reward that could not be told leaves among a rollout's findings; one left out on purpose has none.
_SCORING_FAILED = re.compile(r"reward: warning ((?:reward_|trace_refused).*)", re.DOTALL)


def scoring_failure(reward: float | None, findings: Iterable[str]) -> str:
    """Why an unscored rollout has no reward though nobody left it out; "" = that is not so.

    Example: "reward_failed: mine.py:reward raised TypeError: ...".
    """
    found = (_SCORING_FAILED.match(finding) for finding in findings if reward is None)
    return next((match[1] for match in found if match), "")


@dataclass(frozen=True, slots=True)
class Taken:
    """An agent that a killed runner left at work, or at its end, and whose sandbox is ours now."""

    slot: int
    sandbox: Sandbox
    job_id: str  # of its command in the sandbox
    running: bool  # when it was taken over
    facts: Facts


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt of one slot of a group. Example: Job("g00017-2-5f0c12ab", 17, 0, task)."""

    rollout_id: str  # new for every attempt: a session is single-use
    group_id: int
    attempt: int  # 0 = first try
    task: Task
    # Called when the attempt has its sandbox; gives the policy that the engine samples with then, None = not known.
    has_box: Callable[[], int | None] = lambda: None
    harness: str = ""  # name of the agent to run, where a run has several; "" = the only one
    queued_s: float = 0.0  # it has waited for a place
    taken: Taken | None = None  # what there is of it already; None = it begins


@dataclass(slots=True)
class RolloutResult:
    """A finished rollout. `reward` None = could not be scored; `num_trainable_turns` 0 = nothing to train on."""

    rollout_id: str
    group_id: int
    task: str  # task name
    harness: str
    attempt: int  # 0 = first try, counts infra retries
    outcome: Outcome
    reward: float | None
    trace: dict[str, Any] | None = (
        None  # OpenEnv TrainingTrace as JSON data, a turn per row; None = there was no capture
    )
    detail: str = ""  # one line for people: why it is not OK
    num_turns: int = 0  # agent turns captured, trained or not
    num_trainable_turns: int = 0
    num_side_turns: int = 0
    num_completion_tokens: int = 0
    # Seconds per stage, in order: queue (for a slot), prepare (image), create, setup, agent, capture, verify, stop;
    # wait = for the caps on agents and verifiers; away = its agent had ended, and the runner had been killed;
    # verify.copy and the like are parts of verify. A stage that was not reached is absent.
    stages_s: dict[str, float] = field(default_factory=dict)
    failed_stage: str = ""  # of an infra failure: the stage it came from, or NODE
    setup_failed: bool = False  # the task's sandbox cannot be had: another try of the same task fails alike
    start_hung: bool = (
        False  # the sandbox did not start in its time, though its start was not queued for: for the record
    )
    warm: bool | None = None  # whether the sandbox had been started ahead of need; None = there was none
    rewards: dict[str, float] = field(default_factory=dict)  # by name, as the tests gave them
    turn_rewards: dict[str, float | None] = field(default_factory=dict)  # by turn id, in order; None = not judged
    findings: list[str] = field(default_factory=list)
    exit_code: int | None = None  # the agent's, 128 + N = ended by signal N; None = it did not run, or was ended by us
    timed_out: bool = False  # the agent was still at work at its time limit
    tool_calls: dict[str, int] | None = None  # what the model asked for, by tool; None = there was no capture
    # How many of their results say that the tool failed, by tool; a tool is absent, and all is None, where none tells.
    tool_failures: dict[str, int] | None = None
    tool_use: ToolUse | None = None  # None = its turns were not ours
    num_bridged_turns: int | None = None  # agent turns whose prompt goes on from recorded ids; None = no capture
    # Its rewards are told when its whole group has ended; until then it has none. Never so in the store.
    awaits_group: bool = False
    facts: dict[str, float] = field(default_factory=dict)  # numbers that a white-box environment gives, by name
    source: str = ""  # which of the run's `sources` it is of; "" = the run has only one
    verifier_reward: float | None = None  # the verifier's, where a reward function had the last word; else None

    @property
    def scoring_failure(self) -> str:
        return scoring_failure(self.reward, self.findings)

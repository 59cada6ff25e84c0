"""One group of rollouts while it runs, and the rule by which it is trained whole or not at all.

The rule: a group wants `group_size` scored rollouts. One that infra failures leave unscored, after its retries, or that
its reward function failed on (raised, hung, gave no number) is replaced by a fresh sample in a further slot, at most
`max_refills` times per group. A group that then has `min_group` scored rollouts is ready, and its unscored ones are out
of the baseline; any other is dropped, and another group takes its place. `min_group` is by default the whole group: all
rollouts but those that a reward function left unscored on purpose, by giving None. Where rewards compare siblings, a
rollout that came to something counts as scored until all have ended; what has no reward when they are scored together
is not replaced. A group is given up, without refills, once `setup_tries` of its tries found that the task's sandbox
cannot be had (also: its start hung while other tasks got theirs) and none got one; a try that failed before its sandbox
was there, in any other way, says nothing of either.

Owns the group's state in memory; `slots` runs its rollouts, `runner` obeys its verdict.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from typing import Any

from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.types import NODE, Job, Outcome, RolloutResult
from harness_trainer.tasks import Task

_WITHOUT_BOX = ("", "prepare", "create", NODE)  # stages of an infra failure that may have had no sandbox
_VERSION = re.compile(r"v(\d+)")


class Unfit(enum.StrEnum):
    """Why the runner drops a group; the learner has reasons of its own (`learner.feeder.DropReason`)."""

    TOO_FEW_SCORED = "too_few_scored"  # below `min_group`, refills and all
    SETUP_FAILED = "setup_failed"  # the task's sandbox cannot be had
    STALE = "stale"  # cancelled while it ran: every later step would find it too old
    AGENT_GONE = "agent_gone"  # begun by an earlier runner, with an agent that is none of the run's any more


@dataclass(slots=True, eq=False)
class Group:
    """Example: Group(7, task, "opencode", 4) after two of its four rollouts: results={0: r0, 2: r2}."""

    group_id: int
    task: Task
    harness: str  # one agent for all its rollouts: they share a baseline
    size: int
    results: dict[int, RolloutResult] = field(default_factory=dict)  # by slot: what stands for it, without its trace
    waiting: dict[int, RolloutResult] = field(default_factory=dict)  # by slot: to be scored when all have ended
    sampling_since: dict[str, int] = field(default_factory=dict)  # rollout at work -> policy version when it began
    kept: set[int] = field(default_factory=set)  # the policies that sampled trained tokens of `results`
    num_setup_failed: int = 0
    got_sandbox: bool = False
    reason: str = ""  # of the first set-up failure
    is_stale: bool = False  # it is being cancelled

    def note(self, result: RolloutResult) -> None:
        """What a try, of whichever slot, says of the task's sandbox."""
        if result.setup_failed:
            self.num_setup_failed += 1
            self.reason = self.reason or result.detail
        elif result.outcome is not Outcome.INFRA_FAILED or result.failed_stage not in _WITHOUT_BOX:
            self.got_sandbox = True

    def finish(self, slot: int, result: RolloutResult) -> None:
        """The result that stands for the slot."""
        self.results[slot] = replace(result, trace=None)
        self._keep(result)

    def wait(self, slot: int, result: RolloutResult) -> None:
        """Its rollout has ended, and is scored when its siblings have."""
        self.waiting[slot] = result
        self._keep(result)

    def _keep(self, result: RolloutResult) -> None:
        if (result.reward is not None or result.awaits_group) and result.trace is not None:
            self.kept |= sampled_versions(result.trace)

    def is_hopeless(self, setup_tries: int) -> bool:
        return self.num_setup_failed >= setup_tries and not self.got_sandbox

    def given_up(self, job: Job) -> RolloutResult:
        """The result of a slot that is not tried any more."""
        result = RolloutResult(
            job.rollout_id, job.group_id, job.task.name, self.harness, job.attempt, Outcome.INFRA_FAILED, None
        )
        result.failed_stage, result.setup_failed = "prepare", True
        result.detail = f"not tried, because earlier tries of its group failed: {self.reason}"
        return result

    def missing(self) -> list[int]:
        """Its own slots that have no result yet."""
        return [slot for slot in range(self.size) if slot not in self.results and slot not in self.waiting]

    def refills(self, config: RolloutConfig) -> list[int]:
        """Further slots to run, when all so far are over."""
        if self.is_stale or self.is_hopeless(config.setup_tries):
            return []
        first = max([self.size - 1, *self.results, *self.waiting]) + 1
        used = first - self.size
        return list(range(first, first + max(0, min(self._wanted - self.num_scored, config.max_refills - used))))

    @property
    def num_scored(self) -> int:
        """Those that wait for their siblings included."""
        return sum(result.reward is not None for result in self.results.values()) + len(self.waiting)

    @property
    def _wanted(self) -> int:
        """Scored rollouts of a whole group."""
        ended = (Outcome.INFRA_FAILED, Outcome.CANCELLED)
        unscored = [result for result in self.results.values() if result.reward is None and result.outcome not in ended]
        return self.size - sum(not result.scoring_failure for result in unscored)

    @property
    def scoring_failure(self) -> str:
        """Of its first rollout that nothing could score; "" = there is none."""
        return next((said for result in self.results.values() if (said := result.scoring_failure)), "")

    def unfit(self, config: RolloutConfig) -> Unfit | None:
        """Why it is not trained, now that it is over; None = the learner may have it."""
        if self.is_hopeless(config.setup_tries):
            return Unfit.SETUP_FAILED
        needed = self._wanted if config.min_group is None else config.min_group
        return Unfit.TOO_FEW_SCORED if self.num_scored < max(2, needed) else None

    def sampled_by(self) -> set[int]:
        """The policies of its trained tokens, of a rollout at work the one that it began with; empty = no token yet."""
        return self.kept.union(self.sampling_since.values())


def sampled_versions(trace: dict[str, Any]) -> set[int]:
    """The policy versions of the turns of a row trace that are trained."""
    return {
        int(match[1])
        for turn in trace.get("turns", [])
        if any(turn["loss_mask"])
        for span in turn.get("metadata", {}).get("policy_versions", [])
        if (match := _VERSION.fullmatch(span["version"]))
    }

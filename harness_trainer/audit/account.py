"""The account itself: what attempts, groups and steps came to, in numbers. Owns data and counting; judges nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness_trainer.audit.records import Records, State
from harness_trainer.rollouts.stored import StoredAttempt
from harness_trainer.rollouts.types import Outcome

LOST = "lost"  # its runner was killed, and nobody took it over
RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Violation:
    """Example: Violation("one_final", "group 17 slot 2", "2 attempts stand for it: g00017-2-5f.., g00017-2-9a..")."""

    rule: str
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step as metrics.jsonl has it, and the groups that the store has for it."""

    step: int
    policy_version: int | None
    groups: list[int]
    num_rollouts: int | None  # scored
    trained_tokens: int | None
    staleness_max: int | None


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """Example: SourceAccount("wordle", {"ok": 8, "lost": 1}, {"trained": 2}, 8, 0.4, 0.25). Evaluations included."""

    source: str
    attempts: dict[str, int]  # by outcome, as in `Audit`
    groups: dict[str, int]  # to train on, by state
    num_trained: int  # rollouts of its trained groups that have a reward
    reward: float | None  # their mean; None = there are none
    share: float | None  # of the run's trained groups; None = there are none


@dataclass(slots=True)
class Audit:
    """Example: Audit("finished", {"ok": 152, "infra_failed": 18, "lost": 4}, {"trained": 40, "dropped": 3}, ...)."""

    state: State
    attempts: dict[str, int]  # by outcome; "lost" and "running" have none
    failed_stages: dict[str, int]  # infra failures, by the stage that they came from
    groups: dict[str, int]  # to train on, by state
    dropped: dict[str, int]  # by reason
    evaluations: int  # finished ones
    steps: list[Step]
    restarts: dict[str, int]  # by part
    quarantined: list[str]  # tasks
    open_sessions: int  # of attempts that ended without a score: nobody sealed them
    num_turns: int = 0  # captured, side calls included
    num_trained_tokens: int = 0
    sources: list[SourceAccount] = field(default_factory=list)  # [] = the run has one source
    violations: list[Violation] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)  # lines for people: odd, and no violation


def account(records: Records) -> Audit:
    stored = records.stored
    infra = [a for a in stored.attempts if a.outcome == Outcome.INFRA_FAILED and a.result]
    training = records.training_groups
    return Audit(
        state=records.state,
        attempts=_counted(map(_fate, stored.attempts)),
        failed_stages=_counted(str((a.result or {}).get("failed_stage") or "unknown") for a in infra),
        groups=_counted(group.state for group in training),
        dropped=_counted(group.reason or "?" for group in training if group.state == "dropped"),
        evaluations=sum(evaluation.report is not None for evaluation in stored.evaluations),
        steps=[
            Step(
                line.get("step", 0),
                line.get("policy_version"),
                records.groups_of_step(line.get("step", 0)),
                line.get("num_rollouts"),
                line.get("trained_tokens"),
                line.get("staleness_max"),
            )
            for line in records.steps
        ],
        restarts=records.restarts,
        quarantined=sorted(stored.quarantined_at),
        open_sessions=sum(
            not records.sessions[attempt.rollout_id].sealed
            for attempt in stored.attempts
            if attempt.has_ended and attempt.reward is None and attempt.rollout_id in records.sessions
        ),
        sources=[_of_source(name, records) for name in records.sources],
    )


def _of_source(name: str, records: Records) -> SourceAccount:
    groups = {gid: group for gid, group in records.stored.groups.items() if records.source_of(group) == name}
    trained = [gid for gid, group in groups.items() if group.trained_step is not None]
    attempts = [attempt for attempt in records.stored.attempts if attempt.group_id in groups]
    rewards = [a.reward for a in attempts if a.final and a.reward is not None and a.group_id in trained]
    num_trained = sum(group.trained_step is not None for group in records.training_groups)
    return SourceAccount(
        name,
        _counted(map(_fate, attempts)),
        _counted(group.state for group in groups.values() if group.evaluation is None),
        len(rewards),
        statistics.fmean(rewards) if rewards else None,
        len(trained) / num_trained if num_trained else None,
    )


def _fate(attempt: StoredAttempt) -> str:
    return RUNNING if not attempt.has_ended else LOST if attempt.result is None else str(attempt.outcome)


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())

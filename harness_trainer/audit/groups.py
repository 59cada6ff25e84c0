"""Rules on groups: each has one fate, and is trained whole or not at all.

Owns those rules and no reading, as `attempts` does.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness_trainer.audit.records import Found, Records
from harness_trainer.rollouts.stored import StoredAttempt
from harness_trainer.rollouts.types import Outcome, scoring_failure

_TRAINING = ("running", "ready", "trained", "dropped")
_EVALUATION = ("evaluating", "evaluated", "dropped")
# A draw and the opening of its group are two writes, and a quarantine may come between them.
_DRAWN_BEFORE_S = 1.0


def group_numbers(records: Records) -> Iterator[Found]:
    """Training groups are numbered from 0 without a hole, so that none can have been forgotten."""
    ids = [group.group_id for group in records.training_groups]
    for missing in sorted(set(range(max(ids, default=-1) + 1)) - set(ids)):
        yield f"group {missing}", "there are later groups, and this one is not on record"
    for group in records.stored.groups.values():
        if (group.evaluation is None) != (group.group_id >= 0):
            yield f"group {group.group_id}", "its number is of the other kind: evaluations' are below 0"


def one_fate(records: Records) -> Iterator[Found]:
    """A group is running, ready, trained or dropped, and what is written beside its state fits that alone."""
    for group in records.stored.groups.values():
        what = f"group {group.group_id}"
        if group.state not in (_TRAINING if group.evaluation is None else _EVALUATION):
            yield what, f"no such group is {group.state!r}"
        if (group.state == "trained") != (group.trained_step is not None):
            yield what, f"it is {group.state}, and its step is {group.trained_step}"
        if (group.state == "dropped") != (group.reason is not None):
            yield what, f"it is {group.state}, and the reason for dropping it is {group.reason!r}"
        if group.state in ("ready", "trained", "evaluated") and group.ready_at is None:
            yield what, f"it is {group.state}, yet nobody ever handed it over"


def whole_groups(records: Records) -> Iterator[Found]:
    """A group that is ready or trained has as many scored rollouts as `min_group` asks for."""
    config = records.rollouts
    for group in records.training_groups:
        if group.state in ("ready", "trained"):
            final = [attempt for tries in records.slots(group.group_id).values() for attempt in tries if attempt.final]
            scored = sum(attempt.reward is not None for attempt in final)
            wanted = config.group_size - sum(map(_left_out, final)) if config.min_group is None else config.min_group
            if scored < max(2, wanted):
                yield f"group {group.group_id}", f"{scored} of its rollouts are scored, {max(2, wanted)} are wanted"


def _left_out(attempt: StoredAttempt) -> bool:
    """Whether a reward function left it unscored on purpose."""
    if attempt.reward is not None or attempt.outcome in (Outcome.INFRA_FAILED, Outcome.CANCELLED):
        return False
    return not scoring_failure(attempt.reward, (attempt.result or {}).get("findings") or ())


def quarantine_holds(records: Records) -> Iterator[Found]:
    """A task in quarantine is drawn no more."""
    for group in records.training_groups:
        since = records.stored.quarantined_at.get(group.task)
        if since is not None and group.created_at > since + _DRAWN_BEFORE_S:
            late = group.created_at - since
            yield f"group {group.group_id}", f"its task {group.task} had been in quarantine for {late:.0f} s"


def evaluations_whole(records: Records) -> Iterator[Found]:
    """A finished evaluation has all its groups, and its report counts exactly their rollouts."""
    for evaluation in records.stored.evaluations:
        if evaluation.report is None:
            continue
        what = f"evaluation after step {evaluation.step}"
        groups = [
            group
            for group in records.stored.groups.values()
            if group.evaluation == evaluation.step and group.state != "dropped"
        ]
        for group in groups:
            if group.state != "evaluated":
                yield what, f"its group {group.group_id} is {group.state}"
        finals = [a for g in groups for tries in records.slots(g.group_id).values() for a in tries if a.final]
        told = evaluation.report.get("num_scored", 0) + evaluation.report.get("num_unscored", 0)
        if told != len(finals):
            yield what, f"its report counts {told} rollouts, its groups have {len(finals)}"


def sources_known(records: Records) -> Iterator[Found]:
    """In a run of several sources every group is of a task of one of them, and its results name the same source."""
    for group in records.stored.groups.values():
        source = records.source_of(group)
        if records.sources and not source:
            known = ", ".join(records.sources)
            yield f"group {group.group_id}", f"its task {group.task} is of none of the run's sources ({known})"
            continue
        for attempt in (attempt for tries in records.slots(group.group_id).values() for attempt in tries):
            said = None if attempt.result is None else attempt.result.get("source", "")
            if said not in (None, source):
                yield f"attempt {attempt.rollout_id}", f"its result says source {said!r}, its group's task {group.task}"


def evaluated_by_source(records: Records) -> Iterator[Found]:
    """The parts of an evaluation's report, one for each source, count what the whole report counts."""
    for evaluation in records.stored.evaluations:
        report = evaluation.report or {}
        parts = report.get("sources") or {}
        for name in ("num_tasks", "num_scored", "num_unscored") if parts else ():
            whole, counted = report.get(name), sum(part[name] for part in parts.values())
            if whole != counted:
                detail = f"{name} is {whole} in all, and {counted} in its sources together"
                yield f"evaluation after step {evaluation.step}", detail


RULES = (
    group_numbers,
    one_fate,
    whole_groups,
    quarantine_holds,
    evaluations_whole,
    sources_known,
    evaluated_by_source,
)

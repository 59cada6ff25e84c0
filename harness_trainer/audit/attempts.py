"""Rules on attempts and slots: each attempt ends once, each slot of a group has one result.

Owns those rules and no reading. Each yields what breaks it; its first line says what it is, for `audit.RULES`. None
reads a clock: it may be set back while a run goes on (`observed`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from harness_trainer.audit.records import Found, Records
from harness_trainer.rollouts.stored import StoredAttempt, StoredGroup
from harness_trainer.rollouts.types import Outcome

_UNSCORED = (Outcome.INFRA_FAILED, Outcome.CANCELLED)
_WHOLE = ("ready", "trained", "evaluated")  # states of groups all of whose slots are over


def one_end(records: Records) -> Iterator[Found]:
    """An attempt that ended has one known outcome, and its result says the same."""
    known = {outcome.value for outcome in Outcome}
    for attempt in records.stored.attempts:
        what = f"attempt {attempt.rollout_id}"
        if not attempt.has_ended:
            if attempt.final or attempt.result is not None:
                yield what, "it has a result, yet no end"
            continue
        if attempt.finished_at is None or attempt.outcome not in known:
            yield what, f"it ended at {attempt.finished_at} with the outcome {attempt.outcome!r}"
        yield from _agrees(what, attempt)


def _agrees(what: str, attempt: StoredAttempt) -> Iterator[Found]:
    if attempt.result is None:
        if attempt.outcome != Outcome.CANCELLED or attempt.final:
            yield what, f"{attempt.outcome} without a result: only a lost attempt has none, and it stands for no slot"
        return
    for name in ("rollout_id", "group_id", "outcome", "reward"):
        kept, column = attempt.result.get(name), getattr(attempt, name)
        if kept != column:
            yield what, f"its result says {name} {kept!r}, the table {column!r}"


def none_left_running(records: Records) -> Iterator[Found]:
    """When the run is finished, no attempt is without an end."""
    if records.state == "finished":
        for attempt in records.stored.attempts:
            if not attempt.has_ended:
                yield f"attempt {attempt.rollout_id}", "the run is over and this attempt has no end"


def one_reward(records: Records) -> Iterator[Found]:
    """What the machinery spoiled or we cancelled has no reward; a reward is None or a number, never a guess."""
    for attempt in records.stored.attempts:
        if attempt.outcome in _UNSCORED and attempt.reward is not None:
            yield f"attempt {attempt.rollout_id}", f"{attempt.outcome}, yet its reward is {attempt.reward}"


def group_of_attempt(records: Records) -> Iterator[Found]:
    """Every attempt is of a group that was opened, and of its task."""
    for attempt in records.stored.attempts:
        group = records.stored.groups.get(attempt.group_id)
        what = f"attempt {attempt.rollout_id}"
        if group is None:
            yield what, f"its group {attempt.group_id} was never opened"
        elif attempt.result is not None and attempt.result.get("task") != group.task:
            yield what, f"it is of task {attempt.result.get('task')}, its group {attempt.group_id} of {group.task}"


def one_result_per_slot(records: Records) -> Iterator[Found]:
    """In a group that is ready, trained or evaluated one attempt stands for each slot, and no slot is missing."""
    for group in records.stored.groups.values():
        if group.state in _WHOLE:
            slots = records.slots(group.group_id)
            yield from _size(records, group, sorted(slots))
            for slot, tries in slots.items():
                final = [attempt.rollout_id for attempt in tries if attempt.final]
                if len(final) != 1:
                    detail = f"{len(final)} attempts stand for it: {', '.join(final) or 'none'}"
                    yield f"group {group.group_id} slot {slot}", detail


def _size(records: Records, group: StoredGroup, slots: list[int]) -> Iterator[Found]:
    config = records.rollouts
    size = config.group_size if group.evaluation is None else config.evaluation.samples
    if slots != list(range(len(slots))) or not size <= len(slots) <= size + config.max_refills:
        yield f"group {group.group_id}", f"it has the slots {slots} where {size} and refills are wanted"


def tries_in_order(records: Records) -> Iterator[Found]:
    """The tries of a slot follow each other; only failed and cancelled ones are followed, and none after the result."""
    for group_id in records.stored.groups:
        for slot, tries in records.slots(group_id).items():
            yield from _followed(f"group {group_id} slot {slot}", tries)


def _followed(what: str, tries: Sequence[StoredAttempt]) -> Iterator[Found]:
    for attempt in tries:
        if attempt.has_ended and not attempt.final and attempt.outcome not in _UNSCORED:
            yield what, f"{attempt.rollout_id} came to {attempt.outcome}, yet it does not stand for the slot"
    for earlier, later in itertools.pairwise(tries):
        if earlier.final:
            yield what, f"{later.rollout_id} was started after {earlier.rollout_id} had come to the slot's result"
        elif earlier.finished_at is None:
            yield what, f"{later.rollout_id} was started while {earlier.rollout_id} was still running"


def kept_files(records: Records) -> Iterator[Found]:
    """Every folder of artifacts is of an attempt."""
    known = {attempt.rollout_id for attempt in records.stored.attempts}
    for name in sorted(records.kept - known):
        yield f"artifacts/{name}", "no attempt has this id"


RULES = (
    one_end,
    none_left_running,
    one_reward,
    group_of_attempt,
    one_result_per_slot,
    tries_in_order,
    kept_files,
)

"""What is odd about a record and breaks no rule: times of day that contradict each other, lines that are no events.

Owns those observations and no reading. A clock may be set back while a run goes on, and a full disk cuts a line of
events.jsonl short: neither says anything of what was run and trained, so a person is told and the run is in order.
Where the order of attempts matters to a rule (`attempts`), it is that of the store's rows and not that of the clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from harness_trainer.audit.records import Found, Records

CLOCK_S = 0.001  # what two readings of one clock may disagree by, after rounding


def unreadable_events(records: Records) -> Iterator[Found]:
    if records.num_bad_events:
        detail = f"{records.num_bad_events} lines are no events, as a full disk or a power cut leaves them"
        yield "events.jsonl", f"{detail}: restarts among them are not counted"


def clock_set_back(records: Records) -> Iterator[Found]:
    for attempt in records.stored.attempts:
        what, group = f"attempt {attempt.rollout_id}", records.stored.groups.get(attempt.group_id)
        if attempt.finished_at is not None and _is_before(attempt.finished_at, attempt.started_at):
            early = attempt.started_at - attempt.finished_at
            yield what, f"it ended {early:.1f} s before it began: the clock was set back"
        if group is not None and _is_before(attempt.started_at, group.created_at):
            early = group.created_at - attempt.started_at
            yield what, f"it began {early:.1f} s before its group {group.group_id} was opened: the clock was set back"
    for tries in (tries for group_id in records.stored.groups for tries in records.slots(group_id).values()):
        for earlier, later in itertools.pairwise(tries):
            if earlier.finished_at is not None and _is_before(later.started_at, earlier.finished_at):
                early = earlier.finished_at - later.started_at
                yield (
                    f"attempt {later.rollout_id}",
                    f"it began {early:.1f} s before the try before it, {earlier.rollout_id}, had ended:"
                    " the clock was set back, or both were at work at once",
                )


def _is_before(one: float, other: float) -> bool:
    return one < other - CLOCK_S


OBSERVATIONS = (unreadable_events, clock_set_back)

"""May another group be opened now, and is a running one too old? Arithmetic on optimizer steps; owns no state.

The learner takes whole steps of `groups_per_step` groups, oldest first. So a group with n others before it is consumed
by weights that are `n // groups_per_step` steps further than the learner's are now, and its oldest token is of the
engine's version now. How far two versions are apart is `lineage`'s business. Used by `runner`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness_trainer.rollouts.policy_config import Schedule
from harness_trainer.rollouts.policy_records import Versions


def staleness_ahead(versions: Versions, num_before: int, groups_per_step: int) -> int:
    """Steps that a group opened now will lag behind when it is consumed.

    Example: with groups of two per step, three groups before it and no step under way, staleness 1.
    """
    return versions.age(versions.engine) + num_before // groups_per_step


def may_open(schedule: Schedule, versions: Versions, counts: Mapping[str, int]) -> bool:
    """`counts`: training groups by state. With `max_staleness=0` that is: the step under way and nothing else."""
    if versions.engine == 0:  # it would sample with weights that are no policy of this run
        return False
    before = num_open(counts)
    if before >= min(schedule.max_open_groups, num_left(schedule, counts)):
        return False
    if schedule.max_staleness is None:
        return True
    return staleness_ahead(versions, before, schedule.groups_per_step) <= schedule.max_staleness


def is_too_old(schedule: Schedule, versions: Versions, sampled: Iterable[int]) -> bool:
    """Whether every later step finds a group too old. `sampled`: the policies of its tokens; empty = it has none."""
    if schedule.max_staleness is None:
        return False
    return max(map(versions.age, sampled), default=0) > schedule.max_staleness


def num_open(counts: Mapping[str, int]) -> int:
    return counts.get("running", 0) + counts.get("ready", 0)


def num_left(schedule: Schedule, counts: Mapping[str, int]) -> int:
    """Groups still to be trained, open ones included."""
    return schedule.num_groups - counts.get("trained", 0)

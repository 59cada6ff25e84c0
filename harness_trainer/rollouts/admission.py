"""May another group be opened now, and is a running one too old? Arithmetic on policy versions; owns no state.

The learner takes whole steps of `groups_per_step` groups, oldest first, and every step makes a new version. So a group
with n others before it is consumed when the engine has version `step + n // groups_per_step`, and its oldest token is
of the engine's version now. Used by `runner`.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness_trainer.rollouts.policy_config import Schedule
from harness_trainer.rollouts.policy_records import Versions


def staleness_ahead(versions: Versions, num_before: int, groups_per_step: int) -> int:
    """Versions that a group opened now will lag behind when it is consumed.

    Example: with groups of two per step, three groups before it and no step under way, staleness 1.
    """
    return versions.step + num_before // groups_per_step - versions.engine


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


def is_too_old(schedule: Schedule, versions: Versions, sampled_since: int | None) -> bool:
    """Whether every later step finds a group too old. `sampled_since`: its oldest token's policy; None = no token."""
    if schedule.max_staleness is None or sampled_since is None:
        return False
    return versions.step - sampled_since > schedule.max_staleness


def num_open(counts: Mapping[str, int]) -> int:
    return counts.get("running", 0) + counts.get("ready", 0)


def num_left(schedule: Schedule, counts: Mapping[str, int]) -> int:
    """Groups still to be trained, open ones included."""
    return schedule.num_groups - counts.get("trained", 0)

"""Which sandboxes are still to be had, told to whoever starts them ahead of need. Owns that account and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from harness_trainer.rollouts.group import Group
from harness_trainer.tasks import Task

# Of which task, for which agent, how many.
Need: TypeAlias = tuple[Task, str, int]
Plan: TypeAlias = Callable[[Sequence[Need]], None]


class Needs:
    """`plan` is told, after every change, how many sandboxes are still to be had, the most urgent first."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._boxless: dict[int, Need] = {}  # group -> rollouts of it that have no sandbox yet, oldest first
        self._next: Need | None = None

    @property
    def has_next(self) -> bool:
        return self._next is not None

    def expect(self, need: Need | None) -> None:
        """The group that will be opened next; None = not known any more. Told with the next change where it is None."""
        self._next = need
        if need is not None:
            self._tell()

    def change(self, group: Group, by: int) -> None:
        *_, count = self._boxless.get(group.group_id, (None, None, 0))
        self._boxless[group.group_id] = (group.task, group.harness, count + by)
        self._tell()

    def forget(self, group: Group) -> None:
        """The group is over."""
        *_, count = self._boxless.pop(group.group_id, (None, None, 0))
        if count > 0:
            self._tell()

    def _tell(self) -> None:
        needs = list(self._boxless.values()) + ([self._next] if self._next else [])
        self._plan([need for need in needs if need[-1] > 0])

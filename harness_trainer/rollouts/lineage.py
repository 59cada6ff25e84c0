"""How the policies of a run descend from each other, and how many optimizer steps lie between two of them.

A version number is never used for two different weights, so a learner that goes on from an older checkpoint publishes
that checkpoint anew, under a higher number: numbers jump, and what was sampled by the steps that are taken again lies
on a branch of its own. Age is therefore counted in the tree. Owns the arithmetic, pure; `policy_records` keeps the
rows, `learner.continuing` says when one is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BASE = 0  # the weights that the run started from; no engine reports it, its first name is v1


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """Example: PolicyVersion(9, step=4, parent=5): the weights of v5, after four steps, were published again as v9."""

    version: int
    step: int  # optimizer steps taken up to these weights, on the way from the base model
    parent: int | None  # the version that the learner went on from, always lower; None = nobody wrote it down


class Lineage:
    """Versions may be added in any order. Asking never fails: what is not known is judged by the numbers."""

    def __init__(self, versions: Iterable[PolicyVersion] = ()) -> None:
        self._known = {BASE: PolicyVersion(BASE, 0, None)}
        for version in versions:
            self.add(version)

    def __contains__(self, version: int) -> bool:
        return version in self._known

    def add(self, version: PolicyVersion) -> None:
        if version.parent is not None and version.parent >= version.version:
            raise ValueError(f"policy version {version.version} cannot descend from {version.parent}, which is later")
        self._known[version.version] = version

    def distance(self, sampled: int, current: int) -> int:
        """Optimizer steps from the two versions' last common ancestor to each of them, added.

        Example: v1 - v2 - v3, and v4 is v2 published again: v2 is 0 steps from v4, v1 and v3 are 1.

        Where a version is unknown, or no common ancestor is, it is the difference of the numbers, as if one descended
        from the other: every publication has a number of its own, so that is never fresher than the truth of such a
        line. Nor is it ever less than the difference of two known steps.
        """
        first, second = self._known.get(sampled), self._known.get(current)
        if first is None or second is None:
            return abs(current - sampled)
        ancestor = self._common_ancestor(first, second)
        if ancestor is None:
            return max(abs(current - sampled), abs(second.step - first.step))
        return first.step + second.step - 2 * ancestor.step

    def _common_ancestor(self, first: PolicyVersion, second: PolicyVersion) -> PolicyVersion | None:
        while first.version != second.version:
            if first.version < second.version:
                first, second = second, first
            # The later one is no ancestor of the earlier, because a parent's number is lower.
            above = None if first.parent is None else self._known.get(first.parent)
            if above is None:
                return None
            first = above
        return first

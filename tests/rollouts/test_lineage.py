"""Age is counted in optimizer steps along the tree of versions, compared with a slow search through its edges."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_trainer.rollouts.lineage import BASE, Lineage, PolicyVersion


@st.composite
def runs(draw: st.DrawFn) -> list[PolicyVersion]:
    """What a learner announces over its lives: a step further, or an earlier version's weights under a new number."""
    made = [PolicyVersion(BASE, 0, None)]
    number = 0
    for _ in range(draw(st.integers(0, 40))):
        number += draw(st.integers(1, 3))  # some numbers are announced for nothing, because the learner is killed
        again = draw(st.booleans())
        parent = draw(st.sampled_from(made)) if again else made[-1]
        made.append(PolicyVersion(number, parent.step + (0 if again else 1), parent.version))
    return made[1:]


def slow_distance(run: list[PolicyVersion], first: int, second: int) -> int:
    """Breadth-first over edges in both directions, of the weight of each edge; there is one path in a tree."""
    steps = {BASE: 0} | {v.version: v.step for v in run}
    edges: dict[int, list[int]] = {version: [] for version in steps}
    for v in run:
        assert v.parent is not None
        edges[v.version].append(v.parent)
        edges[v.parent].append(v.version)
    reached, queue = {first: 0}, deque([first])
    while queue:
        at = queue.popleft()
        for to in edges[at]:
            if to not in reached:
                reached[to] = reached[at] + abs(steps[to] - steps[at])
                queue.append(to)
    return reached[second]


@settings(max_examples=300, deadline=None)
@given(runs(), st.data())
def test_the_distance_is_the_steps_on_the_only_path(run: list[PolicyVersion], data: st.DataObject) -> None:
    lineage = Lineage(data.draw(st.permutations(run)))
    versions = st.sampled_from([BASE, *(v.version for v in run)])
    first, second, third = data.draw(versions), data.draw(versions), data.draw(versions)
    found = lineage.distance(first, second)
    assert found == slow_distance(run, first, second) == lineage.distance(second, first)
    assert lineage.distance(first, first) == 0
    assert found <= lineage.distance(first, third) + lineage.distance(third, second)


@settings(max_examples=100, deadline=None)
@given(runs(), st.data())
def test_along_one_line_of_descent_the_numbers_never_say_fresher(run: list[PolicyVersion], data: st.DataObject) -> None:
    """The rule for unknown versions judges by the numbers: for an ancestor that is too old at worst."""
    by_version = {v.version: v for v in run}
    lineage = Lineage(run)
    at = data.draw(st.sampled_from([BASE, *by_version]))
    above: int | None = at
    while above is not None:
        assert lineage.distance(above, at) <= at - above
        above = by_version[above].parent if above in by_version else None


@settings(max_examples=100, deadline=None)
@given(runs())
def test_a_run_that_was_never_killed_counts_as_its_numbers_do(run: list[PolicyVersion]) -> None:
    line = [PolicyVersion(n, n - 1, n - 1) for n in range(1, len(run) + 2)]
    lineage = Lineage(line)
    assert all(lineage.distance(a.version, b.version) == abs(a.version - b.version) for a in line for b in line)


RESUMED = Lineage(
    [
        *(PolicyVersion(n, n - 1, n - 1) for n in range(1, 5)),
        PolicyVersion(6, 1, 2),  # v2's checkpoint, after v5 had been announced for nothing
        PolicyVersion(7, 2, 6),
    ]
)


@pytest.mark.parametrize(
    ("sampled", "steps"),
    [
        (2, 1),  # the old name of the weights that v7 is one step from
        (6, 1),
        (7, 0),
        (1, 2),
        (3, 2),  # one step down the branch that died: as far as v7 from v2
        (4, 3),
        (5, 2),  # unknown: by the numbers
        (20, 13),
        (-1, 8),
    ],
)
def test_a_run_that_was_resumed_once(sampled: int, steps: int) -> None:
    assert RESUMED.distance(sampled, 7) == steps


def test_a_run_that_kept_no_tree_goes_on_by_numbers_and_steps() -> None:
    """Its checkpoint says v9, after five steps; nobody knows what v9 descends from."""
    lineage = Lineage([PolicyVersion(9, 5, None), PolicyVersion(12, 5, 9), PolicyVersion(13, 6, 12)])
    assert lineage.distance(9, 13) == 1
    assert lineage.distance(8, 13) == 5, "never fresher than the numbers say"
    assert lineage.distance(11, 13) == 2
    lineage.add(PolicyVersion(30, 4, None))  # a second checkpoint of that time
    assert lineage.distance(13, 30) == 17, "no common ancestor is known"
    lineage.add(PolicyVersion(31, 90, None))
    assert lineage.distance(30, 31) == 86, "nor fresher than their steps"


def test_a_version_that_descends_from_a_later_one_is_refused() -> None:
    for parent in (4, 5):
        with pytest.raises(ValueError, match=f"4 cannot descend from {parent}"):
            Lineage([PolicyVersion(4, 1, parent)])
    assert 4 not in Lineage() and BASE in Lineage()

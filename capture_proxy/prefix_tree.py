"""Token sequences that share their beginnings, as a tree.

Owns where a prompt leaves what came before it, and which whole sequences it begins with. Each shared stretch is stored
once, and sequences that are known to share a buffer (`TokenIds`) are not even compared, so a session costs time and
memory linear in its new tokens. It knows nothing of roles. Called by `graph`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from capture_proxy.ids import TokenIds, common_run


@dataclass(eq=False, slots=True)
class Stretch:
    """Tokens `ids[start:end]`, which follow those of `parent`.

    `owner` is a turn that has these tokens; `wholes` are the turns whose prompt and completion end with them.
    """

    ids: array[int]
    start: int
    end: int
    owner: str
    parent: Stretch | None
    children: dict[int, Stretch] = field(default_factory=dict)  # by first token
    wholes: list[str] = field(default_factory=list)


class PrefixTree:
    """Sequences go in in order of arrival; `shared` of each is answered from those before it."""

    def __init__(self) -> None:
        self.root = Stretch(array("i"), 0, 0, "", None)
        # Prompts in one buffer begin with each other: (length, number, stretch that ends there), shortest first, by
        # buffer. The buffer is held too, so that its id stays its own.
        self._known: dict[int, tuple[array[int], list[tuple[int, int, Stretch]]]] = {}

    def add(self, turn_id: str, prompt: TokenIds, completion: array[int]) -> tuple[Stretch, int, str | None]:
        """Take in a turn; an empty completion adds the prompt only.

        Returns the stretch that the prompt ends, the first position of the prompt that differs from what was there
        (its length if none does), and the turn that it leaves there (None = it only extends, or shares no token).
        """
        _, known = self._known.setdefault(id(prompt.buffer), (prompt.buffer, []))
        at = bisect_right(known, len(prompt), key=lambda entry: entry[0])
        start, _, stretch = known[at - 1] if at else (0, 0, self.root)
        end, position, left = _walk(stretch, prompt.buffer, start, len(prompt), turn_id)
        insort(known, (len(prompt), len(known), end))
        if completion:
            whole, _, _ = _walk(end, completion, 0, len(completion), turn_id)
            whole.wholes.append(turn_id)
        return end, position, left

    def nearest_wholes(self) -> dict[int, list[str]]:
        """For every stretch (by `id`), the turns of the longest whole sequence that ends at or above it."""
        nearest: dict[int, list[str]] = {}
        for stretch in self._from_the_root():
            above = nearest[id(stretch.parent)] if stretch.parent is not None else []
            nearest[id(stretch)] = stretch.wholes or above
        return nearest

    def _from_the_root(self) -> Iterator[Stretch]:
        pending = [self.root]
        while pending:
            stretch = pending.pop()
            yield stretch
            pending.extend(stretch.children.values())


def _walk(stretch: Stretch, ids: array[int], start: int, stop: int, owner: str) -> tuple[Stretch, int, str | None]:
    """Follow `ids[start:stop]` from the end of `stretch`, adding what is missing."""
    position, differs, left = start, stop, None
    while position < stop:
        child = stretch.children.get(ids[position])
        if child is None:
            if stretch.children and stretch.parent is not None:
                differs, left = position, next(reversed(stretch.children.values())).owner
            child = Stretch(ids, position, stop, owner, stretch)
            stretch.children[ids[position]] = child
            return child, differs, left
        common = common_run(child.ids, child.start, ids, position, min(child.end - child.start, stop - position))
        position += common
        if common < child.end - child.start:
            if position < stop:
                differs, left = position, child.owner
            child = _split(child, common)
            stretch.children[ids[position - common]] = child
            if left is not None:
                rest = Stretch(ids, position, stop, owner, child)
                child.children[ids[position]] = rest
                return rest, differs, left
        stretch = child
    return stretch, differs, left


def _split(stretch: Stretch, at: int) -> Stretch:
    """A new stretch of the first `at` tokens; the given one keeps its end (and who ends there) and goes below it."""
    upper = Stretch(stretch.ids, stretch.start, stretch.start + at, stretch.owner, stretch.parent)
    stretch.start += at
    stretch.parent = upper
    upper.children[stretch.ids[stretch.start]] = stretch
    return upper

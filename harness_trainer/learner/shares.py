"""Which process forwards which micro-batches of a step: as many each, about as many tokens each.

Pure functions over anything that has `tokens`. Every process takes the same number of passes, because a pass of a
sharded model needs all of them; `None` is a place that nothing is left for. `trl_compat` packs, and calls `share_out`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.learner.packed_loss import label_micro_batches, nothing_to_train


class Tree(Protocol):
    """A packed micro-batch: `tokens` are those that go through the model, one each."""

    @property
    def tokens(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Tree)


def share_out(
    samples: list[dict[str, Any]],
    pack: Callable[[list[dict[str, Any]], int], list[Any]],
    collate: Callable[[Any], dict[str, Any]],
    collate_nothing: Callable[[Any], dict[str, Any]],
    *,
    budget: int,
    objective: ObjectiveConfig,
    num_processes: int,
) -> list[dict[str, Any]]:
    """Each process's share of a step: its labelled `micro_batches`, and what all know of the whole step.

    `num_trained_tokens` is the step's, `num_spread` the most micro-batches with parts of rollouts that one process has.
    A micro-batch with `is_nothing` is there for the pass alone; `collate_nothing` makes it, and nobody counts it.
    """
    longest = max(len(sample["input_ids"]) for sample in samples)
    trees = pack_evenly(lambda limit: pack(samples, limit), budget, longest, num_processes)
    micro_batches = [collate(tree) for tree in trees]
    label_micro_batches(micro_batches, [tree.samples for tree in trees], objective)
    batch_of = {id(tree): batch for tree, batch in zip(trees, micro_batches, strict=True)}

    def nothing() -> dict[str, Any]:
        (tree,) = pack([nothing_to_train()], budget)
        return {**collate_nothing(tree), "is_spread": False, "is_nothing": True}

    hands = [
        [nothing() if tree is None else batch_of[id(tree)] for tree in hand] for hand in deal(trees, num_processes)
    ]
    shared = {
        "num_trained_tokens": sum(float(batch["global_n_tokens"][0]) for batch in micro_batches),
        "num_spread": max(sum(batch["is_spread"] for batch in hand) for hand in hands),
    }
    return [{"micro_batches": hand, **shared} for hand in hands]


def pack_evenly(pack: Callable[[int], list[T]], budget: int, longest: int, num_processes: int) -> list[T]:
    """The step's trees, in as few rounds of all processes as `budget` tokens a tree allow, and of even size.

    `pack(n)` folds the rows into trees of at most n tokens, `longest` is the longest row. A budget that fits in fewer
    rounds costs no pass; a smaller tree shares fewer prefixes, so it must not cost one either.
    """
    trees = pack(budget)
    if num_processes == 1:
        return trees
    places = math.ceil(len(trees) / num_processes) * num_processes
    even = sum(len(tree.tokens) for tree in trees) / places
    for slack in (1.0, 1.15, 1.3, 1.5):
        smaller = max(longest, math.ceil(even * slack))
        if smaller >= budget:
            break
        found = pack(smaller)
        if len(found) <= places:
            return found
    return trees


def deal(trees: Sequence[T], num_processes: int) -> list[list[T | None]]:
    """Each process's trees, in rounds of similar size; who has the fewest tokens so far gets a round's largest.

    Example with sizes 9, 8, 3 and two processes: [[9, None], [8, 3]].
    """
    if num_processes == 1:
        return [list(trees)]
    hands: list[list[T | None]] = [[] for _ in range(num_processes)]
    totals = [0] * num_processes
    ordered = sorted(trees, key=lambda tree: len(tree.tokens), reverse=True)
    for start in range(0, len(ordered), num_processes):
        fewest_first = sorted(range(num_processes), key=totals.__getitem__)
        for i, process in enumerate(fewest_first):
            tree = ordered[start + i] if start + i < len(ordered) else None
            hands[process].append(tree)
            totals[process] += 0 if tree is None else len(tree.tokens)
    return hands

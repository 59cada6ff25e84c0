"""How a step is dealt to processes: nothing lost, as many passes each, no needless ones, even loads."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_trainer.learner.shares import deal, pack_evenly


def tree(size):
    return SimpleNamespace(tokens=[0] * size)


def first_fit(sizes):
    """A packer of rows that share nothing."""

    def pack(budget):
        bins = []
        for size in sizes:
            home = next((b for b in bins if sum(b) + size <= budget), None)
            if home is None:
                bins.append(home := [])
            home.append(size)
        return [tree(sum(b)) for b in bins]

    return pack


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 8))
def test_every_tree_is_dealt_once_and_each_process_takes_as_many_passes(sizes, num_processes):
    trees = [tree(size) for size in sizes]
    hands = deal(trees, num_processes)
    assert len(hands) == num_processes
    assert sorted(id(t) for hand in hands for t in hand if t is not None) == sorted(map(id, trees))
    assert {len(hand) for hand in hands} == {math.ceil(len(trees) / num_processes)}


def test_one_process_keeps_the_order_in_which_rows_were_packed():
    trees = [tree(size) for size in (3, 9, 1)]
    assert deal(trees, 1) == [trees]


def test_the_trees_of_a_pass_are_of_similar_size_and_totals_even_out():
    hands = deal([tree(size) for size in (9, 8, 3)], 2)
    assert [[t and len(t.tokens) for t in hand] for hand in hands] == [[9, None], [8, 3]]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 6), st.integers(60, 200))
def test_even_packing_keeps_the_budget_and_never_costs_a_pass(sizes, num_processes, budget):
    pack = first_fit(sizes)
    trees = pack_evenly(pack, budget, max(sizes), num_processes)
    assert sum(len(t.tokens) for t in trees) == sum(sizes)
    assert max(len(t.tokens) for t in trees) <= budget
    assert math.ceil(len(trees) / num_processes) <= math.ceil(len(pack(budget)) / num_processes)


@pytest.mark.parametrize(("num_processes", "largest"), [(1, 100), (2, 50), (4, 30)])
def test_what_fits_into_one_tree_is_spread_over_the_processes(num_processes, largest):
    trees = pack_evenly(first_fit([10] * 10), 1000, 10, num_processes)
    assert len(trees) == num_processes
    assert max(len(t.tokens) for t in trees) == largest

"""Bytes told in terms of earlier bytes, and shared token ids: exact for any input, small for what agents send."""

import copy
import pickle
from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from capture_proxy import deltas
from capture_proxy.ids import TokenIds, common_prefix, packed

_piece = st.binary(max_size=80) | st.sampled_from([b"a" * 200, bytes(range(256)), b'{"role":"user"}' * 20])
_bytes = st.lists(_piece, max_size=6).map(b"".join)


@given(_bytes, _bytes)
@example(b"", b"")
@example(b"abc" * 100, b"")
@example(b"a" * 40_000, b"a" * 70_000)
@example(b"x" + b"a" * 70_000 + b"y", b"z" + b"a" * 70_000 + b"y")
def test_any_bytes_come_back_from_any_base(base: bytes, new: bytes) -> None:
    delta = deltas.encode(base, new)
    assert deltas.decode(base, delta) == new
    assert len(delta) <= len(new) + 12 * 52


def test_a_body_that_grows_in_the_middle_and_changes_in_its_first_line_costs_what_is_new() -> None:
    filler = bytes(i * 7919 % 251 for i in range(200_000))
    old = b'{"hash":"0123456789abcdef",' + filler + b'],"tools":[' + filler[:50_000] + b"]}"
    new = b'{"hash":"fedcba9876543210",' + filler + b',{"new":1}],"tools":[' + filler[:50_000] + b"]}"
    assert len(deltas.encode(old, new)) < 300


@pytest.mark.parametrize("delta", [b"\x01", b"\xff" * 12, b"\x00" * 8 + b"\x09\x00\x00\x00" + b"short"])
def test_a_delta_of_something_else_is_refused(delta: bytes) -> None:
    with pytest.raises(ValueError, match="delta"):
        deltas.decode(b"base", delta)


ids = st.lists(st.integers(0, 2**31 - 1), max_size=30)


@given(ids, ids, st.integers(-35, 35), st.integers(-35, 35), st.sampled_from([1, 2, -1, -3]))
def test_token_ids_read_like_the_list_they_stand_for(
    left: list[int], more: list[int], i: int, j: int, step: int
) -> None:
    shared = TokenIds(array("i", left + more), len(left))
    assert shared == left and left == shared and list(shared) == left and len(shared) == len(left)
    assert shared + more == left + more and more + shared == more + left
    assert shared[i:j:step] == left[i:j:step] and shared[i:] == left[i:]
    assert bool(shared) == bool(left) and (shared == more) == (left == more)
    assert copy.deepcopy(shared) == left and pickle.loads(pickle.dumps(shared)) == left
    if -len(left) <= i < len(left):
        assert shared[i] == left[i]
    else:
        with pytest.raises(IndexError):
            shared[i]


@given(ids, ids, ids)
def test_the_common_prefix_is_as_long_as_the_ids_agree(start: list[int], left: list[int], right: list[int]) -> None:
    length = len(start) + next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    assert common_prefix(TokenIds.of(start + left), TokenIds.of(start + right)) == length


@pytest.mark.parametrize("where", [0, 8191, 8192, 8193, 20_000, 29_999])
def test_the_first_differing_id_is_found_across_blocks(where: int) -> None:
    left = list(range(30_000))
    right = [*left[:where], 2**31 - 1, *left[where + 1 :]]
    assert common_prefix(TokenIds.of(left), TokenIds.of(right)) == where


@pytest.mark.parametrize("bad", [[-1], [2**31], [None], [1.5], ["1"]])
def test_what_is_no_token_id_is_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        packed([1, 2, *bad])

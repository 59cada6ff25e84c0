"""Token ids that several turns share.

Owns the one sequence type that lets a session of n turns keep its prompts in memory once instead of n times, and the
comparison of beginnings, of ids or anything else. It knows nothing of turns. Called by `codec`, `prefix_tree` and
whoever reads a `Turn`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, overload

_Run = TypeVar("_Run", bytes, "list[Any]", "array[int]")
_BLOCK = 1 << 13
_SIGN = array("i").itemsize - 1 if sys.byteorder == "little" else 0


class TokenIds(Sequence[int]):
    """The first `len` ids of a buffer (int32, each >= 0) that longer prompts of the same lineage go on in.

    Reads like a list and compares equal to one; slices and sums are new lists. Immutable: a buffer is only ever
    appended to, by whoever builds it, so what lies before `len` never changes.
    """

    __slots__ = ("_len", "buffer")

    def __init__(self, buffer: array[int], length: int | None = None) -> None:
        self.buffer = buffer
        self._len = len(buffer) if length is None else length

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenIds:
        """Raises ValueError for anything that is no list of token ids (0 <= id < 2**31)."""
        return ids if isinstance(ids, TokenIds) else cls(packed(ids))

    def tobytes(self, start: int = 0) -> bytes:
        """The ids from `start` on, four bytes each in the machine's order."""
        return self.buffer[start : self._len].tobytes()

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._len)
            if step > 0:
                return self.buffer[start:stop:step].tolist()
            return self.buffer[: self._len][index].tolist()
        if not -self._len <= index < self._len:
            raise IndexError("token index out of range")
        return self.buffer[index if index >= 0 else self._len + index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.buffer[: self._len])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self._len == other._len and common_prefix(self, other) == self._len
        if isinstance(other, list):
            return self._len == len(other) and self.buffer[: self._len].tolist() == other
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Sequence[int]) -> list[int]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(self[:]) if self._len <= 64 else f"<{self._len} token ids, {self[:4]} first>"

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenIds, (self.buffer[: self._len],)


# What a turn may hold: a list as it came from the engine, or a share of a session's buffer.
Ids: TypeAlias = list[int] | TokenIds


def packed(ids: Sequence[int]) -> array[int]:
    """The ids as int32. Raises ValueError for what is no token id (None, a float, negative, 2**31 or more)."""
    if isinstance(ids, TokenIds):
        return ids.buffer[: len(ids)]
    try:
        data = struct.pack(f"{len(ids)}i", *ids)  # in half the time that `array` takes to read a list
    except (TypeError, struct.error) as error:
        raise ValueError(f"not a list of token ids: {error}") from None
    result = array("i", data)
    # The byte with the sign, of each: a scan of all numbers takes as long as the rest of this.
    if not data[_SIGN :: result.itemsize].isascii():
        raise ValueError("not a list of token ids: one is negative")
    return result


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """How many leading ids are equal."""
    end = min(len(left), len(right))
    return end if left.buffer is right.buffer else common_run(left.buffer, 0, right.buffer, 0, end)


def common_run(left: _Run, left_at: int, right: _Run, right_at: int, limit: int | None = None) -> int:
    """How many items (ids, bytes, messages) from the given places on are equal, at most `limit`.

    Compares by the block and then by halves, so in C.
    """
    low, high = 0, min(len(left) - left_at, len(right) - right_at)
    high = high if limit is None else min(high, limit)
    while low + _BLOCK <= high:
        if left[left_at + low : left_at + low + _BLOCK] != right[right_at + low : right_at + low + _BLOCK]:
            high = low + _BLOCK - 1
            break
        low += _BLOCK
    if left[left_at + low : left_at + high] == right[right_at + low : right_at + high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[left_at + low : left_at + middle] == right[right_at + low : right_at + middle]:
            low = middle
        else:
            high = middle - 1
    return low

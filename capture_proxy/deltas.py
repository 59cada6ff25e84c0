"""One byte string said in terms of an earlier one.

Owns the form in which the raw log of a session is kept: an agent sends its whole history with every call, so a body is
nearly the body before it. Copies are found from both ends and, where something in between changed (a hash or a time in
an early line), by looking the next stretch up. Called by `codec` and `store`.

A delta is any number of records: three little-endian uint32 (copy from, copy length, literal length), then the literal.
"""

from __future__ import annotations

import struct

from capture_proxy.ids import common_run

_RECORD = struct.Struct("<III")
_ANCHOR = 48  # bytes that must agree before a stretch is taken for the same
_MAX_COPIES = 24
_BLOCK = 1 << 15


def encode(base: bytes, new: bytes) -> bytes:
    """`new` as copies out of `base` and literals; never much longer than `new` itself."""
    head = common_run(base, 0, new, 0)
    tail = _common_suffix(base, new, min(len(base), len(new)) - head)
    records = [(0, head, b"")]
    old_end, end = len(base) - tail, len(new) - tail
    old_at, at = head, head
    for _ in range(_MAX_COPIES):
        found = _next_copy(base, old_at, old_end, new, at, end)
        if found is None:
            break
        old_at, start, length = found
        records += [(0, 0, new[at:start]), (old_at, length, b"")]
        old_at, at = old_at + length, start + length
    records += [(0, 0, new[at:end]), (old_end, tail, b"")]
    kept = [record for record in records if record[1] or record[2]]
    return b"".join(_RECORD.pack(start, length, len(text)) + text for start, length, text in kept)


def decode(base: bytes, delta: bytes) -> bytes:
    """Raises ValueError for what `encode` did not make of this `base`."""
    parts, at = [], 0
    try:
        while at < len(delta):
            start, length, literal = _RECORD.unpack_from(delta, at)
            at += _RECORD.size
            if start + length > len(base) or at + literal > len(delta):
                raise ValueError("the delta is not of this base")
            parts.append(base[start : start + length])
            parts.append(delta[at : at + literal])
            at += literal
    except struct.error:
        raise ValueError("the delta ends in the middle of a record") from None
    return b"".join(parts)


def _common_suffix(left: bytes, right: bytes, limit: int) -> int:
    """How many bytes before the ends are equal, at most `limit`."""
    low = 0
    while low + _BLOCK <= limit and _same_before(left, right, low, low + _BLOCK):
        low += _BLOCK
    high = min(low + _BLOCK, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if _same_before(left, right, low, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _same_before(left: bytes, right: bytes, low: int, high: int) -> bool:
    return left[len(left) - high : len(left) - low] == right[len(right) - high : len(right) - low]


def _next_copy(base: bytes, old_at: int, old_end: int, new: bytes, at: int, end: int) -> tuple[int, int, int] | None:
    """(place in `base`, place in `new`, length) of the next stretch that both ranges have; None = none was found."""
    step, offset = _ANCHOR, at
    while offset + _ANCHOR <= end and old_end - old_at >= _ANCHOR:
        place = base.find(new[offset : offset + _ANCHOR], old_at, old_end)
        if place >= 0:
            reach = min(place - old_at, offset - at, _BLOCK)
            back = _common_suffix(base[place - reach : place], new[offset - reach : offset], reach)
            place, offset = place - back, offset - back
            return place, offset, common_run(base, place, new, offset, min(old_end - place, end - offset))
        offset += step
        step *= 2  # a bounded number of look-ups, however long the part that changed
    return None

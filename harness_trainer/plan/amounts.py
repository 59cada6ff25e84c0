"""Numbers with where they come from, and sums in which an unknown part makes the whole unknown. Owns no formula."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Source: TypeAlias = Literal["given", "measured", "computed", "assumed", "unknown"]


@dataclass(frozen=True, slots=True)
class Number:
    """Example: Number(12.5, "measured", "mean of 40 rollouts"). `value` None = not known, and `source` says so."""

    value: float | None
    source: Source
    why: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A line of an account. Example: Part("gradients", 538_000_000, "trained parameters x 4 B")."""

    name: str
    bytes: int | None  # None = not known
    how: str


def total(parts: Iterable[Part]) -> int | None:
    """None when any part is not known."""
    summed = 0
    for part in parts:
        if part.bytes is None:
            return None
        summed += part.bytes
    return summed


def times(*factors: float | None) -> float | None:
    """The product; None when any factor is not known."""
    product = 1.0
    for factor in factors:
        if factor is None:
            return None
        product *= factor
    return product


def whole(number: float | None) -> int | None:
    return None if number is None else round(number)

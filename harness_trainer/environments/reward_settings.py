"""Settings that every environment has whose reward functions are a person's. Owns their forms, and what is nonsense."""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator


def _listed(value: object) -> object:
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def _finite(value: dict[str, float]) -> dict[str, float]:
    if not all(math.isfinite(weight) for weight in value.values()):
        raise ValueError("weights must be finite numbers")
    return value


RewardTargets: TypeAlias = Annotated[list[str], BeforeValidator(_listed)]  # also as one text, with commas between
RewardWeights: TypeAlias = Annotated[dict[str, float], AfterValidator(_finite)]

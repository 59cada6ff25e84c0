"""How an agent is led to the gateway: by a base URL, or by interception of what it sends to its provider.

Owns the choice and the laying of an adapter's `intercept` variant over it. An adapter that takes no base URL any more
says so itself (`needs_intercept`); starting a proxy and giving the sandbox its certificate are `rollouts`'. Called by
whoever loads an adapter to run it.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from harness_trainer.errors import ConfigError
from harness_trainer.harnesses.base import Harness

Entry: TypeAlias = Literal["auto", "base_url", "intercept"]


def entered(harness: Harness, entry: Entry) -> Harness:
    """The adapter as it is run with this entry; "auto" is the base URL wherever the agent takes one.

    Raises ConfigError when the agent cannot be led to the gateway that way.
    """
    if harness.needs_intercept:
        if entry == "base_url":
            raise ConfigError(f"harness {harness.name} takes no base URL: set rollouts.entry to intercept or auto")
        return _laid_over(harness)
    if entry != "intercept":
        return harness
    if harness.intercept is None:
        raise ConfigError(
            f"harness {harness.name} does not say how it runs without a base URL: set rollouts.entry to base_url, "
            "or give its adapter an `intercept:` variant"
        )
    return _laid_over(harness)


def _laid_over(harness: Harness) -> Harness:
    variant = harness.intercept
    if variant is None:
        return harness
    data = harness.model_dump()
    for name in ("env", "env_json", "files"):
        data[name] = _merged(data[name], getattr(variant, name))
    if variant.argv is not None:
        data["argv"] = variant.argv
    return Harness.model_validate(data | {"needs_intercept": True})


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged

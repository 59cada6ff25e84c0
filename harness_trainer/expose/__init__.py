"""How sandboxes on other machines reach the gateway: the settings, as one union. `public_way` is the part of a run."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Field

from harness_trainer.expose.config import (
    CloudflaredExpose,
    CommandExpose,
    DirectExpose,
    GradioExpose,
    NoExpose,
)

__all__ = [
    "CloudflaredExpose",
    "CommandExpose",
    "DirectExpose",
    "ExposeConfig",
    "GradioExpose",
    "NoExpose",
    "as_expose",
]

ExposeConfig: TypeAlias = Annotated[
    NoExpose | DirectExpose | CloudflaredExpose | GradioExpose | CommandExpose, Field(discriminator="type")
]


def as_expose(value: Any) -> Any:
    """`cloudflared` is short for its type."""
    return {"type": value} if isinstance(value, str) else value

"""One finding of a preflight. Shared by the checks of this room and whoever shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """Example: Check("port 8000 for the engine", False, "in use", "stop what listens there, or --engine.port 0").

    `fix` is what to do, "" when there is nothing to mend. What is not `required` keeps no run from starting.
    """

    name: str
    ok: bool
    found: str
    fix: str = ""
    required: bool = True

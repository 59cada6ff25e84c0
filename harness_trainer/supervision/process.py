"""What the supervisor needs of a process that it started, here or in another container, and what that inherits.

Owns the contract and `search_path`. `sandboxes.lifecycle.OwnedProcess` keeps the contract for this machine,
`remote.RemoteProcess` for a part that runs elsewhere; `parts` is the caller.
"""

from __future__ import annotations

import os
from typing import Protocol


class PartProcess(Protocol):
    """Methods may be called from any thread."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative = signal."""
        ...

    def alive(self) -> bool: ...

    def stop(self, grace_s: float = 5.0, *, successor: bool = False) -> int | None:
        """End it and all that it started; idempotent, blocking. `successor` = another of its kind is started next."""
        ...


def search_path() -> dict[str, str]:
    """PYTHONPATH as a part gets it, which works in another folder: with full paths. {} = this process has none."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, given.split(os.pathsep)))} if given else {}

"""Whether the containers that owners lived in are still there.

A process of another PID namespace cannot be looked up. Where several containers share a folder of records, one after
the other, each holds a lock in it for as long as its first process lives: the kernel lets go of it however that ends.
Called by `ownership`; `hold` by the first process of a container. Without the variable nothing is known of others.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import IO

VARIABLE = "HARNESS_TRAINER_NAMESPACES"  # the folder of the locks, shared by the containers


def hold() -> IO[str] | None:
    """Say that this namespace is alive until the file is closed; None = the variable is not set. Raises OSError."""
    path = _lock_of(os.readlink("/proc/self/ns/pid"))
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def has_ended(pid_namespace: str) -> bool:
    """Whether it certainly has; False also where that cannot be known."""
    path = _lock_of(pid_namespace)
    if path is None:
        return False
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or never made
        return False
    return True


def _lock_of(pid_namespace: str) -> Path | None:
    folder = os.environ.get(VARIABLE)
    number = re.search(r"\d+", pid_namespace)
    return Path(folder) / f"{number[0]}.lock" if folder and number else None

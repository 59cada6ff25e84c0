"""The content hash of a folder that an image is built from: equal folders, equal hash, on every backend.

Owns what of an entry counts. Which entries a folder consists of, and what else goes into the hash, its callers say:
`docker_context` and `e2b_templates`. Blocking.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path


def digest_of(parts: Iterable[bytes]) -> str:
    """SHA-256 in hex; each part goes in with its length, so that none can pass for the end of the one before."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(b"%d:" % len(part))
        whole.update(part)
    return whole.hexdigest()


def entry_parts(folder: Path, name: str | Path) -> Iterator[bytes]:
    """Of one entry: its name below the folder, type and permissions, and its bytes or the link's target."""
    path = folder / name
    info = path.lstat()
    yield os.fsencode(name)
    yield b"%o" % info.st_mode  # type and permissions
    if stat.S_ISLNK(info.st_mode):
        yield os.fsencode(os.readlink(path))
    elif stat.S_ISREG(info.st_mode):
        with path.open("rb") as file:
            yield hashlib.file_digest(file, "sha256").digest()

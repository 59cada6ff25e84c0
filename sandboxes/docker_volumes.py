"""When this program runs in a container itself, beside the engine that makes its sandboxes.

Owns the one thing that differs then: the engine does not see this container's folders, so the sockets that relays need
lie on a volume that both know, by name. Used by `docker*` and by whoever makes a socket for relays. Reads the
environment, asks no engine.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HARNESS_TRAINER_SOCKET_VOLUME"  # NAME:FOLDER; unset = the engine sees this machine's folders


@dataclass(frozen=True, slots=True)
class SocketVolume:
    """Example: SocketVolume("harness-trainer_sockets", Path("/run/harness-trainer"))."""

    name: str  # as the engine calls it
    folder: Path  # where it is mounted here

    def inside(self, path: Path, mounted_at: str) -> str:
        """The path of a file on the volume in a container that has the volume at `mounted_at`."""
        return f"{mounted_at}/{path.relative_to(self.folder)}"


def socket_volume() -> SocketVolume | None:
    """None = no container of compose.yaml, or one without sandboxes in Docker."""
    name, colon, folder = os.environ.get(VARIABLE, "").partition(":")
    return SocketVolume(name, Path(folder)) if name and colon and folder.startswith("/") else None


def sockets_root() -> Path:
    """Below which folders for relays' sockets are made."""
    volume = socket_volume()
    return Path(tempfile.gettempdir()) if volume is None else volume.folder


def open_to_relays(folder: Path) -> None:
    """A relay that has the whole volume must get through to the folders in it, which it knows by name. Raises OSError.

    A relay that has one folder mounted needs no way to it.
    """
    if socket_volume() is not None:
        folder.chmod(0o711)

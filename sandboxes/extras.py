"""SDKs that only some sandboxes need: which extra of the package brings each, and what to say where it is missing."""

from __future__ import annotations

import importlib.util

from sandboxes.base import SandboxError

# Library to extra.
EXTRAS = {"docker": "docker", "e2b": "e2b"}


def install_command(extra: str) -> str:
    """Example: install_command("docker") == "pip install 'harness-trainer[docker]'"."""
    return f"pip install 'harness-trainer[{extra}]'"


def is_installed(library: str) -> bool:
    """Whether it could be imported, without importing it."""
    return importlib.util.find_spec(library) is not None


def require(library: str) -> None:
    """Raises SandboxError with the command that installs it."""
    if not is_installed(library):
        raise SandboxError(f"{library} is not installed here: {install_command(EXTRAS[library])}")

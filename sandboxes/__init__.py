"""Where untrusted code runs: the union of sandbox configs and the one factory.

Backends are imported on first use, so that `sandboxes.lifecycle` stays cheap for the command line and the supervisor.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from typing import TypeAlias

    from pydantic import Field

    from sandboxes.base import Access, Backend
    from sandboxes.docker import DockerConfig
    from sandboxes.e2b import E2BConfig
    from sandboxes.harbor import HarborConfig
    from sandboxes.local import LocalConfig

    SandboxConfig: TypeAlias = Annotated[
        LocalConfig | DockerConfig | E2BConfig | HarborConfig, Field(discriminator="type")
    ]

__all__ = ["SandboxConfig", "open_backend"]


def __getattr__(name: str) -> Any:
    if name == "SandboxConfig":
        from pydantic import Field

        from sandboxes.docker import DockerConfig
        from sandboxes.e2b import E2BConfig
        from sandboxes.harbor import HarborConfig
        from sandboxes.local import LocalConfig

        return Annotated[LocalConfig | DockerConfig | E2BConfig | HarborConfig, Field(discriminator="type")]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open_backend(config: SandboxConfig, *, run_id: str, registry: Path, access: Access) -> Backend:
    """A backend that is not open yet: enter it as an async context manager.

    `registry` is the folder of ownership records (`lifecycle.default_registry()`), `run_id` names the run in them.
    Raises SandboxError with the install command where the backend's SDK is missing.
    """
    from sandboxes.extras import require

    if config.type == "docker":
        from sandboxes.docker import DockerBackend

        require("docker")
        return DockerBackend(config, run_id=run_id, registry=registry, access=access)
    if config.type == "e2b":
        from sandboxes.e2b import E2BBackend

        require("e2b")
        return E2BBackend(config, run_id=run_id, registry=registry, access=access)
    if config.type == "harbor":
        from sandboxes.harbor import HarborBackend

        return HarborBackend(config, run_id=run_id, registry=registry, access=access)
    from sandboxes.local import LocalBackend

    return LocalBackend(config, run_id=run_id, registry=registry, access=access)

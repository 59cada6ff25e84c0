"""Opening the E2B backend on the stand-in, as the E2B tests do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sandboxes.base import Access, BoxSpec, Limits
from sandboxes.e2b import E2BBackend, E2BConfig
from tests.sandboxes.e2b_standin import KEY, Standin

SPEC = BoxSpec("task", limits=Limits(deadline_s=300))


def config_of(standin: Standin, **settings: Any) -> E2BConfig:
    return E2BConfig(api_url=standin.url, sandbox_url=standin.url, **settings)


def open_e2b(
    standin: Standin,
    folder: Path,
    *,
    access: Access | None = None,
    api_key: str | None = KEY,
    run_id: str = "run",
    look_s: float = 60.0,
    **settings: Any,
) -> E2BBackend:
    """Not open yet. Records in `folder`/owned; quick to try again."""
    return E2BBackend(
        config_of(standin, **settings),
        run_id=run_id,
        registry=folder / "owned",
        access=access or Access(),
        cache=folder / "cache",
        api_key=api_key,
        look_s=look_s,
        first_wait_s=0.02,
    )


def records(folder: Path) -> list[str]:
    """Names of what is still on record."""
    return sorted(path.name for path in (folder / "owned").glob("*.json"))

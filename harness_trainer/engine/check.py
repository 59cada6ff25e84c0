"""Refuses an engine that cannot be trained from, before a rollout is spent on it. `capture_proxy` has the probe."""

from __future__ import annotations

import asyncio

from capture_proxy.engines.base import Capabilities
from harness_trainer.errors import EngineFailed


def require_trainable(url: str) -> Capabilities:
    """What the engine at `url` was seen to do. Blocking, about a second.

    Raises EngineFailed when it does not answer, or naming every flag that is missing.
    """
    return asyncio.run(_require_trainable(url))


async def _require_trainable(url: str) -> Capabilities:
    import httpx

    from capture_proxy.engines.probe import probe
    from capture_proxy.errors import CaptureError

    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        try:
            capabilities = await probe(http)
        except CaptureError as error:
            raise EngineFailed(f"the engine at {url} could not be probed: {error}") from error
    if not capabilities.trainable:
        raise EngineFailed(f"the engine at {url} cannot be trained from; it lacks {', '.join(capabilities.missing)}")
    return capabilities

"""Refuses an engine that cannot be trained from, before a rollout is spent on it. `capture_proxy` has the probe."""

from __future__ import annotations

import asyncio

from capture_proxy.engines.base import Capabilities
from harness_trainer.errors import EngineFailed


def require_trainable(url: str) -> Capabilities:
    """What the engine at `url` was seen to do. Blocking, about a second.

    Raises EngineFailed when it does not answer, or naming every flag that is missing.
    """
    capabilities = what_serves(url)
    if not capabilities.trainable:
        raise EngineFailed(f"the engine at {url} cannot be trained from; it lacks {', '.join(capabilities.missing)}")
    return capabilities


def what_serves(url: str, *, model: str | None = None, key: str | None = None) -> Capabilities:
    """The same of any OpenAI-compatible server; `model` None = the only one it has, `key` its API key.

    Raises EngineFailed when it does not answer, or has several models and none was named.
    """
    return asyncio.run(_what_serves(url, model, key))


# Seconds for one answer. On a CPU that others use, the first one, which compiles, has taken more than a minute.
_ANSWER_S = 300.0


async def _what_serves(url: str, model: str | None, key: str | None) -> Capabilities:
    import httpx

    from capture_proxy.engines.probe import probe
    from capture_proxy.errors import CaptureError

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_ANSWER_S, trust_env=False) as http:
        try:
            return await probe(http, model=model)
        except CaptureError as error:
            raise EngineFailed(f"the engine at {url} could not be probed: {error}") from error

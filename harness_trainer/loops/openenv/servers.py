"""OpenEnv servers that are started here, or only talked to: a process, a container, an address.

Owns their start and their end. A process ends with its owner, also after `kill -9`; a container is on record before it
exists, carries our labels, and is reaped at the next start if its owner died. Called by `environment`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.loops.base import EnvironmentFault
from sandboxes.lifecycle import LifecycleError, OwnedProcess, remove_tree, start_process
from sandboxes.ownership import Claim, claim, default_registry

log = logging.getLogger("harness_trainer.loops")

_TAIL = 1500  # characters of a server's log that are shown when it fails
_POLL_S = 0.05
_LIMIT = "MAX_CONCURRENT_ENVS"  # the variable that OpenEnv's own servers read


class Alive(Protocol):
    async def __call__(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Server:
    """Example: Server("http://127.0.0.1:40213", max_sessions=64)."""

    url: str
    max_sessions: int | None = None  # None = it does not say
    alive: Alive | None = None  # None = it is not ours to start again
    idle_timeout_s: float | None = None  # it ends a session that is silent for as long; None = it does not say


def serving(config: OpenEnvConfig, registry: Path | None = None) -> AbstractAsyncContextManager[Server]:
    """The server that `config` names, until the context ends. Entering raises EnvironmentFault."""
    registry = registry or default_registry()
    if config.kind == "local":
        return _process(config, registry)
    if config.kind == "docker":
        from harness_trainer.loops.openenv.containers import container

        return container(config, registry)
    return _address(config)


def server_environment(config: OpenEnvConfig) -> dict[str, str]:
    """What is said to a server that is started, by variables."""
    shared = config.max_episodes is not None and not config.per_episode
    limit = {_LIMIT: str(config.max_episodes)} if shared else {}
    return limit | config.environment


@asynccontextmanager
async def _address(config: OpenEnvConfig) -> AsyncIterator[Server]:
    yield Server(config.url or config.target)


@asynccontextmanager
async def _process(config: OpenEnvConfig, registry: Path) -> AsyncIterator[Server]:
    owned = await asyncio.to_thread(claim, registry, "openenvlog")
    starting: asyncio.Future[OwnedProcess] | None = None
    try:
        try:
            folder = await asyncio.to_thread(owned.make_folder, Path(tempfile.gettempdir()))
            ready = folder / "ready.json"
            starting = asyncio.ensure_future(asyncio.to_thread(_start, config, registry, ready))
            process = await asyncio.shield(starting)
        except (LifecycleError, OSError) as error:
            raise EnvironmentFault(f"the server {config.named} could not be started: {error}") from error
        found = await _wait(config, process, ready)

        async def alive() -> bool:
            return process.alive()

        url = f"http://127.0.0.1:{found['port']}"
        yield Server(url, found["max_sessions"], alive, found["idle_timeout_s"])
        if not process.alive():
            log.warning("the environment's server %s ended by itself: %s", config.named, _tail(process.log_path))
    finally:
        await asyncio.shield(_ended(starting, owned))


async def _ended(starting: asyncio.Future[OwnedProcess] | None, owned: Claim) -> None:
    """Also of a start that was given up: it is waited for."""
    if starting is not None:
        await asyncio.wait([starting])
        if starting.exception() is None:
            await starting.result().stop_async()
    await asyncio.to_thread(_drop, owned)


def _drop(owned: Claim) -> None:
    try:
        for folder in owned.folders:
            remove_tree(Path(folder))
    except OSError as error:
        log.warning("the folder of %s stays on record: %s", owned.id, error)
        return
    owned.release()


def _start(config: OpenEnvConfig, registry: Path, ready: Path) -> OwnedProcess:
    order = {
        "app": config.named,
        "ready": str(ready),
        "idle_timeout_s": config.idle_timeout_s,
        "ping_interval_s": config.ping_interval_s,
        "ping_timeout_s": config.ping_timeout_s,
        "max_message_mb": config.max_message_mb,
    }
    return start_process(
        [sys.executable, "-m", "harness_trainer.loops.openenv.serve", json.dumps(order)],
        env={**os.environ, **server_environment(config)},
        cwd=Path.cwd(),
        log_path=ready.with_name("server.log"),
        registry=registry,
        kind="openenv",
    )


async def _wait(config: OpenEnvConfig, process: OwnedProcess, ready: Path) -> dict[str, Any]:
    until = time.monotonic() + config.start_timeout_s
    while (found := _read(ready)) is None:
        if not process.alive():
            raise EnvironmentFault(f"the server {config.named} ended at its start: {_tail(process.log_path)}")
        if time.monotonic() > until:
            raise EnvironmentFault(
                f"the server {config.named} did not listen within {config.start_timeout_s:g} s: raise"
                f" --env.start-timeout-s; its log ends: {_tail(process.log_path)}"
            )
        await asyncio.sleep(_POLL_S)
    return found


def _read(ready: Path) -> dict[str, Any] | None:
    """What the server wrote once it listened; None = it does not yet."""
    try:
        found: dict[str, Any] = json.loads(ready.read_text())
    except FileNotFoundError:
        return None
    return found


def _tail(path: Path) -> str:
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        text = ""
    return text[-_TAIL:] or "(it wrote nothing)"

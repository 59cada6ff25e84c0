"""A container that serves an OpenEnv environment, from an image.

Owns its start and its end. It is on record before it exists and carries our labels, so that whatever ends us, the next
start (or `harness-trainer clean`) removes it. Its port is published on the loopback of the engine's machine. Called by
`servers`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.loops.base import EnvironmentFault
from harness_trainer.loops.openenv.servers import Server, server_environment
from sandboxes.docker_api import ENGINE_ERRORS, connect, is_absent, reason
from sandboxes.docker_labels import engine_address, engine_of, labels_of
from sandboxes.docker_reaping import Engine, remove_thing
from sandboxes.lifecycle import LifecycleError
from sandboxes.ownership import Claim, claim

log = logging.getLogger("harness_trainer.loops")

_POLL_S = 0.2
_PULL_TIMEOUT_S = 1800.0


@asynccontextmanager
async def container(config: OpenEnvConfig, registry: Path) -> AsyncIterator[Server]:
    """Raises EnvironmentFault."""
    address = engine_address()
    owned = await asyncio.to_thread(claim, registry, "openenv", engine=engine_of(address))
    starting = asyncio.ensure_future(asyncio.to_thread(_start, config, address, owned))
    try:
        try:
            box = await asyncio.shield(starting)
        except ENGINE_ERRORS as error:
            raise EnvironmentFault(
                f"the image {config.named} could not be started by the Docker engine at {address}: {reason(error)}"
            ) from error
        await _wait(config, box)
        yield Server(box.url, alive=box.alive)
    finally:
        await asyncio.shield(_ended(starting, address, owned))


class _Box:
    def __init__(self, api: Any, made: str, url: str) -> None:
        self.url = url
        self._api = api
        self._id = made

    async def alive(self) -> bool:
        return await asyncio.to_thread(self._runs)

    def close(self) -> None:
        self._api.close()

    def _runs(self) -> bool:
        try:
            return bool(self._api.inspect_container(self._id)["State"]["Running"])
        except ENGINE_ERRORS:
            return False

    def log(self) -> str:
        try:
            return str(self._api.logs(self._id, tail=20).decode(errors="replace")).strip() or "(it wrote nothing)"
        except ENGINE_ERRORS as error:
            return reason(error)


async def _ended(starting: asyncio.Future[_Box], address: str, owned: Claim) -> None:
    """Also of a start that was given up: it is waited for, so that nothing comes after the removal."""
    await asyncio.wait([starting])
    if starting.exception() is None:
        starting.result().close()
    await asyncio.to_thread(_remove, address, owned)


def _start(config: OpenEnvConfig, address: str, owned: Claim) -> _Box:
    api = connect(address, timeout_s=_PULL_TIMEOUT_S)  # a pull sends nothing for long
    _have_image(api, config.named)
    port = f"{config.port}/tcp"
    host = urlsplit(address).hostname if address.startswith("tcp://") else None
    made = api.create_container(
        config.named,
        labels=labels_of(owned, "container"),
        environment=server_environment(config),
        ports=[config.port],
        host_config=api.create_host_config(
            port_bindings={port: (None,) if host else ("127.0.0.1",)}, security_opt=["no-new-privileges"], init=True
        ),
    )["Id"]
    api.start(made)
    bound = api.inspect_container(made)["NetworkSettings"]["Ports"].get(port) or []
    if not bound:
        raise EnvironmentFault(
            f"the container of {config.named} ended at its start: {_Box(api, made, '').log()}; run the image by hand"
        )
    return _Box(api, made, f"http://{host or '127.0.0.1'}:{bound[0]['HostPort']}")


def _have_image(api: Any, image: str) -> None:
    try:
        api.inspect_image(image)
    except ENGINE_ERRORS as error:
        if not is_absent(error):
            raise
        name, colon, tag = image.rpartition(":")
        named = colon and "/" not in tag
        api.pull(name if named else image, tag=tag if named else "latest")


async def _wait(config: OpenEnvConfig, box: _Box) -> None:
    until = time.monotonic() + config.start_timeout_s
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as http:
        while True:
            try:
                if (await http.get(f"{box.url}/health")).is_success:
                    return
            except httpx.HTTPError:
                pass  # it does not listen yet
            if not await box.alive():
                raise EnvironmentFault(f"the container of {config.named} ended at its start: {box.log()}")
            if time.monotonic() > until:
                raise EnvironmentFault(
                    f"the container of {config.named} did not answer at port {config.port} within"
                    f" {config.start_timeout_s:g} s: set --env.port or raise --env.start-timeout-s; its log ends:"
                    f" {box.log()}"
                )
            await asyncio.sleep(_POLL_S)


def _remove(address: str, owned: Claim) -> None:
    """Whatever there is of it; what cannot be removed stays on record, for the next start to try."""
    api = None
    try:
        engine = Engine(address)
        try:
            api = connect(address)
            problems = [remove_thing(api, thing) for thing in engine.find_claim(owned.id)]
        finally:
            engine.close()
    except (LifecycleError, *ENGINE_ERRORS) as error:
        problems = [str(error)]
    finally:
        if api is not None:
            api.close()
    if not any(problems):
        owned.release()
    else:
        log.warning("the container of %s stays on record: %s", owned.id, "; ".join(filter(None, problems)))

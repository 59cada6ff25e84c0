"""A run in a process of its own, for tests that kill it: starts sandboxes in the real engine, prints their ids, waits.

Usage: network_owner.py ENGINE IMAGE REGISTRY RUN GATEWAY_URL SPARES MODE...
With spares, each sandbox takes one, and there are others when the ids are printed.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from sandboxes.base import Access, BoxSpec, Endpoint, Network, NetworkMode
from sandboxes.docker import DockerBackend, DockerConfig


async def main(
    address: str, image: str, registry: str, run_id: str, gateway_url: str, spares: str, *modes: str
) -> None:
    config = DockerConfig(host=address, relay_base=image, spare_relays=int(spares))
    access = Access(gateway=Endpoint(url=gateway_url))
    async with contextlib.AsyncExitStack() as stack:
        backend = DockerBackend(config, run_id=run_id, registry=Path(registry), access=access)
        run = await stack.enter_async_context(backend)
        ids = []
        for mode in modes:
            spec = BoxSpec("killed", image=image, user="root", network=Network(NetworkMode(mode)))
            await run.prepare(spec)
            await run.network.spares.settled()
            ids.append((await stack.enter_async_context(run.sandbox(spec))).sandbox_id)
        await run.network.spares.settled()
        print(json.dumps(ids), flush=True)
        await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))

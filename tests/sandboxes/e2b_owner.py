"""A run that makes E2B sandboxes, says so, and waits to be killed.

Arguments: API URL, folder, run, how many, fault point.
Fault points: "started" = all are up; "creating" = the requests are on their way; "running", "stopping" = meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sandboxes.base import Access, BoxSpec, Command, Limits
from sandboxes.e2b import E2BBackend, E2BConfig


async def main(url: str, folder: str, run_id: str, count: str, point: str) -> None:
    config = E2BConfig(api_url=url, sandbox_url=url)
    registry = Path(folder) / "owned"
    async with E2BBackend(config, run_id=run_id, registry=registry, access=Access()) as backend:
        boxes = [backend.sandbox(BoxSpec("task", limits=Limits(deadline_s=600))) for _ in range(int(count))]
        starts = asyncio.gather(*(box.__aenter__() for box in boxes))
        if point == "creating":
            await asyncio.sleep(0.3)  # the service takes longer
        else:
            await starts
        work = asyncio.sleep(600)
        if point == "running":
            work = asyncio.gather(*(box.run(Command(["sleep", "600"])) for box in boxes))
        elif point == "stopping":  # the service does not answer
            work = asyncio.gather(*(box.stop() for box in boxes))
        waiting = asyncio.ensure_future(work)
        await asyncio.sleep(0.2)
        print("ready", flush=True)
        await waiting


asyncio.run(main(*sys.argv[1:]))

"""A run in a process of its own, for tests that kill it: starts local sandboxes with busy agents and waits.

Prints their ids. Usage: owner_script.py ISOLATION REGISTRY ROOT COUNT [JOB]. With JOB, a script, the sandboxes get a
detached job and nothing else; printed are then [sandbox id, job id] pairs.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from local_boxes import backend

from sandboxes.base import BoxSpec, Command


async def main(isolation: str, registry: Path, root: Path, count: int, job: str | None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        opened = await stack.enter_async_context(backend(isolation, root, registry))
        boxes = [await stack.enter_async_context(opened.sandbox(BoxSpec("killed"))) for _ in range(count)]
        if job is not None:
            ids = [[box.sandbox_id, await box.start_job(Command.shell(job))] for box in boxes]
            print(json.dumps(ids), flush=True)
            await asyncio.Event().wait()
        for box in boxes:
            await box.run(Command.shell("sleep 600 & setsid sleep 600 & env -i setsid sleep 600 &"))
        print(json.dumps([box.sandbox_id for box in boxes]), flush=True)
        await asyncio.gather(*(box.run(Command(["sleep", "600"])) for box in boxes))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    asyncio.run(
        main(arguments[0], Path(arguments[1]), Path(arguments[2]), int(arguments[3]), (arguments[4:] or [None])[0])
    )

"""Many E2B sandboxes whose agents wait, where every wait is a connection of its own (no HTTP/2)."""

import asyncio
import subprocess
import sys
from pathlib import Path

from benchmarks.waiting_boxes import WaitingBoxes
from sandboxes.base import Command
from tests.sandboxes.e2b_opening import SPEC, open_e2b


async def _wait_for_many(folder: Path, num: int) -> None:
    boxes = WaitingBoxes(folder / "standin")
    boxes.start()
    try:
        async with open_e2b(boxes, folder) as backend, backend.sandbox(SPEC) as box:
            job = await box.start_job(Command(["sleep", "infinity"]))
            waiting = [asyncio.create_task(box.wait_job(job)) for _ in range(num)]
            async with asyncio.timeout(20):
                while boxes.count("Start") < num:
                    await asyncio.sleep(0.02)
                assert (await box.job(job)).running
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        boxes.stop()


def test_a_call_passes_while_more_agents_are_waited_for_than_the_sdk_opens_connections_by_default(tmp_path):
    # In a process of its own: the SDK reads its cap when it is imported, and other tests import it by other ways.
    argv = [sys.executable, "-m", "tests.sandboxes.test_e2b_many", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    asyncio.run(_wait_for_many(Path(sys.argv[1]), 230))

"""A run with Docker sandboxes in a process of its own, for tests that kill it.

Usage: docker_owner.py ENGINE IMAGE REGISTRY GATEWAY_SOCKET ACTION [FOLDER]. Does what the action says; `live` starts
another sandbox after a line on standard input, and ends in good order after a second one.
"""

import asyncio
import sys
from pathlib import Path

from harness_trainer.rewards.base import VerifyMode
from harness_trainer.rewards.verifier import verify
from harness_trainer.tasks.folder import load_task
from sandboxes.base import Access, BoxSpec, Command, Endpoint, Healthcheck, Network, NetworkMode
from sandboxes.docker import DockerBackend, DockerConfig
from sandboxes.pool import Bounds, Pool

FOR_EVER = Command(["sleep", "600"])


async def act(backend: DockerBackend, action: str, folder: Path) -> None:
    spec = BoxSpec("leaks")
    if action == "box":
        async with backend.sandbox(spec) as box:
            await box.start_job(FOR_EVER)
            print("ready", flush=True)
            await box.run(FOR_EVER)
    elif action == "public":
        async with backend.sandbox(BoxSpec("leaks", network=Network(NetworkMode.PUBLIC))) as box:
            await box.run(FOR_EVER)
    elif action == "set-up":
        async with backend.sandbox(BoxSpec("leaks", healthcheck=Healthcheck("sleep 600", timeout_s=600.0))):
            pass
    elif action == "stop":
        async with backend.sandbox(spec):
            pass
    elif action == "verify":
        task = load_task(folder)
        async with backend.sandbox(spec) as box:
            await box.put_text("work\n", "/app/answer.txt")
            how = {"mode": VerifyMode.FRESH, "spec": spec, "registry": backend.registry}
            await verify(task, box, backend=backend, final_message=None, **how)
    elif action == "pool":
        async with Pool(backend, Bounds(per_spec=3, total=3, starting=3)) as pool:
            pool.plan([(spec, 3)])
            await asyncio.sleep(600)
    elif action == "build":
        await backend.prepare(BoxSpec("leaks", build_dir=folder, build_timeout_s=600.0))
    elif action == "spare":
        await backend.prepare(spec)
        await backend.network.spares.settled()
        async with backend.sandbox(spec) as box:
            await backend.network.spares.settled()
            await box.run(FOR_EVER)
    elif action == "live":
        async with backend.sandbox(spec) as box:
            await backend.network.spares.settled()
            print(f"ready {box.sandbox_id}", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            async with backend.sandbox(spec) as other:
                print(f"started {other.sandbox_id}", flush=True)
                await asyncio.to_thread(sys.stdin.readline)
                for one in (box, other):
                    print((await one.run(Command.shell("echo alive"))).stdout.strip(), flush=True)


async def main(engine: str, image: str, registry: str, gateway: str, action: str, folder: str = "") -> None:
    config = DockerConfig(host=engine, image=image, relay_base=image)
    access = Access(gateway=Endpoint(socket=Path(gateway)))
    async with DockerBackend(config, run_id="leaks", registry=Path(registry), access=access) as backend:
        await act(backend, action, Path(folder))


asyncio.run(main(*sys.argv[1:]))

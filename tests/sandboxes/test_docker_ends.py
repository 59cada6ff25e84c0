"""How Docker sandboxes end while their run lives: cancelled, unhealthy, stubborn, adopted, fifty of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import docker
import pytest
from engine_gate import CREATE, EXEC, RELAY_START, REMOVE, START, EngineGate
from engine_state import objects_of, opened

from sandboxes.base import Access, BoxSpec, Command, Endpoint, Healthcheck, SandboxError, SandboxGone, SetupFailed
from sandboxes.docker import DockerBackend, DockerConfig
from sandboxes.lifecycle import Owner, reap
from sandboxes.ownership import read_record

SPEC = BoxSpec("ends")
SCRIPT = Path(__file__).with_name("docker_owner.py")
ROOT = SCRIPT.parent.parent.parent


@pytest.fixture
def api(docker_engine: str) -> Iterator[docker.APIClient]:
    with opened(docker_engine) as client:
        yield client


@pytest.fixture
def folder(docker_engine: str) -> Iterator[Path]:
    """With a gateway's socket; short, because a socket's path is."""
    made = Path(tempfile.mkdtemp(prefix="ends-"))
    with socket.socket(socket.AF_UNIX) as gateway:
        gateway.bind(str(made / "gateway.sock"))
        gateway.listen()
        yield made
    shutil.rmtree(made)


@pytest.fixture
def gate(docker_engine: str, folder: Path) -> Iterator[EngineGate]:
    if not docker_engine.startswith("unix://"):
        pytest.skip(f"the engine at {docker_engine} has no socket to stand in front of")
    with EngineGate(docker_engine, folder / "gate.sock") as made:
        yield made


def backend_at(address: str, image: str, folder: Path, registry: Path) -> DockerBackend:
    access = Access(gateway=Endpoint(socket=folder / "gateway.sock"))
    config = DockerConfig(host=address, image=image, relay_base=image, spare_relays=0)  # spares have tests of their own
    return DockerBackend(config, run_id="ends", registry=registry, access=access)


@pytest.fixture
async def backend(
    gate: EngineGate, docker_base_image: str, folder: Path, registry: Path, api: docker.APIClient
) -> AsyncIterator[DockerBackend]:
    async with backend_at(gate.address, docker_base_image, folder, registry) as made:
        await made.prepare(SPEC)
        yield made
    assert objects_of(api, registry) == [] and records(registry) == []


def records(registry: Path) -> list[str]:
    return sorted(path.name for path in registry.glob("*"))


async def held(gate: EngineGate) -> None:
    assert await asyncio.to_thread(gate.held.wait, 60.0)


CALLS = {
    "create": (CREATE, False),
    "create, done": (CREATE, True),
    "the relay's start": (RELAY_START, False),
    "start": (START, False),
    "start, done": (START, True),
    "set-up": (EXEC, True),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_start_cancelled_during_any_call_to_the_engine_leaves_nothing(
    backend: DockerBackend, gate: EngineGate, api: docker.APIClient, registry: Path, call: str
) -> None:
    before = records(registry)
    request, after = CALLS[call]
    gate.hold(request, after=after)
    start = asyncio.create_task(backend.sandbox(SPEC).__aenter__())
    await held(gate)
    start.cancel()
    asyncio.get_running_loop().call_later(0.3, gate.release)
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [o for o in objects_of(api, registry) if "sandbox" in o] == [] and records(registry) == before


async def test_an_outer_time_limit_during_creation_leaves_nothing_though_the_engine_hangs(
    backend: DockerBackend, gate: EngineGate, api: docker.APIClient, registry: Path
) -> None:
    """The limit fires between create and its answer, and cancels a second time while things are being ended."""
    before = records(registry)
    gate.hold(CREATE, after=True)
    start = asyncio.create_task(backend.sandbox(SPEC).__aenter__())
    await held(gate)
    for _ in range(3):
        start.cancel()
        await asyncio.sleep(0.05)
    gate.release()
    with contextlib.suppress(asyncio.CancelledError):
        await start
    async with asyncio.timeout(20):
        while [o for o in objects_of(api, registry) if "sandbox" in o] or records(registry) != before:
            await asyncio.sleep(0.1)


async def test_a_start_that_never_becomes_healthy_leaves_nothing(
    backend: DockerBackend, api: docker.APIClient, registry: Path
) -> None:
    before = records(registry)
    check = Healthcheck("echo not yet; exit 1", interval_s=0.1, retries=2)
    with pytest.raises(SetupFailed):
        await backend.sandbox(BoxSpec("ends", healthcheck=check)).__aenter__()
    assert [o for o in objects_of(api, registry) if "sandbox" in o] == [] and records(registry) == before


async def test_a_first_process_that_ignores_sigterm_does_not_delay_the_end(
    backend: DockerBackend, api: docker.APIClient, registry: Path, docker_base_image: str, tmp_path: Path
) -> None:
    lines = [
        f"FROM {docker_base_image}",
        'ENTRYPOINT ["bash", "-c", "trap : TERM INT HUP; \\"$@\\" & while :; do sleep 60; done", "entry"]',
    ]
    (tmp_path / "Dockerfile").write_text("\n".join(lines) + "\n")
    sandbox = backend.sandbox(BoxSpec("ends", build_dir=tmp_path))
    await sandbox.__aenter__()
    await sandbox.start_job(Command.shell('trap "" TERM INT HUP; while :; do sleep 1; done'))
    began = time.monotonic()
    await sandbox.stop()
    assert time.monotonic() - began < 10
    assert [o for o in objects_of(api, registry) if "sandbox" in o] == []
    for image in api.images("harness-trainer/task"):
        if "entry" in str(api.history(image["Id"])):
            api.remove_image(image["Id"], force=True)


async def test_a_stop_that_hangs_in_the_engine_goes_on_without_its_caller(
    backend: DockerBackend, gate: EngineGate, api: docker.APIClient, registry: Path
) -> None:
    sandbox = backend.sandbox(SPEC)
    await sandbox.__aenter__()
    gate.hold(REMOVE)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sandbox.stop(), 1.0)
    assert gate.held.is_set()
    gate.release()
    await sandbox.stop()
    assert [o for o in objects_of(api, registry) if "sandbox" in o] == []


async def test_an_engine_that_dies_during_stop_leaves_the_record_for_the_next_start(
    gate: EngineGate, docker_engine: str, docker_base_image: str, folder: Path, registry: Path, api: docker.APIClient
) -> None:
    async with backend_at(gate.address, docker_base_image, folder, registry) as backend:
        sandbox = backend.sandbox(SPEC)
        await sandbox.__aenter__()
        gate.hold(REMOVE)
        stop = asyncio.create_task(sandbox.stop())
        await held(gate)
        gate.drop()  # the connection breaks
        with contextlib.suppress(SandboxError):
            await stop
    reap_as_if_we_had_died(registry)
    assert objects_of(api, registry) == [] and records(registry) == []


def reap_as_if_we_had_died(registry: Path) -> None:
    for path in registry.glob("*.json"):
        record = read_record(path, Owner.current())
        assert record is not None
        record.owner = replace(record.owner, start_ticks=record.owner.start_ticks - 1)
        record.save()
    assert {item.problem for item in reap(registry)} <= {""}


@pytest.fixture
def other_owner(
    docker_engine: str, docker_base_image: str, registry: Path, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A run in another process, with a sandbox."""
    argv = [docker_engine, docker_base_image, str(registry), str(folder / "gateway.sock"), "box"]
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *argv],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


async def test_an_adopted_sandbox_belongs_to_its_adopter_and_ends_with_it(
    other_owner: subprocess.Popen[bytes], backend: DockerBackend, api: docker.APIClient, registry: Path
) -> None:
    (name,) = [o.split("/")[1] for o in objects_of(api, registry) if "/sandbox" in o and not o.endswith("-net")]
    with pytest.raises(SandboxError, match="belongs to"):
        await backend.attach(name)
    other_owner.kill()
    await asyncio.to_thread(other_owner.wait)
    adopted = await backend.attach(name)
    assert name not in {item.id for item in reap(registry)}
    assert (await adopted.run(Command.shell("echo mine"))).stdout == "mine\n"
    await adopted.stop()
    assert [o for o in objects_of(api, registry) if name in o] == []
    with pytest.raises(SandboxGone):
        await backend.attach(name)


async def test_fifty_sandboxes_leave_the_machine_as_it_was(
    backend: DockerBackend, api: docker.APIClient, registry: Path, docker_base_image: str, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {docker_base_image}\nVOLUME /scratch\n")
    spec = BoxSpec("ends", build_dir=tmp_path)
    await backend.prepare(spec)
    image = await backend.images.ensure(spec, "")
    before = (objects_of(api, registry), records(registry), temp_entries())
    volumes: list[str] = []

    async def lane() -> None:
        for _ in range(10):
            async with backend.sandbox(spec) as sandbox:
                seen = await asyncio.to_thread(api.inspect_container, sandbox.sandbox_id)
                volumes.extend(m["Name"] for m in seen["Mounts"] if m["Type"] == "volume")
                await sandbox.put_text("x", "/app/file")
                assert (await sandbox.run(Command.shell("cat /app/file; sleep 60 & touch /scratch/y"))).stdout == "x"

    await asyncio.gather(*(lane() for _ in range(5)))
    assert len(volumes) == 50
    assert not set(volumes) & {v["Name"] for v in api.volumes()["Volumes"] or []}
    assert (objects_of(api, registry), records(registry), temp_entries()) == before
    api.remove_image(image, force=True)


def temp_entries() -> list[str]:
    """Of this process: temporary folders carry their owner's pid."""
    return sorted(name for name in os.listdir(tempfile.gettempdir()) if f"-{os.getpid()}-" in name)

"""A run's network outlives its owner's `kill -9` for as long as it is of use, and not longer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandboxes.base import Access, BoxSpec, Endpoint, Network, NetworkMode, SandboxError
from sandboxes.docker_network import GATEWAY_PORT
from sandboxes.lifecycle import reap
from sandboxes.relay import Relay
from tests.sandboxes.netboxes import METADATA, Box, Engine, baits, gateways, open_engine
from tests.subprocesses import ended

OWNER = Path(__file__).with_name("network_owner.py")
ASK = ("bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{GATEWAY_PORT} && cat <&3")


@pytest.fixture
def engine(docker_engine: str, docker_base_image: str, tmp_path: Path) -> Iterator[Engine]:
    engine = open_engine(docker_engine, docker_base_image, tmp_path)
    yield engine
    left = engine.left()
    engine.api.close()
    assert left == []


@contextlib.asynccontextmanager
async def gateway(word: bytes) -> AsyncIterator[str]:
    """Says its word to whoever connects."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(word)
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def killed_run(engine: Engine, url: str, *modes: NetworkMode, spares: int = 0) -> tuple[list[str], list[Path]]:
    """Ids of sandboxes whose owner is dead, and its folders."""
    argv = [sys.executable, str(OWNER), engine.address, engine.image, str(engine.registry), engine.run_id, url]
    argv += [str(spares), *modes]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    owner = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, env=env)
    assert owner.stdout is not None
    ids = json.loads(await asyncio.wait_for(owner.stdout.readline(), 60))
    owner.kill()
    await ended(owner)
    folders = await asyncio.to_thread(lambda: list(Path(tempfile.gettempdir()).glob(f"network-{owner.pid}-*")))
    assert len(ids) == len(modes) and len(folders) == 1
    return ids, folders


async def test_what_a_killed_owner_left_is_reaped_with_its_relays_networks_and_sockets(engine: Engine) -> None:
    async with gateway(b"x") as url, engine.run(Access(gateway=Endpoint(url=url))) as living:
        async with engine.box(living, Network()) as box:
            kept = set(await asyncio.to_thread(engine.left))
            _, folders = await killed_run(engine, url, NetworkMode.PROXY_ONLY, NetworkMode.PUBLIC, NetworkMode.NONE)
            assert len(await asyncio.to_thread(engine.left)) == len(kept) + 5 + 1 + 4, "containers, network, records"
            await asyncio.to_thread(reap, engine.registry)
            assert set(await asyncio.to_thread(engine.left)) == kept, "and the living run's are all there"
            assert not folders[0].exists()
            assert await box.run(*ASK) == (0, "x")


async def test_a_sandbox_whose_owner_was_killed_is_led_to_the_new_owners_gateway(engine: Engine) -> None:
    async with gateway(b"old") as old, gateway(b"new") as new:
        modes = (NetworkMode.PROXY_ONLY, NetworkMode.PUBLIC, NetworkMode.NONE)
        ids, folders = await killed_run(engine, old, *modes)
        async with engine.run(Access(gateway=Endpoint(url=new))) as run:
            boxes = [Box(await run.attach(each)) for each in ids]
            assert boxes[2].sandbox.gateway_url is None
            for box in boxes[:2]:
                assert box.sandbox.gateway_url == f"http://127.0.0.1:{GATEWAY_PORT}"
                assert await box.run(*ASK) == (0, "new")
                await box.sandbox.renew()
            assert not await asyncio.to_thread(reap, engine.registry), "they have a living owner again"
            await asyncio.to_thread(engine.api.kill, boxes[0].relay)
            await asyncio.sleep(0.2)
            with pytest.raises(SandboxError, match="relay"):
                await boxes[0].sandbox.renew()
        assert not folders[0].exists()


async def test_a_relay_that_is_gone_cannot_be_taken_over(engine: Engine) -> None:
    async with gateway(b"x") as url:
        (sandbox_id,), _ = await killed_run(engine, url, NetworkMode.PROXY_ONLY)
        await asyncio.to_thread(engine.api.remove_container, f"{sandbox_id}-net", force=True)
        async with engine.run(Access(gateway=Endpoint(url=url))) as run:
            with pytest.raises(SandboxError, match="relay"):
                await run.attach(sandbox_id)
            left = await asyncio.to_thread(engine.left)
            assert not any(sandbox_id in name for name in left), "it is of no use, and ended"
        await asyncio.to_thread(reap, engine.registry)  # the dead run's network


async def test_an_engine_elsewhere_gives_public_sandboxes_the_public_url_and_the_same_closed_ways(
    engine: Engine,
) -> None:
    """The same engine behind a TCP port stands for one on another machine: nothing of this host is mounted."""
    relay = Relay(engine.address.removeprefix("unix://"))
    server = await asyncio.get_running_loop().create_server(relay.accept, "127.0.0.1", 0)
    engine.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    endpoint = Endpoint(url="http://127.0.0.1:1", public_url="https://gateway.example")
    async with engine.run(Access(gateway=endpoint)) as run, baits() as found:
        async with engine.box(run, Network(NetworkMode.PUBLIC)) as box:
            assert box.sandbox.gateway_url == "https://gateway.example"
            hosts = [*gateways(engine.api), METADATA, "10.0.0.1"]
            assert await box.answered([["tcp", host, found.everywhere] for host in hosts]) == []
            await box.sandbox.renew()
            mounts = (await asyncio.to_thread(engine.api.inspect_container, box.relay))["Mounts"]
            assert mounts == [] and found.touched == []
            await asyncio.to_thread(engine.api.kill, box.relay)
            with pytest.raises(SandboxError, match="relay"):
                await box.sandbox.renew()
        with pytest.raises(SandboxError, match="on this machine"):
            run.sandbox(BoxSpec("sealed", image=engine.image))
    server.close()
    await relay.close()

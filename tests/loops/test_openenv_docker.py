"""OpenEnv environments from an image: the container is ours while it is needed, and gone afterwards."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tarfile

import pytest

from harness_trainer.loops.base import EnvironmentFault, EpisodeLost
from sandboxes.docker_labels import CLAIM, REGISTRY
from sandboxes.lifecycle import reap
from tests.loops.openenv_serving import ENVS, called, environment, scores, task

TAG = "ht-test-openenv-wire:latest"


@pytest.fixture(scope="module")
def image(docker_base_image, docker_engine):
    """The wire server's."""
    import docker

    dockerfile = f'FROM {docker_base_image}\nCOPY server.py /server.py\nCMD ["python3", "-u", "/server.py"]\n'
    files = {
        "Dockerfile": dockerfile.encode(),
        "server.py": (ENVS / "wire_server.py").read_bytes(),
    }
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    context.seek(0)
    client = docker.DockerClient(base_url=docker_engine, timeout=120)
    client.images.build(fileobj=context, custom_context=True, tag=TAG, rm=True)
    yield TAG
    client.images.remove(TAG, force=True)
    client.close()


@pytest.fixture
def containers(docker_engine, tmp_path):
    """Ours, running or not."""
    import docker

    client = docker.DockerClient(base_url=docker_engine, timeout=60)
    where = str((tmp_path / "registry").absolute())
    yield lambda: [
        one for one in client.containers.list(all=True, filters={"label": CLAIM}) if one.labels.get(REGISTRY) == where
    ]
    client.close()


async def test_a_container_for_all_episodes(tmp_path, image, containers):
    settings = {"max_episodes": 3, "environment": {"WORD": "hi"}}
    async with environment(tmp_path, f"docker:{image}", **settings) as wired:
        assert (wired.name, wired.max_episodes) == ("wired", 3)
        async with wired.episode(task(), "a") as one, wired.episode(task(), "b") as two:
            await one.start()
            await two.start()
            assert (await called(one, "add", number=2)).content == '{"total": 2, "limit": "3", "word": "hi"}'
            assert (await called(two, "add", number=10)).done
            assert (await scores(two)).total == 10.0
        assert len(containers()) == 1
    assert containers() == [] and not list((tmp_path / "registry").glob("*.json"))


async def test_a_container_per_episode(tmp_path, image, containers):
    async with environment(tmp_path, f"docker:{image}", per_episode=True) as wired:
        assert containers() == []
        async with wired.episode(task(), "a"), wired.episode(task(), "b"):
            assert len(containers()) == 2
        assert containers() == []


async def test_a_container_that_died_is_started_again(tmp_path, image, containers):
    async with environment(tmp_path, f"docker:{image}") as wired:
        async with wired.episode(task(), "a") as one:
            await one.start()
            await asyncio.to_thread(containers()[0].kill)
            with pytest.raises(EpisodeLost):
                await called(one, "add", number=1)
        async with wired.episode(task(), "b") as one:
            await one.start()
            assert (await called(one, "add", number=1)).content.startswith('{"total": 1')
        assert len(containers()) == 1
    assert containers() == []


async def test_an_image_that_is_wrong_is_told_at_the_start(tmp_path, image, docker_base_image, containers):
    for target, settings, said in [
        (docker_base_image, {}, "ended at its start|did not answer"),
        (image, {"port": 8001, "start_timeout_s": 2}, "did not answer at port 8001"),
    ]:
        with pytest.raises(EnvironmentFault, match=said):
            async with environment(tmp_path, f"docker:{target}", **{"start_timeout_s": 5, **settings}):
                pass
        assert containers() == []


RUNNER = """
import asyncio, sys
from pathlib import Path
from tests.loops.openenv_serving import environment, task
async def main():
    async with environment(Path(sys.argv[1]), "docker:" + sys.argv[2]) as wired, wired.episode(task(), "r") as one:
        await one.start()
        print("playing", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_what_a_killed_runner_leaves_is_reaped(tmp_path, image, containers):
    runner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        RUNNER,
        str(tmp_path),
        image,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "."},
    )
    async with asyncio.timeout(120):
        assert await runner.stdout.readline() == b"playing\n"
    runner.kill()
    await runner.wait()
    assert len(containers()) == 1
    await asyncio.to_thread(reap, tmp_path / "registry")
    assert containers() == []

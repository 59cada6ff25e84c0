"""The run's interception proxies: one that dies is started again in place, or the run's part that owns them ends."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.errors import HarnessTrainerError
from harness_trainer.harnesses import load_harness
from harness_trainer.rollouts.proxies import open_access
from sandboxes.base import BoxSpec, Network, NetworkMode
from sandboxes.local import LocalConfig
from tests.capture.serving import KEY, served
from tests.intercept.intercepting import needs_mitmproxy
from tests.rollouts.rolling import runner_spec, task

pytestmark = needs_mitmproxy


@pytest.fixture
async def spec(tmp_path):
    async with served(ScriptedEngine("hm"), tmp_path / "store.sqlite") as gateway:
        yield runner_spec(tmp_path, gateway, config={}, sandbox=LocalConfig(), tasks="-", harness="-")


async def opened(stack, spec, tmp_path):
    listed = replace(task(tmp_path), box=BoxSpec("moon", network=Network(NetworkMode.ALLOWLIST, ("pypi.org",))))
    access = await open_access(stack, spec, [listed], KEY, load_harness("pyagent"))
    (proxy,) = access.proxies
    return proxy.endpoint.url


def pid_of_proxy():
    """Of this process's child."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"intercept/addon" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except FileNotFoundError:
            continue
    return None


async def other_than(pid):
    async with asyncio.timeout(20):
        while (found := pid_of_proxy()) in (None, pid):
            await asyncio.sleep(0.02)
    return found


async def answers(url):
    async with asyncio.timeout(20), httpx.AsyncClient(proxy=url, trust_env=False) as http:
        while True:
            try:
                return (await http.get("http://elsewhere.example/")).status_code
            except httpx.TransportError:
                await asyncio.sleep(0.05)


async def test_a_proxy_that_is_killed_answers_again_where_it_was(tmp_path, spec, caplog):
    async with AsyncExitStack() as stack:
        url = await opened(stack, spec, tmp_path)
        before = await answers(url)
        certificate = next(tmp_path.rglob("ca.pem")).read_text()
        killed = pid_of_proxy()
        os.kill(killed, signal.SIGKILL)
        again = await other_than(killed)
        assert await answers(url) == before
        assert next(tmp_path.rglob("ca.pem")).read_text() == certificate
    assert f"{url} (for pypi.org) died and is started again" in caplog.text and "exit code -9" in caplog.text
    assert again != killed and pid_of_proxy() is None, "it ends with its owner"


async def test_a_proxy_that_cannot_be_started_again_ends_its_owner_with_an_error_that_is_no_judgement(tmp_path, spec):
    async def own():
        async with AsyncExitStack() as stack:
            await opened(stack, spec, tmp_path)
            (tmp_path / "internal" / "intercept-0" / "mitmproxy-ca.pem").write_text("no key")
            os.kill(pid_of_proxy(), signal.SIGKILL)
            await asyncio.sleep(60)

    with pytest.raises(
        RuntimeError, match=r"proxy http://.* \(for pypi.org\) died .*-9.* cannot be started again.*CA"
    ) as caught:
        await asyncio.wait_for(own(), 20)
    assert not isinstance(caught.value, HarnessTrainerError), "the supervisor is to start the runner again"
    assert pid_of_proxy() is None


async def test_an_owner_that_is_told_to_end_starts_nothing_again(tmp_path, spec, caplog):
    async def own():
        async with AsyncExitStack() as stack:
            await opened(stack, spec, tmp_path)
            try:
                await asyncio.sleep(60)
            finally:
                os.kill(pid_of_proxy(), signal.SIGTERM)  # a signal to the group reaches both
                await asyncio.sleep(1)

    owner = asyncio.create_task(own())
    async with asyncio.timeout(20):
        while pid_of_proxy() is None:
            await asyncio.sleep(0.02)
    await asyncio.sleep(1)
    owner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert "started again" not in caplog.text and pid_of_proxy() is None

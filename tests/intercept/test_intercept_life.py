"""The proxy as a process: it starts, says why it cannot, keeps its CA to itself, and never outlives its owner."""

import asyncio
import contextlib
import json
import os
import signal
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.intercept.launch import InterceptConfig, InterceptError, Interceptor
from tests.capture.serving import until
from tests.intercept.intercepting import MESSAGES, Behind, echoed, intercepted, needs_mitmproxy

pytestmark = needs_mitmproxy
URL = "https://api.openai.com/v1/chat/completions"


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def config(folder: Path, **options: Any) -> InterceptConfig:
    return InterceptConfig("http://127.0.0.1:9", None, "", folder, **options)


async def test_a_killed_proxy_breaks_the_agents_call_and_its_owner_is_told(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply("some text", stall=True)])
    async with intercepted(engine, tmp_path) as behind:
        session = await behind.gateway.mint()
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        async with behind.http(session.token) as http:
            async with http.stream("POST", URL, json=body) as answer:
                pieces = answer.aiter_raw()
                await anext(pieces)
                os.kill(behind.proxy.pid, signal.SIGKILL)
                with pytest.raises(httpx.HTTPError):
                    async for _ in pieces:
                        pass
            with pytest.raises(httpx.HTTPError):
                await http.post(URL, json=body)
        assert "exit code -9" in await behind.proxy.wait()
        await until(lambda: engine.in_flight == 0)
    assert not running(behind.proxy.pid)


async def test_leaving_ends_the_proxy_at_once_also_with_calls_in_flight(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply("some text", stall=True)])
    async with intercepted(engine, tmp_path) as behind:
        session = await behind.gateway.mint()
        http = behind.http(session.token)
        call = asyncio.create_task(http.post(URL, json={"model": "m", "messages": MESSAGES}))
        await until(lambda: engine.in_flight == 1)
        await asyncio.wait_for(behind.proxy.stop(), 2)
        assert not running(behind.proxy.pid)
        with pytest.raises(httpx.HTTPError):
            await call
        await http.aclose()
        await until(lambda: engine.in_flight == 0)
    assert "Traceback" not in behind.proxy.log_path.read_text()


async def test_the_ca_is_kept_and_its_key_is_its_owners_alone(tmp_path: Path) -> None:
    confdir = tmp_path / "intercept"
    confdir.mkdir(mode=0o755)
    old_umask = os.umask(0)
    try:
        async with Interceptor(config(confdir)) as first:
            certificate = first.ca_certificate.read_text()
        (confdir / "mitmproxy-ca.pem").chmod(0o644)
        async with Interceptor(config(confdir)) as second:
            assert second.ca_certificate.read_text() == certificate
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(confdir.stat().st_mode) == 0o700
    for file in confdir.rglob("*"):
        if file.is_file() and b"PRIVATE KEY" in file.read_bytes():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert file.parent == confdir
    assert stat.S_IMODE((confdir / "mitmproxy-ca.p12").stat().st_mode) == 0o600
    assert certificate.count("BEGIN CERTIFICATE") == 1
    bundle = second.ca_bundle.read_text()
    assert bundle.endswith(certificate) and bundle.count("BEGIN CERTIFICATE") > 20
    assert stat.S_IMODE(second.ca_bundle.stat().st_mode) == 0o644


async def test_two_proxies_may_share_a_folder_from_the_start(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        proxies = [Interceptor(config(tmp_path)) for _ in range(2)]
        await asyncio.gather(*(stack.enter_async_context(proxy) for proxy in proxies))
        for proxy in proxies:
            async with Behind(proxy).http("sk-1") as http:
                assert (await http.get("https://api.openai.com/v1/models")).status_code == 502  # TLS was fine


async def test_a_ca_that_was_half_written_by_a_kill_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "mitmproxy-ca-cert.pem").write_text("half")
    async with Interceptor(config(tmp_path)) as proxy:
        assert proxy.ca_certificate.read_text().startswith("-----BEGIN CERTIFICATE")


async def test_what_cannot_work_is_said_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    async with echoed(tmp_path) as behind:
        taken = behind.proxy.url.removeprefix("http://")
        (tmp_path / "damaged").mkdir()
        (tmp_path / "damaged" / "mitmproxy-ca.pem").write_text("not a key")
        (tmp_path / "file").touch()
        wrong = [
            (config(tmp_path / "a", bind=taken), "Address already in use; choose another port"),
            (config(tmp_path / "damaged"), "remove mitmproxy-ca.pem"),
            (config(tmp_path / "file"), "cannot use the folder"),
            (config(tmp_path / "b", bind="nowhere"), "HOST:PORT"),
            (config(tmp_path / "b", allow=("http://x",)), "cannot be allowed"),
            (config(tmp_path / "b", python=tmp_path / "none"), "harness-trainer setup intercept"),
            (config(tmp_path / "b", python=Path("/bin/true")), "exit code 0"),
            (InterceptConfig("https://x", None, "", tmp_path), "http://HOST:PORT"),
        ]
        for unusable, says in wrong:
            proxy = Interceptor(unusable)
            with pytest.raises(InterceptError) as error:
                await proxy.start()
            assert says in str(error.value) and "\n" not in str(error.value), error.value
            with contextlib.suppress(InterceptError):
                assert not running(proxy.pid)


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    proxy = Interceptor(config(tmp_path))
    starting = asyncio.create_task(proxy.start())
    while proxy._process is None:
        await asyncio.sleep(0.001)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not running(proxy.pid)


@contextlib.asynccontextmanager
async def program(tmp_path: Path, *arguments: str) -> AsyncIterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    ready = tmp_path / "ready.json"
    argv = [sys.executable, "-m", "capture_proxy.intercept", "--gateway-url", "http://127.0.0.1:9"]
    argv += ["--confdir", str(tmp_path / "intercept"), "--ready-file", str(ready), *arguments]
    process = await asyncio.to_thread(subprocess.Popen, argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        await until(lambda: ready.exists() or process.poll() is not None, 20)
        yield process, json.loads(ready.read_text())
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
        if process.stderr is not None:
            process.stderr.close()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
async def test_the_program_ends_with_its_proxy_however_it_ends(tmp_path: Path, number: int, code: int) -> None:
    async with program(tmp_path, "--allow", "mirror.example", "--provider", "llm.example.com") as (process, ready):
        (proxy,) = children(process.pid)
        context = ssl.create_default_context(cafile=ready["ca_bundle"])
        through = httpx.Proxy(ready["url"], auth=("x", "sk-1"))
        async with httpx.AsyncClient(proxy=through, verify=context, trust_env=False) as http:
            assert (await http.get("https://llm.example.com/v1/models")).status_code == 502
        process.send_signal(number)
        assert await asyncio.to_thread(process.wait, 5) == code
        await until(lambda: not running(proxy), 5)


FORKING = """
import asyncio, os, pathlib, sys, time
from capture_proxy.intercept.launch import InterceptConfig, Interceptor

async def main():
    async with Interceptor(InterceptConfig("http://127.0.0.1:9", None, "", pathlib.Path(sys.argv[1]))) as proxy:
        worker = os.fork()
        if worker == 0:
            time.sleep(60)  # holds every file of its parent open
        print(proxy.pid, worker, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_forked_worker_of_a_dead_owner_does_not_keep_the_proxy_alive(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FORKING, str(tmp_path)]
    owner = await asyncio.to_thread(subprocess.Popen, argv, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    proxy, worker = map(int, (await asyncio.to_thread(owner.stdout.readline)).split())
    try:
        owner.kill()
        await asyncio.to_thread(owner.wait)
        assert running(worker)
        await until(lambda: not running(proxy), 5)
    finally:
        os.kill(worker, signal.SIGKILL)
        owner.stdout.close()


async def test_the_program_ends_with_a_reason_when_the_proxy_dies(tmp_path: Path) -> None:
    async with program(tmp_path) as (process, _):
        (proxy,) = children(process.pid)
        os.kill(proxy, signal.SIGKILL)
        assert process.stderr is not None
        said = await asyncio.to_thread(process.stderr.read)
        assert await asyncio.to_thread(process.wait) == 1
        assert (
            said.decode().startswith("capture_proxy.intercept: the intercepting proxy ended") and said.count(b"\n") == 1
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--allow", "http://mirror.example"], "cannot be allowed"),
        (["--provider", "llm.example.com/v1"], "say what the path becomes"),
        (["--admin-url", "http://127.0.0.1:9"], "CAPTURE_PROXY_ADMIN_KEY"),
        (["--admin-url", "http://127.0.0.1:9", "--admin-key-file", "/nonexistent"], "cannot read the admin key"),
        (["--bind", "256.1.1.1:0"], "cannot listen on 256.1.1.1:0"),
    ],
)
def test_bad_arguments_end_with_code_2(tmp_path: Path, arguments: list[str], says: str) -> None:
    argv = [sys.executable, "-m", "capture_proxy.intercept", "--gateway-url", "http://127.0.0.1:9"]
    env = {name: value for name, value in os.environ.items() if name != "CAPTURE_PROXY_ADMIN_KEY"}
    done = subprocess.run(
        [*argv, "--confdir", str(tmp_path), *arguments], env=env, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]

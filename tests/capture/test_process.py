"""The gateway as a program: start-up, refusals, SIGTERM, and kill -9 between turns."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from capture_proxy.admin_client import AdminClient, GatewayUnreachable
from capture_proxy.store import Store
from capture_proxy.types import SessionPolicy, TurnStatus
from tests.capture.serving import listening, until
from tests.capture.stub_vllm import StubVllm, chunk, reply

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Program:
    process: subprocess.Popen[bytes]
    agent_url: str
    admin_url: str
    seconds_to_start: float


@contextlib.asynccontextmanager
async def program(tmp_path: Path, engine_url: str, *more: str) -> AsyncIterator[Program]:
    ready = tmp_path / "ready.json"
    ready.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "capture_proxy", "--engine-url", engine_url, "--ready-file", str(ready)]
    start = time.monotonic()
    process = await asyncio.to_thread(
        subprocess.Popen,
        [*argv, "--store", str(tmp_path / "store.sqlite"), *more],
        env={**os.environ, "CAPTURE_PROXY_ADMIN_KEY": "key"},
        stdout=subprocess.DEVNULL,
    )
    try:
        await until(ready.exists, 15)
        data = json.loads(ready.read_text())
        assert data["pid"] == process.pid
        yield Program(process, data["agent_url"], data["admin_url"], time.monotonic() - start)
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def ask(gateway: Program, token: str, **more: object) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.post(
            f"{gateway.agent_url}/v1/chat/completions",
            json=BODY | more,
            headers={"authorization": f"Bearer {token}"},
        )


async def test_kill_9_between_turns_loses_no_acknowledged_turn_and_sessions_go_on(tmp_path: Path) -> None:
    stub = StubVllm(reply("hello"))
    async with listening(stub.app()) as url:
        async with program(tmp_path, url) as gateway, AdminClient(gateway.admin_url, "key") as admin:
            token = (await admin.mint("s", SessionPolicy(max_turns=4), {})).token
            for stream in (True, False, True):
                assert (await ask(gateway, token, stream=stream)).status_code == 200
            gateway.process.kill()
            await asyncio.to_thread(gateway.process.wait)
            with pytest.raises(GatewayUnreachable):
                await admin.capture("s")
        async with program(tmp_path, url) as gateway, AdminClient(gateway.admin_url, "key") as admin:
            assert len((await admin.capture("s")).turns) == 3
            assert (await ask(gateway, token)).status_code == 200
            assert (await ask(gateway, token)).status_code == 403  # the budget survived as well
            capture = await admin.capture("s")
    assert [t.index for t in capture.turns] == [0, 1, 2, 3]
    assert all(bytes(t.completion_ids_T[:-1]) == b"hello" and t.status is TurnStatus.OK for t in capture.turns)
    assert all(t.version_spans[0].version == "v1" for t in capture.turns)


async def test_a_request_whose_reply_was_lost_with_the_gateway_gets_it_from_the_next_one(tmp_path: Path) -> None:
    stub = StubVllm(reply("hello"))
    async with listening(stub.app()) as url:
        async with program(tmp_path, url) as gateway, AdminClient(gateway.admin_url, "key") as admin:
            token = (await admin.mint("s", SessionPolicy(max_turns=1), {})).token
            assert (await ask(gateway, token)).status_code == 200
            gateway.process.kill()
        async with program(tmp_path, url) as gateway, AdminClient(gateway.admin_url, "key") as admin:
            again = await ask(gateway, token)
            assert again.json()["choices"][0]["message"]["content"] == "hello"
            assert len((await admin.capture("s")).turns) == 1
    assert len(stub.bodies("/inference/v1/generate")) == 1


async def test_both_ports_can_be_unix_sockets_and_a_dead_ones_file_is_taken_over(tmp_path: Path) -> None:
    agents, admin_socket = tmp_path / "agents.sock", tmp_path / "admin.sock"
    binds = ["--agent-bind", f"unix:{agents}", "--admin-bind", f"unix:{admin_socket}"]
    stub = StubVllm(reply("hello"))
    async with listening(stub.app()) as url:
        for _ in range(2):
            async with program(tmp_path, url, *binds) as gateway, AdminClient(gateway.admin_url, "key") as admin:
                assert gateway.agent_url == f"unix:{agents}" and admin_socket.stat().st_mode & 0o077 == 0
                token = (await admin.mint("s", SessionPolicy(), {})).token
                transport = httpx.AsyncHTTPTransport(uds=str(agents))
                async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
                    headers = {"authorization": f"Bearer {token}"}
                    response = await http.post("/v1/chat/completions", json=BODY, headers=headers)
                assert response.status_code == 200
                gateway.process.kill()
        async with program(tmp_path, url, *binds) as gateway:
            second = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "capture_proxy", "--engine-url", url, "--store", str(tmp_path / "2"), *binds],
                env={**os.environ, "CAPTURE_PROXY_ADMIN_KEY": "key"},
                capture_output=True,
                text=True,
            )
            assert second.returncode == 2 and "cannot listen on unix:" in second.stderr  # that one is alive
            gateway.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(gateway.process.wait, 10) == 0
    assert not agents.exists() and not admin_socket.exists()


async def test_sigterm_ends_within_three_seconds_and_records_the_call_in_flight(tmp_path: Path) -> None:
    stub = StubVllm([chunk("half"), asyncio.Event()])
    async with listening(stub.app()) as url:
        async with program(tmp_path, url) as gateway, AdminClient(gateway.admin_url, "key") as admin:
            token = (await admin.mint("s", SessionPolicy(), {})).token
            call = asyncio.create_task(ask(gateway, token, stream=True))
            await until(lambda: stub.streaming)
            await asyncio.sleep(0.1)
            start = time.monotonic()
            gateway.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(gateway.process.wait, 10) == 0
            assert time.monotonic() - start < 3
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: not stub.streaming)
    store = Store.open(tmp_path / "store.sqlite")
    (turn,) = await store.turns("s")
    await store.close()
    assert turn.status is TurnStatus.ABORTED and bytes(turn.completion_ids_T) == b"half"


async def test_it_starts_fast_and_without_an_engine(tmp_path: Path) -> None:
    async with program(tmp_path, "http://127.0.0.1:9") as gateway, AdminClient(gateway.admin_url, "key") as admin:
        assert gateway.seconds_to_start < 5  # generous: the machine is shared; about 0.6 s alone
        assert not await admin.health()
        token = (await admin.mint("s", SessionPolicy(), {})).token
        assert (await ask(gateway, token)).status_code == 503
        assert (await admin.session("s")).last_fault
        async with AdminClient(gateway.admin_url, "wrong") as stranger:
            with pytest.raises(Exception, match="key"):
                await stranger.sessions()


def test_heavy_libraries_are_not_imported() -> None:
    heavy = ("torch", "transformers", "openenv", "openai", "trl", "vllm")
    code = f"import sys, capture_proxy.__main__; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (["--admin-bind", "0.0.0.0:0"], "", "open to other machines"),
        ([], "", "needs a key"),
        (["--agent-bind", "nowhere"], "k", "HOST:PORT"),
        (["--agent-bind", "256.1.1.1:0"], "k", "cannot listen"),
        (["--admin-key-file", "/nonexistent"], "k", "cannot read the admin key"),
        (["--engine-key-file", "/nonexistent"], "k", "cannot read the engine key"),
        (["--admin-bind", "unix:/nonexistent/x.sock"], "k", "cannot listen"),
        (["--admin-bind", "unix:/nonexistent/x.sock"], "", "needs a key:"),
        (["--store", "/proc/none/x.sqlite"], "k", "cannot open the store"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_2(tmp_path: Path, arguments: list[str], key: str, says: str) -> None:
    argv = [sys.executable, "-m", "capture_proxy", "--engine-url", "http://x", "--store", str(tmp_path / "s")]
    done = subprocess.run(
        argv + arguments,
        env={**os.environ, "CAPTURE_PROXY_ADMIN_KEY": key},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1


async def test_containers_have_a_socket_beside_the_port_and_a_restart_brings_it_back(tmp_path: Path) -> None:
    path = tmp_path / "agents" / "gateway.sock"
    path.parent.mkdir()
    stub = StubVllm(reply("hello"))
    async with listening(stub.app()) as url:
        for _ in range(2):  # killed in between: its file stays, and nobody listens on it
            async with program(tmp_path, url, "--agent-socket", str(path)) as gateway:
                async with AdminClient(gateway.admin_url, "key") as admin:
                    token = (await admin.mint("s", SessionPolicy(), {})).token
                assert path.stat().st_mode & 0o777 == 0o666, "the container's user is another one"
                assert (await ask(gateway, token)).status_code == 200
                transport = httpx.AsyncHTTPTransport(uds=str(path))
                async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
                    headers = {"authorization": f"Bearer {token}"}
                    assert (await http.post("/v1/chat/completions", json=BODY, headers=headers)).status_code == 200
                    assert (await http.get("/metrics", headers=headers)).status_code == 404  # the admin side's

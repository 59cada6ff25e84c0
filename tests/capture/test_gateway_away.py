"""A gateway that is away for a while: the trainer's client waits for it, and asks twice without doing twice."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.admin_client import AdminClient, GatewayUnreachable
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import NotFound
from capture_proxy.types import SessionPolicy
from sandboxes.relay import Relay
from tests.capture.serving import KEY, Served, served, until

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.asynccontextmanager
async def losing_answers(admin_url: str, num_lost: int) -> AsyncIterator[str]:
    """A way to the admin port on which the first answers get lost, after the gateway has done what was asked."""
    host, port = admin_url.removeprefix("http://").split(":")
    left = num_lost

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        there, back = await asyncio.open_connection(host, int(port))
        try:
            while data := await reader.read(65536):
                back.write(data)
                answer = await there.read(65536)
                if left > 0:
                    left -= 1
                    return
                writer.write(answer)
        finally:
            back.close()
            writer.transport.abort()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_every_request_may_be_asked_again_when_its_answer_was_lost(tmp_path: Path) -> None:
    async with served(ScriptedEngine("hello"), tmp_path / "s.sqlite") as gw:

        async def twice(ask: Any) -> Any:
            async with losing_answers(gw.admin_url, 2) as url, AdminClient(url, KEY, patience_s=20) as admin:
                return await ask(admin)

        session = await twice(lambda admin: admin.mint("s1", SessionPolicy(max_turns=3), {"task": "t"}))
        async with gw.http(session) as http:
            assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
        await twice(lambda admin: admin.put_event("egress_refused", "example.org", session_id="s1"))
        await twice(lambda admin: admin.put_event("egress_refused", "example.org", session_id="s1"))
        await twice(lambda admin: admin.engine_ready(False))
        assert gw.gateway.gate.held
        assert (await twice(lambda admin: admin.seal("s1"))).sealed
        assert len((await twice(lambda admin: admin.capture("s1"))).turns) == 1
        events = await gw.admin.events("s1")
        assert [event["detail"] for event in events] == ["example.org"] * 2, "two happened, and none is there twice"
        with pytest.raises(NotFound):
            await twice(lambda admin: admin.capture("nobody"))


async def test_the_client_waits_for_a_gateway_that_is_away_and_not_for_ever(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with served(ScriptedEngine("hello"), tmp_path / "s.sqlite") as gw:
        async with AdminClient(url, KEY, patience_s=20) as admin:
            minting = asyncio.create_task(admin.mint("s1", SessionPolicy(), {}))
            await asyncio.sleep(0.5)
            assert not minting.done()
            async with relaying(port, gw):
                assert (await minting).session_id == "s1"
        async with AdminClient(url, KEY, patience_s=0.3) as admin:
            with pytest.raises(GatewayUnreachable, match=r"does not answer for 0\.3 s"):
                await admin.seal("s1")


@contextlib.asynccontextmanager
async def relaying(port: int, gw: Served) -> AsyncIterator[None]:
    host, admin_port = gw.admin_url.removeprefix("http://").split(":")
    relay = Relay((host, int(admin_port)))
    server = await asyncio.get_running_loop().create_server(relay.accept, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        await relay.close()


async def test_a_wrong_key_or_a_slow_answer_is_no_absence(tmp_path: Path) -> None:
    async with served(ScriptedEngine("hello"), tmp_path / "s.sqlite") as gw:
        async with AdminClient(gw.admin_url, "wrong", patience_s=60) as admin:
            async with asyncio.timeout(5):
                with pytest.raises(Exception, match="admin key"):
                    await admin.sessions()


async def test_an_agent_that_makes_no_call_after_a_restart_was_let_down_by_the_gateway(tmp_path: Path) -> None:
    call = Reply(tool_calls=[("bash", {"command": "ls"})])
    path = tmp_path / "s.sqlite"

    def script(request: Any) -> Reply | str:
        return call if request.tools else "done"

    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
    async with served(ScriptedEngine(script), path) as gw:
        for name, offered in (("at work", tools), ("done", []), ("idle", None), ("goes on", tools), ("over", tools)):
            session = await gw.mint(name)
            async with gw.http(session) as http:
                if offered is not None:
                    body = {**BODY, **({"tools": offered} if offered else {})}
                    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        await gw.admin.seal("over")
    async with served(ScriptedEngine(script), path) as gw:
        faults = {session.session_id: session.last_fault for session in await gw.admin.sessions()}
        assert {name for name, fault in faults.items() if fault is not None} == {"at work", "goes on"}
        assert "GatewayRestarted" in str(faults["at work"])
        session = await gw.mint("goes on")  # the token again
        async with gw.http(session) as http:
            assert (
                await http.post("/v1/chat/completions", json={**BODY, "tools": tools, "seed": 2})
            ).status_code == 200
        assert (await gw.admin.session("goes on")).last_fault is None


async def test_a_relay_leads_to_the_socket_that_a_new_gateway_made_in_the_same_folder(tmp_path: Path) -> None:
    """What a sealed container has is the folder: an old socket's file is dead, the new one is another file."""
    path = tmp_path / "gateway.sock"
    relay = Relay(str(path))
    loop = asyncio.get_running_loop()
    front = await loop.create_server(relay.accept, "127.0.0.1", 0)
    port = front.sockets[0].getsockname()[1]
    answers: list[bytes] = []

    async def ask() -> bytes:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"x")
            answers.append(await reader.read(10))
            writer.close()
        except OSError:
            answers.append(b"")
        return answers[-1]

    try:
        for number in (b"1", b"2"):
            assert await ask() == b"", "nobody is there, and that is said at once"

            async def answer(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: bytes = number
            ) -> None:
                await reader.read(1)
                writer.write(number)
                writer.close()

            path.unlink(missing_ok=True)
            server = await asyncio.start_unix_server(answer, str(path))
            assert await ask() == number
            server.close()
            await until(lambda server=server: not server.is_serving())
            if not path.exists():  # as kill -9 leaves it
                with socket.socket(socket.AF_UNIX) as dead:
                    dead.bind(str(path))
    finally:
        front.close()
        await relay.close()

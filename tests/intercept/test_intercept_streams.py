"""Streams and hang-ups cross the proxy as if it were not there; sessions never meet."""

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.intercept.launch import InterceptConfig, Interceptor
from capture_proxy.types import TurnStatus
from tests.capture.serving import until
from tests.intercept.intercepting import MESSAGES, Behind, Intercepted, intercepted, needs_mitmproxy
from tests.subprocesses import ended

pytestmark = needs_mitmproxy
URL = "https://api.openai.com/v1/chat/completions"


def openai(behind: Intercepted, token: str) -> AsyncOpenAI:
    """The official SDK as it is without any configuration: no base URL, a key of the agent's own."""
    return AsyncOpenAI(api_key="own-key", http_client=behind.http(token), max_retries=0)


class Gated:
    """Lets each piece of a reply go only when it is told to."""

    def __init__(self) -> None:
        self.gates = [asyncio.Event() for _ in range(4)]

    async def __call__(self, piece: int) -> None:
        await self.gates[piece].wait()


async def test_the_first_piece_arrives_before_the_reply_ends(tmp_path: Path) -> None:
    gated = Gated()
    engine = ScriptedEngine([Reply(["one ", "two ", "three"])], hold=gated)
    async with intercepted(engine, tmp_path) as behind:
        session = await behind.gateway.mint()
        async with openai(behind, session.token) as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            pieces = aiter(stream)
            await anext(pieces)  # the role
            for gate, text in zip(gated.gates, ("one ", "two ", "three"), strict=False):
                gate.set()
                chunk = await asyncio.wait_for(anext(pieces), 5)
                assert chunk.choices[0].delta.content == text
                assert engine.in_flight == 1
            gated.gates[3].set()
            assert [chunk async for chunk in pieces][-1].choices[0].finish_reason == "stop"
        (turn,) = await behind.turns(session)
    assert (turn.status, turn.message["content"]) == (TurnStatus.OK, "one two three")


@pytest.mark.parametrize(("version", "stream"), [("--http1.1", True), ("--http1.1", False), ("--http2", True)])
async def test_an_agent_that_goes_away_aborts_its_call_within_two_seconds(
    tmp_path: Path, version: str, stream: bool
) -> None:
    engine = ScriptedEngine([Reply("some text", stall=True)])
    async with intercepted(engine, tmp_path) as behind:
        session = await behind.gateway.mint()
        body = json.dumps({"model": "m", "messages": MESSAGES, "stream": stream})
        command = behind.curl(session.token, version, "-N", "-H", "content-type: application/json", "-d", body, URL)
        curl = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert curl.stdout is not None
        if stream:
            await curl.stdout.readuntil(b"some text")
        await until(lambda: engine.in_flight == 1)
        curl.kill()
        await ended(curl)
        await until(lambda: engine.in_flight == 0, 2)
        async with asyncio.timeout(3):
            while not (turns := await behind.turns(session)):
                await asyncio.sleep(0.01)
    assert [turn.status for turn in turns] == [TurnStatus.ABORTED]


async def test_a_gateway_that_dies_in_mid_stream_breaks_the_agents_stream(tmp_path: Path) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Interceptor(InterceptConfig(url, None, "", tmp_path)) as proxy, Behind(proxy).http("sk-1") as http:
            with pytest.raises(httpx.HTTPError):
                await asyncio.wait_for(http.post(URL, json={}), 5)


async def test_many_sessions_at_once_never_meet(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: Reply([f"to {request.messages[0]['content']}"]), piece_delay_s=0.002)
    async with intercepted(engine, tmp_path) as behind:
        sessions = [await behind.gateway.mint(f"s{n}") for n in range(8)]

        async def agent(number: int) -> None:
            async with openai(behind, sessions[number].token) as client:
                for turn in range(5):
                    messages = [{"role": "user", "content": f"{number}.{turn}"}]
                    reply = await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
                    assert reply.choices[0].message.content == f"to {number}.{turn}"

        await asyncio.gather(*map(agent, range(8)))
        for number, session in enumerate(sessions):
            asked = [turn.request["messages"][0]["content"] for turn in await behind.turns(session)]
            assert asked == [f"{number}.{turn}" for turn in range(5)]


async def test_one_connection_may_carry_two_sessions_one_after_the_other(tmp_path: Path) -> None:
    """Plain HTTP names the session with each request; a pool of an agent's proxy client may share connections."""
    async with intercepted(ScriptedEngine(), tmp_path) as behind:
        one, two = await behind.gateway.mint("one"), await behind.gateway.mint("two")
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(proxy=behind.proxy.url, limits=limits, trust_env=False) as http:
            for session in (one, two, one):
                basic = httpx.BasicAuth("x", session.token)._auth_header
                headers = {"proxy-authorization": basic}
                body = {"model": "m", "messages": [{"role": "user", "content": session.session_id}]}
                assert (await http.post(URL.replace("https", "http"), json=body, headers=headers)).status_code == 200
        assert (len(await behind.turns(one)), len(await behind.turns(two))) == (2, 1)


async def test_an_http_2_agent_may_have_many_calls_in_flight_on_one_connection(tmp_path: Path) -> None:
    everybody = asyncio.Event()

    async def hold(piece: int) -> None:
        await everybody.wait()

    engine = ScriptedEngine("ok", hold=hold)
    async with intercepted(engine, tmp_path) as behind:
        session = await behind.gateway.mint()
        body = json.dumps({"model": "m", "messages": MESSAGES})
        json_type = ["-H", "content-type: application/json"]
        command = behind.curl(session.token, "--http2", "-Z", "--parallel-max", "12", *json_type, "-d", body)
        command += ["-w", "%{http_version} %{http_code}\n", "-o", "/dev/null"]
        urls = [part for n in range(12) for part in (f"{URL}?n={n}", "-o", "/dev/null")]
        curl = await asyncio.create_subprocess_exec(*command, *urls, stdout=asyncio.subprocess.PIPE)
        await until(lambda: engine.in_flight == 12, 10)
        everybody.set()
        out, _ = await curl.communicate()
    assert out.decode().split("\n")[:12] == ["2 200"] * 12


async def test_an_error_of_the_gateway_reaches_the_sdk_as_it_is(tmp_path: Path) -> None:
    async with intercepted(ScriptedEngine(), tmp_path) as behind:
        session = await behind.gateway.mint(deadline=1.0)
        async with openai(behind, session.token) as client:
            with pytest.raises(APIStatusError) as refused:
                await client.chat.completions.create(model="m", messages=MESSAGES)
    assert refused.value.status_code == 403


async def test_a_slow_reader_does_not_make_the_proxy_collect_the_reply(tmp_path: Path) -> None:
    wrote = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal wrote
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for wrote in range(1, 101):  # noqa: B007 - MB, looked at below
                writer.write(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(pour, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Interceptor(InterceptConfig(url, None, "", tmp_path)) as proxy:
            before = rss_mb(proxy.pid)
            async with Behind(proxy).http("sk-1") as http, http.stream("POST", URL, json={}) as answer:
                await anext(answer.aiter_raw())
                await until(lambda: wrote > 3)
                await asyncio.sleep(0.5)  # time to collect all of it, were it not held back
                assert rss_mb(proxy.pid) - before < 40
                assert wrote < 60


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6

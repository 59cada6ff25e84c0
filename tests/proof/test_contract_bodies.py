"""Request bodies and HTTP framing as the network really delivers them, in every dialect."""

import asyncio
import gzip
import json
import zlib
from pathlib import Path

import pytest
import zstandard

from capture_proxy.engines.scripted import Reply
from capture_proxy.types import TurnStatus
from tests.capture.serving import until
from tests.proof.audit import LedgerEngine, audit
from tests.proof.gateways import BASH, DIALECTS, bench, check_error, opened

by_dialect = pytest.mark.parametrize("dialect", DIALECTS)
ENCODINGS = {
    "identity": lambda body: body,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
}


@by_dialect
async def test_a_compressed_body_is_the_same_request(tmp_path: Path, dialect: str) -> None:
    engine = LedgerEngine(["ok"])
    async with bench(dialect, engine, tmp_path) as b, b.gateway.http() as http:
        for index, (name, encode) in enumerate(ENCODINGS.items()):
            wire = (await b.agent(name, tools=[BASH])).say("compressed é🙂").wire(False)
            headers = wire.headers | {"content-encoding": name}
            response = await http.post(wire.path, content=encode(wire.raw()), headers=headers)
            assert response.status_code == 200, name
            (turn,) = (await b.capture(name)).turns
            assert list(turn.prompt_ids_P) == engine.ledger[0].prompt_ids == engine.ledger[index].prompt_ids


@by_dialect
async def test_a_bomb_is_413_and_a_torn_body_400(tmp_path: Path, dialect: str) -> None:
    bomb = zstandard.compress(b" " * 2**26)
    async with bench(dialect, LedgerEngine(), tmp_path, max_body=2**20) as b, b.gateway.http() as http:
        wire = (await b.agent()).say("hi").wire(True)
        torn = zstandard.compress(wire.raw())[:-4]
        for body, encoding, status in (
            (bomb, "zstd", 413),
            (torn, "zstd", 400),
            (b"x", "gzip", 400),
            (b"x", "br", 415),
        ):
            headers = wire.headers | {"content-encoding": encoding}
            response = await http.post(wire.path, content=body, headers=headers)
            assert response.status_code == status
            check_error(dialect, response.content, status)
        assert (await b.capture()).turns == []


@by_dialect
async def test_half_a_surrogate_pair_is_replaced_wherever_it_stands(tmp_path: Path, dialect: str) -> None:
    engine = LedgerEngine([Reply("ok")])
    async with bench(dialect, engine, tmp_path) as b, b.gateway.http() as http:
        agent = await b.agent(tools=[("bash", {"type": "object", "description": "low \udc00", "properties": {}})])
        agent.system = "half \ud83d."
        wire = agent.say("cut \ud83d").wire(False)
        response = await http.post(wire.path, content=wire.raw(), headers=wire.headers)
        assert response.status_code == 200, response.text
        audit(await b.capture(), engine.ledger)
    texts = [m["content"] for m in engine.requests[0].messages]
    assert texts == ["half \ufffd.", "cut \ufffd"]


@by_dialect
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_arguments_that_are_nested_very_deep_break_no_reply(tmp_path: Path, dialect: str, stream: bool) -> None:
    deep: object = 1
    for _ in range(400):
        deep = [deep]
    engine = LedgerEngine([Reply("deep", tool_calls=[("bash", {"a": deep})]), "next"])
    async with bench(dialect, engine, tmp_path) as b, b.gateway.http() as http:
        wire = (await b.agent(tools=[BASH])).say("hi").wire(stream)
        response = await http.post(wire.path, content=wire.raw(), headers=wire.headers)
        assert response.status_code == 200 and b"deep" in response.content
        agent = await b.agent("s2")
        assert (await agent.say("hi").ask(stream)).text == "next"
        audit(await b.capture(), engine.ledger)


@by_dialect
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_the_same_body_after_a_hang_up_is_the_same_turn(tmp_path: Path, dialect: str, stream: bool) -> None:
    gate = asyncio.Event()

    async def hold(piece: int) -> None:
        if piece == 1:
            await gate.wait()

    engine = LedgerEngine([Reply(["one ", "two"], tool_calls=[("bash", {"command": "ls"})]), "another"], hold=hold)
    async with bench(dialect, engine, tmp_path, hang_up_grace_s=30.0) as b:
        agent = (await b.agent(tools=[BASH])).say("hi")
        call = asyncio.create_task(agent.ask(stream))
        await until(lambda: engine.ledger and engine.ledger[0].ids)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        again = asyncio.create_task(agent.ask(stream))
        await asyncio.sleep(0.05)
        gate.set()
        said = await again
        assert (said.text, said.calls) == ("one two", [("bash", {"command": "ls"})])
        await agent.echo(said, ["out"]).ask(stream)
        capture = await b.capture()
    assert [t.status for t in capture.turns] == [TurnStatus.OK] * 2
    assert len(engine.requests) == 2
    assert len(audit(capture, engine.ledger)) == 1


@by_dialect
async def test_what_is_no_http_neither_hangs_nor_harms(tmp_path: Path, dialect: str) -> None:
    engine = LedgerEngine(["ok"])
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent()).say("hi")
        wire = agent.wire(True)
        body = json.dumps(wire.body).encode()
        auth = "".join(f"{k}: {v}\r\n" for k, v in wire.headers.items()).encode()
        post = f"POST {wire.path} HTTP/1.1\r\nhost: x\r\n".encode() + auth
        lengths = b"content-length: %d\r\ncontent-length: 3\r\n\r\n" % len(body)
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a plain port
            b"\x00" * 100,
            b"GET\r\n\r\n",
            b"POST / HTTP/9.9\r\n\r\n",
            post + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
            post + lengths + body,
            post + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + body,
            post + b"transfer-encoding: chunked\r\n\r\n5\r\nhello",
            post + b"content-length: -5\r\n\r\n" + body,
        ):
            async with opened(b.gateway.agent_url, wire) as _:
                pass
            reader, writer = await asyncio.open_connection(*b.gateway.agent_url.removeprefix("http://").split(":"))
            writer.write(garbage)
            writer.write_eof()
            async with asyncio.timeout(5):
                answer = await reader.read(-1)
            assert not answer.startswith(b"HTTP/1.1 5"), (garbage[:60], answer[:200])
            writer.close()
        assert (await agent.fresh().say("still there?").ask(True)).text == "ok"
        await until(lambda: engine.in_flight == 0)
        audit(await b.capture())

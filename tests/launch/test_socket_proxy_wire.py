"""The socket proxy's wire: framing, streams, and what tries to get around its judgement."""

import asyncio
import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest

from sandboxes.socket_proxy.door import Door
from sandboxes.socket_proxy.routes import CLAIM

OURS = {"Config": {"Labels": {CLAIM: "x"}}}


class Engine:
    """An engine of a few answers; keeps every request as it came."""

    def __init__(self):
        self.seen: list[bytes] = []
        self.ended = asyncio.Event()

    async def serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"PUT"):  # it refuses before it has read what comes
                text = json.dumps({"message": "no such folder"}).encode()
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                await writer.drain()
                return writer.close()
            size = next(
                (int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"ontent-length" in line.lower()), 0
            )
            body = await reader.readexactly(size)
            if b"chunked" in head.lower():
                body = await reader.readuntil(b"0\r\n\r\n")
            self.seen.append(head + body)
            await self.answer(head, reader, writer)
        writer.close()

    async def answer(self, head, reader, writer):
        path = head.split(b" ")[1]
        if path == b"/containers/dies/json":
            return
        if path == b"/exec/77/start":
            writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\nhello ")
            while data := await reader.read(100):
                writer.write(data.upper())
            writer.write(b" end")
            await writer.drain()
            return
        if path.startswith(b"/build"):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            await writer.drain()
            if await reader.read(1) == b"":
                self.ended.set()
            return
        found = {
            b"/exec/77/json": {"ContainerID": "4f2a"},
            b"/containers/4f2a/json": OURS,
            b"/containers/other/json": {},
        }
        text = json.dumps(found.get(path, {"done": True})).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        await writer.drain()


@pytest.fixture
async def proxied():
    """The engine, and a way to send raw bytes to the proxy in front of it."""
    folder = Path(tempfile.mkdtemp(prefix="ht"))
    engine = Engine()
    door = Door(str(folder / "engine"), ["stack-sockets"])
    async with (
        await asyncio.start_unix_server(engine.serve, folder / "engine"),
        await asyncio.start_unix_server(door.serve, folder / "proxy"),
    ):

        async def send(data: bytes, *, eof: bool = False) -> bytes:
            reader, writer = await asyncio.open_unix_connection(folder / "proxy")
            writer.write(data)
            if eof:
                writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return answer

        send.path = folder / "proxy"
        yield engine, send
    shutil.rmtree(folder)


def post(path: str, body: object = None, *more: str) -> bytes:
    text = b"" if body is None else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: docker", f"Content-Length: {len(text)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + text


async def test_a_call_is_passed_on_anew_and_only_with_what_was_understood(proxied):
    engine, send = proxied
    body = {"Image": "x", "Labels": {CLAIM: "x"}, "HostConfig": {"NetworkMode": "none", "Privileged": False}}
    said = await send(post("/v1.41/containers/create?name=a", body, "Content-Type: application/json"))
    assert b"200 OK" in said and b'{"done": true}' in said
    (passed,) = engine.seen
    assert json.loads(passed.split(b"\r\n\r\n", 1)[1])["HostConfig"] == {"NetworkMode": "none"}
    assert b"onnection: close" in passed


async def test_what_is_not_ours_is_not_touched_and_the_refusal_says_why(proxied):
    engine, send = proxied
    said = await send(post("/containers/other/kill"))
    assert b" 403 " in said and b"not one of ours" in said
    assert [request.split(b" ")[0] for request in engine.seen] == [b"GET"], "it was only looked at"


async def test_a_second_call_behind_an_allowed_one_never_arrives(proxied):
    engine, send = proxied
    hidden = post("/containers/create", {"HostConfig": {"Privileged": True}})
    await send(post("/containers/4f2a/start") + hidden)
    assert not any(b"Privileged" in request for request in engine.seen)
    # Nor inside the body of one that the engine might frame otherwise.
    twice = (
        b"POST /containers/4f2a/start HTTP/1.1\r\nHost: d\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    await send(twice + b"0\r\n\r\n" + hidden)
    assert not any(b"Privileged" in request for request in engine.seen)


async def test_an_upgrade_is_no_way_in_unless_the_engine_made_it_one(proxied):
    engine, send = proxied
    upgrade = ("Connection: Upgrade", "Upgrade: tcp")
    hidden = post("/containers/create", {"HostConfig": {"Privileged": True}})
    await send(post("/containers/4f2a/start", None, *upgrade) + hidden)
    assert not any(b"Privileged" in request or b"pgrade" in request for request in engine.seen)


async def test_a_commands_stream_flows_both_ways_and_outlives_the_end_of_its_input(proxied):
    _, send = proxied
    said = await send(post("/exec/77/start", {"Tty": False}, "Connection: Upgrade", "Upgrade: tcp") + b"abc", eof=True)
    assert said.startswith(b"HTTP/1.1 101") and said.endswith(b"hello ABC end")


async def test_a_body_that_calls_itself_a_form_cannot_add_parameters(proxied):
    engine, send = proxied
    labels = "%7B%22harness-trainer.layer%22%3A%221%22%7D"
    reader, writer = await asyncio.open_unix_connection(send.path)
    form = "Content-Type: application/x-www-form-urlencoded"
    writer.write(post(f"/build?labels={labels}", None, form))
    assert b"one" in await asyncio.wait_for(reader.readuntil(b"one"), 10)
    assert b"x-tar" in engine.seen[-1] and b"form" not in engine.seen[-1]
    writer.close()
    await asyncio.wait_for(engine.ended.wait(), 10)  # a build whose client has gone is ended


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"\0\0\0",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"A" * 200_000 + b"\r\n\r\n",
    ],
)
async def test_nonsense_gets_an_answer_or_an_end_and_reaches_nobody(proxied, nonsense):
    engine, send = proxied
    said = await send(nonsense, eof=True)
    assert said == b"" or b" 400 " in said or b" 403 " in said
    assert engine.seen == []


@pytest.mark.parametrize("is_slow", [False, True])
async def test_an_engine_that_refuses_an_upload_before_its_end_is_heard(proxied, is_slow):
    _, send = proxied
    reader, writer = await asyncio.open_unix_connection(send.path)
    size = 2**24
    writer.write(b"PUT /containers/4f2a/archive?path=/none HTTP/1.1\r\nHost: d\r\nContent-Length: %d\r\n\r\n" % size)
    with contextlib.suppress(ConnectionError):
        writer.write(bytes(100 if is_slow else size))
        await writer.drain()
    said = await asyncio.wait_for(reader.read(), 10)
    assert said.startswith(b"HTTP/1.1 404") and b"no such folder" in said
    writer.close()


async def test_a_body_nested_too_deep_to_read_is_refused(proxied):
    _, send = proxied
    deep = b"[" * 200_000
    said = await send(b"POST /containers/create HTTP/1.1\r\nHost: d\r\nContent-Length: 200000\r\n\r\n" + deep)
    assert b" 403 " in said and b"no JSON" in said


async def test_a_body_too_long_to_judge_is_refused(proxied):
    engine, send = proxied
    said = await send(post("/containers/create", {"Labels": {CLAIM: "x" * 2**21}}))
    assert b" 403 " in said and engine.seen == []


async def test_an_engine_that_is_away_is_said_so(proxied):
    _, send = proxied
    assert b" 502 " in await send(post("/containers/dies/kill"))
    door = Door("/nowhere", [])
    folder = send.path.parent
    async with await asyncio.start_unix_server(door.serve, folder / "other"):
        reader, writer = await asyncio.open_unix_connection(folder / "other")
        writer.write(b"GET /_ping HTTP/1.1\r\nHost: d\r\n\r\n")
        assert b" 502 " in await asyncio.wait_for(reader.read(), 10)
        writer.close()

"""The HTTP client of the hot path against servers that behave badly, on real sockets."""

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from capture_proxy.engines.http import Client, HttpFault

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class Server:
    """Counts its connections and the requests it has read."""

    def __init__(self, serve):
        self.serve, self.num_connections, self.requests, self.closed = serve, 0, [], asyncio.Event()

    async def __call__(self, reader, writer):
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.serve(self, reader, writer)
        self.closed.set()
        writer.close()

    async def read(self, reader):
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line.split(b":")[1] for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        self.requests.append((head, await reader.readexactly(int(length[0])) if length else b""))


@contextlib.asynccontextmanager
async def against(serve, **options) -> AsyncIterator[tuple[Server, Client]]:
    server = Server(serve)
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = Client(
        f"http://127.0.0.1:{port}/base/", {"x-key": "k"}, **{"connect_timeout_s": 5.0, "idle_s": 2.0, **options}
    )
    async with asyncio.timeout(20):
        try:
            yield server, client
        finally:
            client.close()
            listening.close()
            await listening.wait_closed()


def answering(*answers: bytes, close: bool = False):
    async def serve(server, reader, writer):
        for answer in answers:
            await server.read(reader)
            writer.write(answer)
            await writer.drain()
        if not close:
            await reader.read()

    return serve


async def get(client, path="/x", body=None, silence_s=5.0, total_s=None):
    response = await client.request("POST" if body else "GET", path, body, silence_s=silence_s, total_s=total_s)
    try:
        return response.status, await response.read()
    finally:
        response.close()


async def test_a_request_is_sent_whole_and_the_connection_used_again():
    async with against(answering(OK, OK)) as (server, client):
        assert await get(client, body=b"{}") == (200, b"hi")
        assert await get(client) == (200, b"hi")
    assert server.num_connections == 1
    head, body = server.requests[0]
    assert head.startswith(b"POST /base/x HTTP/1.1\r\nHost: 127.0.0.1:") and b"x-key: k\r\n" in head and body == b"{}"
    assert b"content-length" not in server.requests[1][0]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n1;x=y\r\ni\r\n0\r\nt: v\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi",
    ],
    ids=["interim", "chunked", "close"],
)
async def test_every_form_of_a_body_cut_at_every_byte(answer):
    async def serve(server, reader, writer):
        await server.read(reader)
        for at in range(len(answer)):
            writer.write(answer[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    async with against(serve) as (_, client):
        assert await get(client) == (200, b"hi")


async def test_a_body_without_a_length_ends_with_the_connection():
    async with against(answering(b"HTTP/1.1 200 OK\r\n\r\nhi", close=True)) as (_, client):
        assert await get(client) == (200, b"hi")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhi",
    ],
)
async def test_a_body_that_breaks_off_is_no_body(answer):
    async with against(answering(answer, close=True)) as (_, client):
        with pytest.raises(HttpFault, match="within an answer"):
            await get(client)


async def test_what_came_before_a_body_breaks_off_can_be_read():
    async with against(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi", close=True)) as (_, client):
        response = await client.request("GET", "/", None, silence_s=5.0)
        assert await response.readany() == b"hi"
        with pytest.raises(HttpFault):
            await response.readany()
        assert not response.at_eof()


async def test_a_kept_connection_that_the_server_closed_is_replaced():
    async with against(answering(OK, close=True)) as (server, client):
        assert await get(client) == (200, b"hi")
        assert await get(client) == (200, b"hi")
    assert server.num_connections == 2


async def test_a_request_that_a_kept_connection_swallowed_is_sent_once_more_and_no_oftener():
    async def serve(server, reader, writer):
        await server.read(reader)
        if server.num_connections == 1:
            writer.write(OK)
        await writer.drain()
        await server.read(reader) if server.num_connections == 1 else None

    async with against(serve) as (server, client):
        await get(client)
        with pytest.raises(HttpFault, match="before it answered"):
            await get(client, body=b"once")
    assert [body for _, body in server.requests] == [b"", b"once", b"once"]


async def test_an_idle_connection_is_not_used_again():
    async with against(answering(OK, OK), idle_s=0.0) as (server, client):
        await get(client)
        await asyncio.sleep(0.01)
        await get(client)
    assert server.num_connections == 2


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"HTTP/1.1 abc OK\r\n\r\n", b"\0" * 100])
async def test_what_is_not_http_is_a_fault(answer):
    async with against(answering(answer)) as (_, client):
        with pytest.raises(HttpFault, match="does not speak HTTP"):
            await get(client)


async def test_a_server_that_answers_twice_does_not_answer_the_next_request():
    wrong = OK.replace(b"hi", b"no")

    async def serve(server, reader, writer):
        await server.read(reader)
        writer.write(OK + wrong if server.num_connections == 1 else OK)
        await reader.read()

    async with against(serve) as (server, client):
        assert await get(client) == (200, b"hi")
        assert await get(client) == (200, b"hi")
    assert server.num_connections == 2


async def test_silence_is_bounded_but_slowness_is_not():
    async def serve(server, reader, writer):
        await server.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
        for _ in range(6):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)
        await reader.read()

    async with against(serve) as (server, client):
        response = await client.request("GET", "/", None, silence_s=0.15)
        got = b""
        with pytest.raises(HttpFault, match=r"silent for 0\.15 s"):
            while True:
                got += await response.readany()
        assert got == b"x" * 6
        await server.closed.wait()


async def test_an_answer_as_a_whole_may_be_bounded():
    async def serve(server, reader, writer):
        await server.read(reader)
        await reader.read()

    async with against(serve) as (_, client):
        with pytest.raises(HttpFault, match=r"within 0\.05 s"):
            await get(client, silence_s=None, total_s=0.05)


async def test_a_slow_reader_slows_the_server_and_is_not_called_silence():
    sent = 0

    async def serve(server, reader, writer):
        nonlocal sent
        await server.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 67108864\r\n\r\n")
        for _ in range(1024):
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    async with against(serve) as (_, client):
        response = await client.request("GET", "/", None, silence_s=0.1)
        await asyncio.sleep(0.3)
        assert sent < 32 * 2**20, "nothing held the server back"
        total = 0
        while data := await response.readany():
            total += len(data)
        assert total == 67108864 and response.at_eof()


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_giving_up_closes_the_connection_so_that_the_server_stops(how):
    async with against(answering(b"" if how == "cancel" else OK[:-1])) as (server, client):
        task = asyncio.create_task(client.request("GET", "/", None, silence_s=5.0))
        if how == "close":
            (await task).close()
        else:
            while not server.requests:
                await asyncio.sleep(0.01)
            task.cancel()
        await server.closed.wait()


async def test_closing_the_client_ends_what_is_in_flight():
    async with against(answering(b"")) as (server, client):
        task = asyncio.create_task(get(client))
        while not server.requests:
            await asyncio.sleep(0.01)
        client.close()
        with pytest.raises(HttpFault, match="were closed"):
            await task


async def test_nobody_listens_there():
    async with against(answering(OK)) as (_, client):
        pass
    with pytest.raises(HttpFault, match="Connect call failed|refused"):
        await get(client)


async def test_https_is_verified_by_the_machines_certificates(tmp_path, monkeypatch):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(
            name, name, key.public_key(), 1, now - datetime.timedelta(1), now + datetime.timedelta(1)
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "server.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    pem.write_bytes(private + certificate.public_bytes(Encoding.PEM))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    server = Server(answering(OK, OK))
    listening = await asyncio.start_server(server, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{listening.sockets[0].getsockname()[1]}"
    stranger = Client(url, {}, connect_timeout_s=5.0, idle_s=1.0)
    with pytest.raises(HttpFault, match="certificate verify failed"):
        await get(stranger)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    client = Client(url, {}, connect_timeout_s=5.0, idle_s=1.0)
    assert [await get(client), await get(client)] == [(200, b"hi"), (200, b"hi")]
    assert len(server.requests) == 2
    client.close()
    listening.close()
    await listening.wait_closed()


@pytest.mark.parametrize("url", ["", "localhost:1", "ftp://x", "http://", "unix:/x"])
def test_an_address_that_is_none_is_refused_at_once(url):
    with pytest.raises(ValueError, match="no http"):
        Client(url, {}, connect_timeout_s=1.0, idle_s=1.0)


def test_a_key_cannot_smuggle_in_a_header():
    with pytest.raises(ValueError, match="one line"):
        Client("http://x", {"authorization": "a\r\nb: c"}, connect_timeout_s=1.0, idle_s=1.0)

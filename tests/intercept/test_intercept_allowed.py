"""Hosts on the allow-list pass untouched, for sessions the gateway knows."""

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from capture_proxy.engines.scripted import ScriptedEngine
from capture_proxy.errors import EngineUnreachable
from tests.capture.serving import listening, until
from tests.intercept.intercepting import Echo, echoed, intercepted, needs_mitmproxy

pytestmark = needs_mitmproxy


def certificate(folder: Path, *names: str) -> tuple[Path, Path]:
    """(certificate, key) of a server of our own that no CA signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an outside server")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    cert_file, key_file = folder / "outside.pem", folder / "outside.key"
    cert_file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key_file.write_bytes(key.private_bytes(*private))
    return cert_file, key_file


@contextlib.asynccontextmanager
async def tls_server(folder: Path, *names: str) -> AsyncIterator[tuple[int, ssl.SSLContext]]:
    """(port, a client's context that trusts it); it answers each connection with what its first line was."""
    cert_file, key_file = certificate(folder, *names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert_file, key_file)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            line = await reader.readline()
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(line), line))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1], ssl.create_default_context(cafile=str(cert_file))


async def test_tls_is_passed_through_untouched(tmp_path: Path) -> None:
    async with tls_server(tmp_path, "localhost") as (port, trusting):
        async with intercepted(ScriptedEngine(), tmp_path, allow=(f"localhost:{port}",)) as behind:
            token = (await behind.gateway.mint()).token
            proxy = httpx.Proxy(behind.proxy.url, auth=("x", token))
            # This client trusts only the server's own certificate: an intercepted connection would fail.
            async with httpx.AsyncClient(proxy=proxy, verify=trusting, trust_env=False) as http:
                answer = await http.get(f"https://localhost:{port}/path")
            assert answer.text == "GET /path HTTP/1.1\r\n"
            assert behind.events() == []


async def test_plain_http_is_passed_on_without_the_token(tmp_path: Path) -> None:
    outside = Echo()
    async with listening(outside) as url:
        address = f"localhost:{urlsplit(url).port}"
        async with intercepted(ScriptedEngine(), tmp_path, allow=(address,)) as behind:
            token = (await behind.gateway.mint()).token
            own = {"authorization": "Bearer own", "cookie": "own=1", "host": "another.example"}
            async with behind.http(token) as http:
                seen = (await http.post(f"http://{address}/a?b=c", content=b"body", headers=own)).json()
    assert (seen["path"], seen["query"]) == ("/a", "b=c")
    assert (seen["headers"]["authorization"], seen["headers"]["cookie"]) == ("Bearer own", "own=1")
    assert seen["headers"]["host"] == address, "the name that was allowed is the name that is asked for"
    assert token not in str(seen) and "proxy-authorization" not in seen["headers"]


async def test_only_sessions_that_the_gateway_knows_may_pass(tmp_path: Path) -> None:
    outside = Echo()
    async with listening(outside) as url:
        address = f"localhost:{urlsplit(url).port}"
        async with intercepted(ScriptedEngine(), tmp_path, allow=(address,)) as behind:
            sealed = await behind.gateway.mint("sealed")
            await behind.gateway.admin.seal("sealed")
            for token, status in (("sk-nobody", 407), (sealed.token, 403)):
                async with behind.http(token) as http:
                    assert (await http.get(f"http://{address}/")).status_code == status
                    with pytest.raises(httpx.ProxyError, match=str(status)):
                        await http.get(f"https://{address}/")
    assert outside.requests == []


async def test_an_engine_that_is_down_does_not_make_a_session_unknown(tmp_path: Path) -> None:
    class Down(ScriptedEngine):
        async def models(self) -> list[dict[str, object]]:
            raise EngineUnreachable("down")

    async with listening(Echo()) as url:
        address = f"localhost:{urlsplit(url).port}"
        async with intercepted(Down(), tmp_path, allow=(address,)) as behind:
            token = (await behind.gateway.mint()).token
            async with behind.http(token) as http:
                assert (await http.get(f"http://{address}/")).status_code == 200


async def test_the_gateway_is_asked_once_for_a_token(tmp_path: Path) -> None:
    async with listening(Echo()) as url:
        address = f"localhost:{urlsplit(url).port}"
        async with echoed(tmp_path, allow=(address,)) as behind:
            async with behind.http("sk-1") as one, behind.http("sk-2") as two:
                for _ in range(2):
                    both = [client.get(f"http://{address}/") for client in (one, two) for _ in range(10)]
                    assert {answer.status_code for answer in await asyncio.gather(*both)} == {200}
    asked = [seen["headers"]["authorization"] for seen in behind.gateway.requests]
    assert sorted(asked) == ["Bearer sk-1", "Bearer sk-2"]


async def test_an_allowed_host_that_is_down_is_a_502_of_the_proxy(tmp_path: Path) -> None:
    async with echoed(tmp_path, allow=("localhost:9",)) as behind:
        async with behind.http("sk-1") as http:
            with pytest.raises(httpx.ProxyError, match="502"):
                await http.get("https://localhost:9/")
            assert (await http.get("http://localhost:9/")).status_code == 502


async def test_another_name_inside_an_allowed_tunnel_is_refused(tmp_path: Path) -> None:
    """Many hosts share an address: who may reach one of them could ask it for another."""
    async with tls_server(tmp_path, "localhost", "evil.example") as (port, _):
        async with echoed(tmp_path, allow=(f"localhost:{port}",)) as behind:
            command = behind.curl("sk-1", "--connect-to", f"evil.example:{port}:localhost:{port}")
            arguments = ["-o", "/dev/null", "-w", "%{http_code}", f"https://evil.example:{port}/"]
            process = await asyncio.create_subprocess_exec(*command, *arguments, stdout=asyncio.subprocess.PIPE)
            out, _ = await process.communicate()
            assert out == b"403"
            (event,) = behind.events()
            assert event["detail"] == f"evil.example:{port} GET /"


async def test_bytes_flow_both_ways_for_any_protocol_in_an_allowed_tunnel(tmp_path: Path) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data.upper())
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with echoed(tmp_path, allow=("localhost:*",)) as behind:
            address = urlsplit(behind.proxy.url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(f"CONNECT localhost:{port} HTTP/1.1\r\nProxy-Authorization: Basic c2stMTo=\r\n\r\n".encode())
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            for word in (b"\x00bin", b"SSH-2.0\r\n", b"GET / HTTP/1.1\r\n\r\n"):
                writer.write(word)
                assert await reader.readexactly(len(word)) == word.upper()
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()


async def test_a_tunnel_ends_when_either_side_does(tmp_path: Path) -> None:
    ends: list[Callable[[], None]] = []
    gone = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer.close)
        await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with echoed(tmp_path, allow=("localhost:*",)) as behind:
            address = urlsplit(behind.proxy.url)
            for side in ("agent", "server"):
                gone.clear()
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                request = f"CONNECT localhost:{port} HTTP/1.1\r\nProxy-Authorization: Basic c2stMTo=\r\n\r\n"
                writer.write(request.encode())
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"hello")
                await until(lambda: ends)
                if side == "agent":
                    writer.close()
                    await asyncio.wait_for(gone.wait(), 2)
                else:
                    ends.pop()()
                    assert await asyncio.wait_for(reader.read(), 2) == b""
                    writer.close()
                ends.clear()

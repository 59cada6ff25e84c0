"""What is not for the gateway and not allowed: refused, with a reason, and on record."""

import asyncio
import base64
import itertools
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from capture_proxy.intercept.launch import InterceptConfig, Interceptor
from capture_proxy.intercept.providers import Provider
from tests.capture.serving import until
from tests.intercept.intercepting import MESSAGES, Behind, Echoed, echoed, intercepted, needs_mitmproxy

pytestmark = needs_mitmproxy


@pytest.fixture
async def behind(tmp_path: Path) -> AsyncIterator[Echoed]:
    async with echoed(tmp_path, allow=("allowed.example", "*.wild.example:443")) as running:
        yield running


async def raw(behind: Echoed, request: str) -> str:
    """The answer to bytes that no sensible client sends; ends when the proxy has nothing more to say."""
    address = urlsplit(behind.proxy.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(request.encode())
    answer = b""
    try:
        async with asyncio.timeout(5):
            while b"\r\n\r\n" not in answer and (more := await reader.read(65536)):
                answer += more
    finally:
        writer.close()
    return answer.decode()


def basic(credentials: str) -> str:
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


NO_TOKEN = (
    None,
    "",
    "Basic",
    "Basic !!!",
    "Bearer sk-1",
    basic(""),
    basic(":"),
    basic("x:a b\n"),
    basic("x:é"),
    "Basic eA=== =",
)


async def test_without_a_token_everything_is_407(behind: Echoed) -> None:
    for credentials in NO_TOKEN:
        header = "" if credentials is None else f"Proxy-Authorization: {credentials}\r\n"
        for line in (
            "CONNECT api.openai.com:443",
            "CONNECT allowed.example:443",
            "CONNECT evil.example:443",
            "GET http://api.openai.com/v1/models",
            "GET http://evil.example/",
            "GET /v1/models",
        ):
            answer = await raw(behind, f"{line} HTTP/1.1\r\nHost: api.openai.com\r\n{header}\r\n")
            assert answer.startswith("HTTP/1.1 407 "), (line, credentials, answer)
            assert "proxy-authenticate: basic" in answer.lower()
    assert behind.gateway.requests == []


async def test_the_token_is_the_password_or_a_lone_user_name(behind: Echoed) -> None:
    for credentials in ("x:sk-1", ":sk-1", "sk-1:", "sk-1"):
        request = "GET http://api.openai.com/v1/models HTTP/1.1\r\nHost: api.openai.com\r\n"
        answer = await raw(behind, f"{request}Proxy-Authorization: {basic(credentials)}\r\n\r\n")
        assert answer.startswith("HTTP/1.1 200 "), credentials
        assert behind.gateway.requests[-1]["headers"]["authorization"] == "Bearer sk-1"


async def test_a_client_may_ask_again_with_credentials_on_the_same_connection(behind: Echoed) -> None:
    arguments = ["--proxy-anyauth", "-w", "%{http_code} %{http_connect} %{num_connects}", "-o", "/dev/null"]
    process = await asyncio.create_subprocess_exec(
        *behind.curl("sk-1", *arguments, "https://api.openai.com/v1/models"), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.decode().split()[:2] == ["200", "200"]


async def test_an_unknown_token_gets_the_gateways_own_401(tmp_path: Path) -> None:
    async with intercepted(ScriptedEngine(), tmp_path) as behind:
        async with behind.http("sk-nobody") as http:
            for url in ("https://api.openai.com/v1/chat/completions", "http://api.openai.com/v1/chat/completions"):
                answer = await http.post(url, json={"model": "m", "messages": MESSAGES})
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            big = await http.post("https://api.openai.com/v1/chat/completions", content=b"x" * 5_000_000)
            assert big.status_code == 401


REFUSED = {
    "https://evil.example/secret?key=1": "evil.example:443 CONNECT",
    "http://evil.example/secret/path?key=1": "evil.example:80 GET /secret/path",
    "http://EVIL.example.:8080/": "evil.example:8080 GET /",
    "https://allowed.example:8443/": "allowed.example:8443 CONNECT",
    "https://sub.allowed.example/": "sub.allowed.example:443 CONNECT",
    "https://wild.example/": "wild.example:443 CONNECT",
    "http://a.wild.example/": "a.wild.example:80 GET /",
    "https://notallowed.example/": "notallowed.example:443 CONNECT",
    "https://api.openai.com.evil.example/": "api.openai.com.evil.example:443 CONNECT",
    "https://169.254.169.254/": "169.254.169.254:443 CONNECT",
    "http://mitm.it/": "mitm.it:80 GET /",
}


async def test_every_other_host_is_refused_and_recorded_without_its_query(behind: Echoed) -> None:
    urls = {**REFUSED, f"{behind.proxy.url}/": f"127.0.0.1:{urlsplit(behind.proxy.url).port} GET /"}
    async with behind.http("sk-1") as http:
        for url in urls:
            if url.startswith("https:"):
                with pytest.raises(httpx.ProxyError, match="403"):
                    await http.get(url)
            else:
                answer = await http.get(url)
                assert answer.status_code == 403, url
                assert "allow-list" in answer.json()["error"]["message"]
    recorded = behind.events("egress_refused")
    assert [event["detail"] for event in recorded] == list(urls.values())
    await until(lambda: len(behind.admin.requests) == len(urls))
    posts = [base64.b64decode(seen["body"]).decode() for seen in behind.admin.requests]
    assert behind.admin.paths() == ["POST /events"] * len(urls)
    assert all('"session_token": "sk-1"' in post and '"kind": "egress_refused"' in post for post in posts)
    assert behind.admin.requests[0]["headers"]["authorization"] == "Bearer admin-key"
    assert behind.gateway.requests == []


async def test_a_refusal_is_an_event_of_its_session_at_the_gateway(tmp_path: Path) -> None:
    async with intercepted(ScriptedEngine(), tmp_path) as behind:
        one, two = await behind.gateway.mint("one"), await behind.gateway.mint("two")
        async with behind.http(one.token) as http:
            await http.get("http://evil.example/telemetry?secret=1")
            await http.get("https://api.anthropic.com/api/claude_code/settings")
        async with behind.http(two.token) as http:
            await http.get("http://other.example/")
        store = behind.gateway.gateway.store
        async with asyncio.timeout(5):
            while not await store.events("two"):
                await asyncio.sleep(0.02)
        events = {name: [(kind, detail) for _, kind, detail in await store.events(name)] for name in ("one", "two")}
    assert events["one"] == [
        ("egress_refused", "evil.example:80 GET /telemetry"),
        ("not_served", "api.anthropic.com:443 GET /api/claude_code/settings"),
    ]
    assert events["two"] == [("egress_refused", "other.example:80 GET /")]
    assert behind.events("events_lost") == []


async def test_an_address_is_a_host_like_any_other(behind: Echoed) -> None:
    for host in ("[::1]", "[fd00::1]", "127.0.0.1", "2130706433"):
        answer = await raw(behind, f"CONNECT {host}:443 HTTP/1.1\r\nProxy-Authorization: {basic('x:sk-1')}\r\n\r\n")
        assert answer.startswith("HTTP/1.1 403 "), (host, answer)
        assert behind.events()[-1]["detail"] == f"{host}:443 CONNECT"


async def test_the_gateways_own_ports_cannot_be_reached_through_the_proxy(tmp_path: Path) -> None:
    async with intercepted(ScriptedEngine(), tmp_path) as behind:
        token = (await behind.gateway.mint()).token
        async with behind.http(token) as http:
            for url in (behind.gateway.admin_url, behind.gateway.agent_url):
                assert (await http.get(f"{url}/healthz")).status_code == 403


async def test_a_refused_request_leaves_the_connection_in_step(behind: Echoed) -> None:
    limits = httpx.Limits(max_connections=1)
    async with behind.http("sk-1", limits=limits) as http:
        for _ in range(3):
            assert (await http.head("http://evil.example/")).status_code == 403
            assert (await http.post("http://evil.example/", content=b"x" * 1000)).status_code == 403
            assert (await http.get("http://api.openai.com/v1/models")).status_code == 200


async def test_a_refused_upload_is_cut_off_instead_of_kept_in_memory(behind: Echoed) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 200_000_000:
            sent += 100_000
            yield b"x" * 100_000

    async with behind.http("sk-1") as http:
        with pytest.raises(httpx.HTTPError):
            await http.post("http://evil.example/", content=endless())
        with pytest.raises(httpx.HTTPError):
            await http.post("http://evil.example/", content=b"x" * 2_000_000)
    assert sent < 50_000_000
    assert len(behind.events("egress_refused")) == 2


async def test_other_protocols_in_a_providers_tunnel_go_nowhere(behind: Echoed) -> None:
    address = urlsplit(behind.proxy.url)
    openings = ("\x16\x03\x01 not a hello", "SSH-2.0-x\r\n\r\n", "\x00\x01", "EHLO me\r\n\r\n")
    for port, opening in itertools.product((443, 53, 22), openings):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        credentials = f"Proxy-Authorization: {basic('x:sk-1')}"
        writer.write(f"CONNECT api.openai.com:{port} HTTP/1.1\r\nHost: x\r\n{credentials}\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(opening.encode("latin-1"))
        writer.write_eof()
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        assert not answer or answer.startswith((b"HTTP/1.1 400", b"\x15\x03")), (port, opening, answer)
    assert behind.gateway.requests == []


async def test_side_endpoints_of_a_provider_get_404_and_are_recorded(tmp_path: Path) -> None:
    async with intercepted(ScriptedEngine(), tmp_path) as behind:
        token = (await behind.gateway.mint()).token
        async with behind.http(token) as http:
            for path in ("/api/claude_code/settings", "/api/claude_code/policy_limits", "/api/event_logging/batch"):
                answer = await http.post(f"https://api.anthropic.com{path}", json={}, headers={"x-api-key": "own"})
                assert answer.status_code == 404
                assert answer.json()["error"]
    assert behind.events("not_served")[0]["detail"] == "api.anthropic.com:443 POST /api/claude_code/settings"
    assert len(behind.events("not_served")) == 3


async def test_no_file_of_the_proxy_holds_a_token_or_the_admin_key(behind: Echoed) -> None:
    token = "sk-" + "t" * 40
    async with behind.http(token) as http:
        await http.get("http://evil.example/")
        await http.get("https://api.openai.com/v1/models", headers={"authorization": "Bearer own-key"})
    await until(lambda: behind.admin.requests)
    for file in behind.proxy.config.confdir.rglob("*"):
        text = file.read_bytes() if file.is_file() else b""
        assert token.encode() not in text and b"admin-key" not in text and b"own-key" not in text, file
    assert stat.S_IMODE(behind.proxy.events_path.stat().st_mode) == 0o600


async def test_events_can_be_posted_to_a_unix_socket(tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def admin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"}"))
        writer.write(b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(admin, tmp_path / "admin")
    config = InterceptConfig("http://127.0.0.1:9", f"unix:{tmp_path}/admin", "admin-key", tmp_path / "intercept")
    async with server, Interceptor(config) as proxy, Behind(proxy).http("sk-1") as http:
        await http.get("http://evil.example/")
        await until(lambda: asked)
    assert asked[0].startswith(b"POST /events HTTP/1.1\r\n") and b"Bearer admin-key" in asked[0]


async def test_an_admin_port_that_hangs_delays_no_agent_and_what_it_missed_is_counted(tmp_path: Path) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    admin_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    config = InterceptConfig("http://127.0.0.1:9", admin_url, "admin-key", tmp_path)
    async with server:
        async with Interceptor(config) as proxy, Behind(proxy).http("sk-1") as http:
            async with asyncio.timeout(5):
                for _ in range(30):
                    assert (await http.get("http://evil.example/")).status_code == 403
    (lost,) = Behind(proxy).events("events_lost")
    assert lost["detail"].startswith(("29 ", "30 "))  # one may be on its way when the proxy ends
    assert len(Behind(proxy).events("egress_refused")) == 30


async def test_a_mistake_in_the_proxy_is_no_way_out(tmp_path: Path) -> None:
    broken = Provider("broken.example", (("/v1/", r"\9"),))  # fails when it is used
    async with echoed(tmp_path, providers=(broken,)) as behind, behind.http("sk-1") as http:
        for scheme in ("https", "http"):
            with pytest.raises(httpx.RemoteProtocolError):
                await http.post(f"{scheme}://broken.example/v1/models", content=b"x")
        assert "requestheaders failed" in behind.proxy.log_path.read_text()
    assert behind.gateway.requests == []


async def test_events_that_do_not_reach_the_gateway_are_counted(behind: Echoed) -> None:
    behind.admin.status = 400
    async with behind.http("sk-1") as http:
        await http.get("http://evil.example/")
        await until(lambda: behind.events("events_lost"))
    assert len(behind.events("egress_refused")) == 1

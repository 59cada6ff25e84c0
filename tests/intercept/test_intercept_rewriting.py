"""What of an agent's request reaches the gateway: path, key and body, by provider."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from capture_proxy.intercept.launch import InterceptConfig, Interceptor
from capture_proxy.intercept.providers import DEFAULT_PROVIDERS, parse_provider
from tests.intercept.intercepting import Behind, Echoed, echoed, needs_mitmproxy

pytestmark = needs_mitmproxy
OWN = "own-provider-key"


@pytest.fixture
async def behind(tmp_path: Path) -> AsyncIterator[Echoed]:
    providers = (parse_provider("llm.example.com/openai/v1=/v1"), *DEFAULT_PROVIDERS)
    async with echoed(tmp_path, providers=providers) as running:
        yield running


PATHS = {
    "https://api.openai.com/v1/chat/completions": "/v1/chat/completions",
    "https://API.OpenAI.com./v1/responses": "/v1/responses",
    "https://api.openai.com:8443/v1/models": "/v1/models",
    "http://api.openai.com/v1/models": "/v1/models",
    "https://api.anthropic.com/v1/messages/count_tokens?beta=true": "/v1/messages/count_tokens?beta=true",
    "https://generativelanguage.googleapis.com/v1beta/models/m:streamGenerateContent?alt=sse": (
        "/v1beta/models/m:streamGenerateContent?alt=sse"
    ),
    "https://generativelanguage.googleapis.com/v1beta/openai/chat/completions": "/v1/chat/completions",
    "https://dashscope.aliyuncs.com/compatible-mode/v1/chat/completions": "/v1/chat/completions",
    "https://dashscope-intl.aliyuncs.com/apps/anthropic/v1/messages": "/v1/messages",
    "https://openrouter.ai/api/v1/chat/completions": "/v1/chat/completions",
    "https://api.deepseek.com/chat/completions": "/chat/completions",
    "https://api.deepseek.com/anthropic/v1/messages": "/v1/messages",
    "https://api.groq.com/openai/v1/chat/completions": "/v1/chat/completions",
    "https://me.openai.azure.com/openai/deployments/gpt%2D5/chat/completions?api-version=1": (
        "/v1/chat/completions?api-version=1"
    ),
    "https://api.z.ai/api/coding/paas/v4/chat/completions": "/v1/chat/completions",
    "https://llm.example.com/openai/v1/models/a%2Fb": "/v1/models/a%2Fb",
    "https://api.x.ai/v1/chat/completions?q=a%20b&x=%2F": "/v1/chat/completions?q=a%20b&x=%2F",
}


async def test_each_providers_paths_become_the_gateways(behind: Echoed) -> None:
    async with behind.http("sk-1") as http:
        for url, expected in PATHS.items():
            seen = (await http.get(url)).json()
            assert seen["path"] + ("?" + seen["query"] if seen["query"] else "") == expected, url


KEYS: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("https://api.openai.com/v1/x", {"Authorization": f"Bearer {OWN}"}, {"authorization": "Bearer sk-1"}),
    ("https://api.openai.com/v1/x", {"Authorization": f"Basic {OWN}"}, {"authorization": "Bearer sk-1"}),
    ("https://api.anthropic.com/v1/messages", {"X-Api-Key": OWN}, {"x-api-key": "sk-1"}),
    ("https://api.anthropic.com/v1/messages", {"Authorization": f"Bearer {OWN}"}, {"authorization": "Bearer sk-1"}),
    (
        "https://api.anthropic.com/v1/messages",
        {"X-Api-Key": OWN, "Authorization": f"Bearer {OWN}", "Cookie": OWN},
        {"x-api-key": "sk-1", "authorization": "Bearer sk-1"},
    ),
    ("https://generativelanguage.googleapis.com/v1beta/m", {"x-goog-api-key": OWN}, {"x-goog-api-key": "sk-1"}),
    (f"https://generativelanguage.googleapis.com/v1beta/m?alt=sse&key={OWN}", {}, {"x-goog-api-key": "sk-1"}),
    ("https://me.openai.azure.com/openai/v1/responses", {"api-key": OWN}, {"authorization": "Bearer sk-1"}),
    ("https://api.anthropic.com/v1/messages", {}, {"x-api-key": "sk-1"}),
    ("http://api.openai.com/v1/x", {"Authorization": f"Bearer {OWN}"}, {"authorization": "Bearer sk-1"}),
]


async def test_the_agents_own_key_is_replaced_where_it_was(behind: Echoed) -> None:
    async with behind.http("sk-1") as http:
        for url, headers, expected in KEYS:
            seen = (await http.get(url, headers=headers)).json()
            found = {name: value for name, value in seen["headers"].items() if "sk-1" in value}
            assert found == expected, (url, headers)
            assert OWN not in json.dumps(seen), (url, headers)
            assert "proxy-authorization" not in seen["headers"]


async def test_bodies_of_every_kind_arrive_byte_for_byte(behind: Echoed) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(3):
            yield bytes([number]) * 70_000

    whole = b"".join([bytes([n]) * 70_000 for n in range(3)])
    encoded = {"content-encoding": "zstd"}  # not decoded on the way
    async with behind.http("sk-1") as http:
        for url in ("https://api.openai.com/v1/x", "http://api.openai.com/v1/x"):
            for content in (b"", b"\x28\xb5\x2f\xfd\x00", whole, pieces()):
                seen = (await http.post(url, content=content, headers=encoded)).json()
                sent = content if isinstance(content, bytes) else whole
                assert base64.b64decode(seen["body"]) == sent
                assert seen["headers"]["content-encoding"] == "zstd"


async def test_http_2_clients_work_with_and_without_a_known_length(behind: Echoed, tmp_path: Path) -> None:
    body = tmp_path / "body"
    body.write_bytes(b"x" * 200_000)
    for source in (f"@{body}", "@-"):
        arguments = ["--http2", "-w", "\n%{http_version}", "--data-binary", source, "https://api.openai.com/v1/x"]
        if source == "@-":  # no length: curl streams what it reads
            arguments = ["-T", "-", "-X", "POST", *arguments[:3], arguments[-1]]
        with body.open("rb") as stdin:
            process = await asyncio.create_subprocess_exec(
                *behind.curl("sk-1", *arguments), stdin=stdin, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
        answer, _, version = out.decode().rpartition("\n")
        assert version == "2"
        assert len(base64.b64decode(json.loads(answer)["body"])) == 200_000, source


@pytest.mark.parametrize("url", ["https://api.openai.com/v1/x", "http://api.openai.com/v1/x"])
async def test_curl_waits_for_100_continue_and_gets_it(behind: Echoed, tmp_path: Path, url: str) -> None:
    (tmp_path / "body").write_bytes(b"x" * 3_000_000)
    arguments = ["--http1.1", "--expect100-timeout", "15", "-H", "Expect: 100-continue"]
    command = behind.curl("sk-1", *arguments, "--data-binary", f"@{tmp_path}/body", url)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 10)
    assert len(base64.b64decode(json.loads(out)["body"])) == 3_000_000


async def test_the_proxy_itself_may_be_reached_over_tls(behind: Echoed) -> None:
    command = behind.curl("sk-1", "--proxy-cacert", str(behind.proxy.ca_bundle), "https://api.openai.com/v1/models")
    command = [part.replace("http://x:", "https://x:") for part in command]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert json.loads(out)["headers"]["authorization"] == "Bearer sk-1"


async def test_a_head_request_of_a_provider_goes_to_the_gateway(behind: Echoed) -> None:
    async with behind.http("sk-1") as http:
        assert (await http.head("https://api.anthropic.com/api/hello")).status_code == 200
        assert (await http.get("https://api.anthropic.com/api/hello")).status_code == 200  # the connection is in step
    assert behind.gateway.paths() == ["HEAD /api/hello", "GET /api/hello"]


async def test_a_websocket_is_refused_so_that_the_agent_falls_back(behind: Echoed) -> None:
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    async with behind.http("sk-1") as http:
        answer = await http.get("https://api.openai.com/v1/responses", headers=upgrade)
        assert answer.status_code == 426
        assert (await http.post("https://api.openai.com/v1/responses", json={})).status_code == 200
    assert behind.gateway.paths() == ["POST /v1/responses"]
    assert [event["detail"] for event in behind.events()] == ["api.openai.com:443 GET /v1/responses"]


async def test_a_gateway_that_is_away_is_an_error_of_the_agents_call(tmp_path: Path) -> None:
    config = InterceptConfig("http://127.0.0.1:9", None, "", tmp_path, allow=("mirror.example",))
    async with Interceptor(config) as proxy, Behind(proxy).http("sk-1") as http:
        assert (await http.get("https://api.openai.com/v1/models")).status_code == 502
        with pytest.raises(httpx.ProxyError, match="502"):  # nobody can say whether the session exists
            await http.get("https://mirror.example/")

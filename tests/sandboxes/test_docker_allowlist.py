"""Mode allowlist: a sealed container, the real interception proxy, and nothing beside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from capture_proxy.intercept.environment import agent_env
from sandboxes.base import Access, Endpoint, Mount, Network, NetworkMode, Proxy
from tests.capture.serving import listening
from tests.intercept.intercepting import Echo, Intercepted, intercepted, needs_mitmproxy
from tests.sandboxes.netboxes import Box, Engine, baits, open_engine

pytestmark = needs_mitmproxy

CERTIFICATES = "/opt/certificates"
FETCH = """
import json, sys, urllib.error, urllib.request
url, token = sys.argv[1:3]
headers = {"authorization": "Bearer some-key", "content-type": "application/json"}
body = None if len(sys.argv) < 4 else sys.argv[3].encode()
try:
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print("000", error)
"""


@dataclass
class Behind:
    box: Box
    proxied: Intercepted
    outside: Echo
    allowed: str  # HOST:PORT of `outside`
    token: str

    async def fetch(self, url: str, *body: str) -> tuple[int, str]:
        """As an agent does: through what its environment names."""
        env = agent_env(
            str(self.box.sandbox.proxy_url), self.token, f"{CERTIFICATES}/ca.pem", f"{CERTIFICATES}/ca-bundle.pem"
        )
        # The stand-in for an outside host has a local name here, which an agent would not send to its proxy.
        env["no_proxy"] = env["NO_PROXY"] = ""
        pairs = [f"{name}={value}" for name, value in env.items()]
        code, said = await self.box.run("env", *pairs, "python3", "-c", FETCH, url, self.token, *body)
        assert code == 0, said
        status, _, text = said.partition(" ")
        return int(status), text


@pytest.fixture
def engine(docker_engine: str, docker_base_image: str, tmp_path: Path) -> Iterator[Engine]:
    engine = open_engine(docker_engine, docker_base_image, tmp_path)
    yield engine
    assert engine.left() == []
    engine.api.close()


@contextlib.asynccontextmanager
async def behind(engine: Engine, folder: Path) -> AsyncIterator[Behind]:
    outside = Echo()
    async with listening(outside) as url:
        allowed = f"localhost:{urlsplit(url).port}"
        async with intercepted(ScriptedEngine("the answer"), folder, allow=(allowed,)) as proxied:
            ca_dir = proxied.proxy.ca_certificate.parent
            proxy = Proxy(Endpoint(url=proxied.proxy.url), (allowed,), ca_dir)
            access = Access(gateway=Endpoint(url=proxied.gateway.agent_url), proxies=(proxy,))
            network = Network(NetworkMode.ALLOWLIST, (allowed,))
            async with engine.run(access) as run:
                async with engine.box(run, network, mounts=(Mount(ca_dir, CERTIFICATES),)) as box:
                    yield Behind(box, proxied, outside, allowed, (await proxied.gateway.mint()).token)


async def test_an_allowed_host_passes_another_is_refused_and_recorded(engine: Engine, tmp_path: Path) -> None:
    async with behind(engine, tmp_path) as here:
        status, text = await here.fetch(f"http://{here.allowed}/a?b=c")
        assert status == 200 and json.loads(text)["path"] == "/a"
        assert here.outside.paths() == ["GET /a"]
        status, _ = await here.fetch("http://elsewhere.example/secret")
        assert status == 403
        status, text = await here.fetch("https://elsewhere.example/secret")
        assert status != 200
        details = [event["detail"] for event in here.proxied.events()]
        assert len(details) == 2 and all("elsewhere.example" in detail for detail in details)
        assert here.outside.paths() == ["GET /a"]


async def test_a_call_to_a_provider_is_answered_by_the_gateway(engine: Engine, tmp_path: Path) -> None:
    """With the provider's own address, as an agent that takes no base URL calls it."""
    async with behind(engine, tmp_path) as here:
        body = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
        status, text = await here.fetch("https://api.openai.com/v1/chat/completions", json.dumps(body))
        assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == "the answer"
        assert len((await here.proxied.gateway.admin.capture("s1")).turns) == 1


async def test_there_is_no_way_around_the_proxy(engine: Engine, tmp_path: Path) -> None:
    async with behind(engine, tmp_path) as here, baits() as found:
        ports = [int(urlsplit(url).port or 0) for url in (here.proxied.proxy.url, here.proxied.gateway.admin_url)]
        ports.append(int(here.allowed.partition(":")[2]))
        targets = [*found.targets(), ["dns", "localhost.example"], ["tcp", "1.1.1.1", 443]]
        targets += [["tcp", "127.0.0.1", port] for port in ports]
        assert await here.box.answered(targets) == []
        assert found.touched == []


async def test_a_host_that_only_another_tasks_list_names_is_not_let_through(engine: Engine, tmp_path: Path) -> None:
    """Each list has a proxy of its own, and a sandbox is led to the one with its list."""
    one, two = Echo(), Echo()
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(listening(echo)) for echo in (one, two)]
        allowed = [f"localhost:{urlsplit(url).port}" for url in urls]
        first = await stack.enter_async_context(intercepted(ScriptedEngine("ok"), tmp_path / "1", allow=(allowed[0],)))
        second = await stack.enter_async_context(intercepted(ScriptedEngine("ok"), tmp_path / "2", allow=(allowed[1],)))
        proxies = tuple(
            Proxy(Endpoint(url=each.proxy.url), (name,)) for each, name in zip((first, second), allowed, strict=True)
        )
        run = await stack.enter_async_context(engine.run(Access(proxies=proxies)))
        box = await stack.enter_async_context(engine.box(run, Network(NetworkMode.ALLOWLIST, (allowed[1],))))
        token = (await second.gateway.mint()).token
        here = Behind(box, second, two, allowed[1], token)
        answers = [(await here.fetch(f"http://{name}/"))[0] for name in allowed]
        assert answers == [403, 200]
        assert (one.paths(), two.paths()) == ([], ["GET /"])

"""What E2B's firewall is told, and what is refused because E2B cannot do it."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandboxes.base import Access, Command, Endpoint, Network, NetworkMode, Proxy, SandboxError
from sandboxes.e2b_network import reach
from tests.sandboxes.e2b_opening import SPEC, open_e2b
from tests.sandboxes.e2b_standin import Standin

NAMED = "https://x.tunnel.example"
NONE, ONLY, LIST, PUBLIC = NetworkMode


def access(url: str | None, proxy: str | None = None, allow: tuple[str, ...] = ()) -> Access:
    gateway = Endpoint(url="http://127.0.0.1:8101", public_url=url)
    proxies = (Proxy(Endpoint(url="http://127.0.0.1:8103", public_url=proxy), allow),) if allow else ()
    return Access(gateway=gateway, proxies=proxies)


def told(network: Network, to: Access) -> dict[str, Any]:
    plan = reach(network, to)
    return {
        "gateway": plan.gateway_url,
        "proxy": plan.proxy_url,
        **plan.options(dict.fromkeys(plan.to_resolve, "1.2.3.4")),
    }


SEALED = {"allow_public_traffic": False, "deny_out": ["0.0.0.0/0"]}
CASES: list[tuple[Network, Access, dict[str, Any]]] = [
    (Network(NONE), access(NAMED), {"gateway": None, "proxy": None, **SEALED, "dns_servers": []}),
    (Network(NONE), access(None), {"gateway": None, "proxy": None, **SEALED, "dns_servers": []}),
    (
        Network(ONLY),
        access(NAMED),
        {"gateway": NAMED, "proxy": None, **SEALED, "allow_out": ["x.tunnel.example"], "dns_servers": []},
    ),
    (  # E2B matches names on ports 80 and 443 only
        Network(ONLY),
        access("http://gw.example:8101"),
        {"gateway": "http://gw.example:8101", "proxy": None, **SEALED, "allow_out": ["1.2.3.4"], "dns_servers": []},
    ),
    (
        Network(ONLY),
        access("http://203.0.113.7:8101"),
        {
            "gateway": "http://203.0.113.7:8101",
            "proxy": None,
            **SEALED,
            "allow_out": ["203.0.113.7"],
            "dns_servers": [],
        },
    ),
    (Network(ONLY), Access(), {"gateway": None, "proxy": None, **SEALED, "dns_servers": []}),
    (
        Network(LIST, ("pypi.example", "Mirror.example:443", "10.1.0.0/16", "8.8.4.4:53")),
        access(NAMED),
        {
            "gateway": NAMED,
            "proxy": None,
            **SEALED,
            "allow_out": ["x.tunnel.example", "pypi.example", "mirror.example", "10.1.0.0/16", "8.8.4.4"],
            "dns_servers": [],
        },
    ),
    (  # somebody must resolve what is below a wildcard
        Network(LIST, ("*.files.example",)),
        access(NAMED),
        {"gateway": NAMED, "proxy": None, **SEALED, "allow_out": ["x.tunnel.example", "*.files.example"]},
    ),
    (  # with a proxy out there that one lets through, and only it is reached
        Network(LIST, ("pypi.example",)),
        access(NAMED, "http://203.0.113.8:8103", ("pypi.example",)),
        {
            "gateway": NAMED,
            "proxy": "http://203.0.113.8:8103",
            **SEALED,
            "allow_out": ["x.tunnel.example", "203.0.113.8"],
            "dns_servers": [],
        },
    ),
    (  # a proxy with another list is none
        Network(LIST, ("pypi.example",)),
        access(NAMED, "http://203.0.113.8:8103", ("everything.example",)),
        {
            "gateway": NAMED,
            "proxy": None,
            **SEALED,
            "allow_out": ["x.tunnel.example", "pypi.example"],
            "dns_servers": [],
        },
    ),
    (Network(PUBLIC), access(NAMED), {"gateway": NAMED, "proxy": None, "allow_public_traffic": False}),
]


@pytest.mark.parametrize(("network", "to", "expected"), CASES)
def test_modes_in_e2bs_words(network: Network, to: Access, expected: dict[str, Any]) -> None:
    assert told(network, to) == expected


@pytest.mark.parametrize("mode", [ONLY, LIST, PUBLIC])
@pytest.mark.parametrize(
    "url",
    [
        None,
        "http://127.0.0.1:8101",
        "http://localhost:8101",
        "http://gw.localhost",
        "http://[::1]:8101",
        "http://0.0.0.0:8101",
        "http://169.254.169.254",
        "http://192.168.1.4:8101",
        "http://10.0.0.4",
        "http://100.64.0.1",
        "http://host.docker.internal:8101",
        "unix:///run/gw.sock",
        "x.tunnel.example",
        "",
    ],
)
def test_a_gateway_that_cannot_be_reached_from_there_is_refused(mode: NetworkMode, url: str | None) -> None:
    with pytest.raises(SandboxError, match=r"public URL|public internet|must be a URL") as raised:
        reach(Network(mode), access(url))
    assert "\n" not in str(raised.value)


def test_a_deployment_of_ones_own_may_be_on_a_private_network() -> None:
    assert reach(Network(ONLY), access("http://10.0.0.4:80"), private_ok=True).gateway_url == "http://10.0.0.4:80"
    with pytest.raises(SandboxError):
        reach(Network(ONLY), access("http://127.0.0.1:80"), private_ok=True)


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (Network(LIST, ("db.example:5432",)), "db.example:5432"),
        (Network(LIST, ("*.files.example:8080",)), r"\*.files.example:8080"),
        (Network(ONLY, ("pypi.example",)), "allowlist"),
    ],
)
def test_what_the_firewall_cannot_do_is_refused(network: Network, says: str) -> None:
    with pytest.raises(SandboxError, match=says):
        reach(network, access(NAMED))


async def test_the_service_is_told_and_the_sandbox_knows_its_gateway(standin: Standin, tmp_path: Path) -> None:
    url = "http://203.0.113.7:8101"
    async with open_e2b(standin, tmp_path, access=access(url)) as backend:
        async with backend.sandbox(SPEC) as box:
            assert box.gateway_url == url and box.proxy_url is None
    network = next(iter(standin.lives.values())).body["network"]
    assert network == {
        "allowPublicTraffic": False,
        "allowOut": ["203.0.113.7"],
        "denyOut": ["0.0.0.0/0"],
        "dnsServers": [],
    }


async def test_names_are_known_inside_without_a_name_server(standin: Standin, tmp_path: Path) -> None:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, family=socket.AF_INET)[0][4][0]
    except OSError:
        pytest.skip("this machine's own name cannot be looked up")
    async with open_e2b(standin, tmp_path, access=access(f"http://{name}:8101")) as backend:
        async with backend.sandbox(SPEC) as box:
            assert f"{address} {name}\n" in (await box.get_text("/etc/hosts") or "")
    assert next(iter(standin.lives.values())).body["network"]["allowOut"] == [address]


async def test_a_name_that_nobody_knows_is_an_error_that_says_so(standin: Standin, tmp_path: Path) -> None:
    async with open_e2b(standin, tmp_path, access=access("https://nowhere.invalid")) as backend:
        with pytest.raises(SandboxError, match=re.escape("nowhere.invalid")):
            async with backend.sandbox(SPEC):
                pass
    assert standin.lives == {}


async def test_the_runs_own_mode_wins_over_the_tasks(standin: Standin, tmp_path: Path) -> None:
    spec = replace(SPEC, network=Network(LIST, ("pypi.example",)))
    async with open_e2b(standin, tmp_path, access=access(None), network=NONE) as backend:
        backend.check(spec)
        async with backend.sandbox(spec) as box:
            assert box.gateway_url is None
    async with open_e2b(standin, tmp_path, access=access(None)) as backend:
        for refuse in (backend.check, backend.sandbox):
            with pytest.raises(SandboxError, match="public URL"):
                refuse(spec)


async def test_the_agent_is_not_root_in_all_but_name(standin: Standin, tmp_path: Path) -> None:
    """E2B's own user may become root without a password, and may write programs that root finds first."""
    async with open_e2b(standin, tmp_path) as backend:
        async with backend.sandbox(SPEC) as box:
            script = "test ! -u /usr/bin/su && ! touch /usr/local/bin/cat && ! cat /root/.harness-trainer.json; id -u"
            result = await box.run(Command.shell(script))
            assert result.stdout == "1000\n" and "Permission denied" in result.stderr
        async with backend.sandbox(replace(SPEC, user="root")) as box:
            assert (await box.run(Command(["test", "-u", "/usr/bin/su"]))).exit_code == 0
            assert box.user == "root"

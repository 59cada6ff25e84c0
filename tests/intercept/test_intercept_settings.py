"""Hosts, providers and variables as people and agents see them; and what the proxy's program may import."""

import ast
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from capture_proxy.intercept import providers
from capture_proxy.intercept.environment import EXTENDING_VARIABLES, REPLACING_VARIABLES, agent_env
from capture_proxy.intercept.providers import DEFAULT_PROVIDERS, Provider, parse_allowed, parse_provider


@pytest.mark.parametrize(
    "entry",
    [
        "mirror.example",
        "Mirror.example ",
        "*.files.example",
        "localhost:8080",
        "localhost:*",
        "*.x.example:443",
        "[::1]:8443",
        "a_b.c",
    ],
)
def test_hosts_that_can_be_allowed(entry: str) -> None:
    assert parse_allowed(entry) == entry.strip().lower()


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "*",
        "*.",
        "*:443",
        "https://mirror.example",
        "mirror.example/simple",
        "mirror.example:",
        "mirror.example:0",
        "mirror.example:99999",
        "a b",
        "a.*.b",
        "mirror.example:https",
        "::1",
        "[::1",
        "*mirror.example",
        ".mirror.example",
        "mirror.example:²",
    ],
)
def test_entries_that_are_not_hosts_are_named(entry: str) -> None:
    with pytest.raises(ValueError, match="cannot be allowed: write HOST"):
        parse_allowed(entry)


def test_a_provider_is_a_host_and_perhaps_a_path() -> None:
    assert parse_provider("LLM.example.com") == Provider("llm.example.com")
    assert parse_provider("llm.example.com/openai/v1=/v1") == Provider("llm.example.com", (("/openai/v1/", "/v1/"),))
    assert parse_provider("*.example.com/a.b/=/") == Provider("*.example.com", ((r"/a\.b/", "/"),))
    for wrong in ("", "https://x", "x/v1", "x/v1=", "x/v1=v1", "*=/"):
        with pytest.raises(ValueError, match="provider"):
            parse_provider(wrong)


def test_no_two_providers_claim_one_host() -> None:
    hosts = [provider.host for provider in DEFAULT_PROVIDERS]
    assert len(hosts) == len(set(hosts))


def test_an_agents_variables_name_the_proxy_the_certificate_and_nothing_else() -> None:
    env = agent_env("http://10.0.0.1:3128", "sk-a/b:c@d%", "/ca.pem", "/bundle.pem")
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        parts = urlsplit(env[name])
        assert (parts.hostname, parts.port) == ("10.0.0.1", 3128)
        assert unquote(parts.password or "") == "sk-a/b:c@d%"
    assert {env[name] for name in EXTENDING_VARIABLES} == {"/ca.pem"}
    # A variable that replaces the roots gets the bundle, or the allowed hosts could not be verified.
    assert {env[name] for name in REPLACING_VARIABLES} == {"/bundle.pem"}
    assert {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CODEX_CA_CERTIFICATE"} <= set(REPLACING_VARIABLES)
    assert "NODE_EXTRA_CA_CERTS" in EXTENDING_VARIABLES
    assert "localhost" in env["NO_PROXY"] and env["NO_PROXY"] == env["no_proxy"]


def test_the_proxys_program_needs_only_mitmproxy_and_the_standard_library() -> None:
    folder = Path(providers.__file__).with_name("addon")
    roots = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.level != 1 or not node.module):
                roots.add(f"{'.' * node.level}{(node.module or '').partition('.')[0]}")
            elif isinstance(node, ast.ImportFrom):
                assert (folder / f"{node.module}.py").is_file(), f"{file.name} imports .{node.module}"
    assert roots - set(sys.stdlib_module_names) == {"mitmproxy"}

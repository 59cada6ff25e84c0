"""What a sandbox in E2B's cloud may reach, said in E2B's own network options.

Owns the mapping from `base.Network` to E2B's firewall and which addresses of ours a sandbox out there can use at all.
Pure: asks nobody, imports no SDK. Called by `e2b`.

E2B's firewall (https://e2b.dev/docs/network/internet-access) denies by address and allows by address or by name. A name
is matched only where it can be read, in HTTP on port 80 and TLS on port 443; a service on another port must be allowed
by address. With a name on the list a name server is allowed too unless we say otherwise, and a name server is a way
out: so names are written into the sandbox's /etc/hosts and no name server is allowed, except for wildcards.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from sandboxes.base import Access, Endpoint, Network, NetworkMode, SandboxError

_ALL = "0.0.0.0/0"
_NAMED_PORTS = {"80", "443", "*", ""}


@dataclass(frozen=True, slots=True)
class Reach:
    """How one sandbox is connected.

    Example: Reach(gateway_url="https://x.tunnel.example", proxy_url=None, names=("x.tunnel.example",), by_address=(),
    allow=(), wildcards=False, mode=NetworkMode.PROXY_ONLY).
    """

    mode: NetworkMode
    gateway_url: str | None
    proxy_url: str | None
    names: tuple[str, ...]  # allowed by name
    by_address: tuple[str, ...]  # names whose service is on another port: their addresses are allowed
    allow: tuple[str, ...]  # addresses and wildcards, as E2B takes them
    wildcards: bool  # somebody must resolve names inside

    @property
    def to_resolve(self) -> tuple[str, ...]:
        """Names whose IPv4 addresses `options` needs."""
        return () if self.mode is NetworkMode.PUBLIC else (*self.names, *self.by_address)

    def options(self, addresses: Mapping[str, str]) -> dict[str, object]:
        """E2B's `network` option; `addresses` are those of `to_resolve`."""
        options: dict[str, object] = {"allow_public_traffic": False}  # nobody calls into the sandbox
        if self.mode is NetworkMode.PUBLIC:
            return options
        allowed = [*self.names, *(addresses[name] for name in self.by_address), *self.allow]
        options["deny_out"] = [_ALL]
        if allowed:
            options["allow_out"] = list(dict.fromkeys(allowed))
        if not self.wildcards:
            options["dns_servers"] = []
        return options


def reach(network: Network, access: Access, *, private_ok: bool = False) -> Reach:
    """How a sandbox with this network is connected. Raises SandboxError when E2B cannot do it.

    `private_ok`: the sandboxes run in a deployment of one's own, which may reach private addresses.
    """
    mode = network.mode
    if network.allow and mode is not NetworkMode.ALLOWLIST:
        raise SandboxError(f"network mode {mode} takes no list of hosts; use mode allowlist, or drop the list")
    if mode is NetworkMode.NONE:
        return Reach(mode, None, None, (), (), (), False)
    gateway = _public(access.gateway, "the capture gateway", "the gateway's public URL", private_ok)
    found = access.proxy_for(network) if mode is NetworkMode.ALLOWLIST else None
    proxy = None
    if found is not None and found.endpoint.public_url is not None:
        proxy = _public(found.endpoint, "the interception proxy", "the proxy's public URL", private_ok)
    # Without a proxy out there E2B's own firewall holds the list.
    listed = [_split(entry) for entry in network.allow] if proxy is None else []
    names: list[str] = []
    by_address: list[str] = []
    allow: list[str] = []
    for url in (gateway, proxy):
        if url is not None:
            host, port = _host_and_port(url)
            (allow if _is_address(host) else names if port in _NAMED_PORTS else by_address).append(host)
    for host, port in listed:
        if not _is_address(host) and port not in _NAMED_PORTS:
            raise SandboxError(
                f"E2B opens names on ports 80 and 443 only, so {host}:{port} cannot be allowed; allow its IP address"
            )
        (allow if _is_address(host) or host.startswith("*.") else names).append(host)
    wildcards = any(host.startswith("*.") for host in allow)
    return Reach(mode, gateway, proxy, _unique(names), _unique(by_address), _unique(allow), wildcards)


def _public(endpoint: Endpoint | None, what: str, setting: str, private_ok: bool) -> str | None:
    """The endpoint's public URL. Raises SandboxError when a sandbox elsewhere cannot reach it."""
    if endpoint is None:
        return None
    url = endpoint.public_url
    if url is None:
        where = endpoint.url or endpoint.socket
        raise SandboxError(
            f"E2B's sandboxes run on other machines and cannot reach {what} at {where}: expose it (a tunnel) and set "
            f"{setting}"
        )
    parts = urllib.parse.urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    if parts.scheme not in ("http", "https") or not host:
        raise SandboxError(f"{setting} must be a URL like https://x.tunnel.example, not {url!r}")
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")) or _is_inner(host, private_ok):
        raise SandboxError(
            f"E2B's sandboxes run on other machines and cannot reach {what} at {url}: set {setting} to an address of "
            "the public internet"
        )
    return url


def _is_inner(host: str, private_ok: bool) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified or address.is_link_local or address.is_multicast:
        return True
    shared = address.version == 4 and address in ipaddress.ip_network("100.64.0.0/10")
    private = address.is_private and not any(
        address.version == net.version and address in net for net in _DOCUMENTATION
    )
    return (private or shared) and not private_ok


# Python counts these as private, but they stand for public ones wherever examples are written.
_DOCUMENTATION = [ipaddress.ip_network(n) for n in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_network(host, strict=False)
    except ValueError:
        return False
    return True


def _host_and_port(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    port = str(parts.port or {"http": 80, "https": 443}[parts.scheme])
    return (parts.hostname or "").rstrip("."), port


def _split(entry: str) -> tuple[str, str]:
    """HOST, HOST:PORT, HOST:* or *.SUFFIX, IPv6 addresses in brackets."""
    if entry.startswith("["):
        host, _, rest = entry[1:].partition("]")
        return host, rest.removeprefix(":")
    if entry.count(":") > 1:
        return entry, ""
    host, _, port = entry.partition(":")
    return host.lower().rstrip("."), port


def _unique(values: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))

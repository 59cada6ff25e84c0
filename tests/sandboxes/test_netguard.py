"""What the guard of a public sandbox's network closes, as told by this host's own files."""

import ipaddress
import os
import subprocess
import sys

import pytest

from sandboxes import netguard
from sandboxes.docker_relay import own_addresses
from sandboxes.netguard import Rules, close_ways, known_resolvers, own_subnets

ROUTES = """Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth0	00000000	010012AC	0003	0	0	0	00000000	0	0	0
eth0	000012AC	00000000	0001	0	0	0	0000FFFF	0	0	0
"""
TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     +-- 127.0.0.0/8 2 0 2
        +-- 127.0.0.0/31 1 0 0
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
        |-- 127.255.255.255
           /32 link BROADCAST
     +-- 192.0.2.0/24 2 0 2
        |-- 192.0.2.0
           /24 link UNICAST
        |-- 192.0.2.2
           /32 host LOCAL
        |-- 192.0.2.255
           /32 link BROADCAST
Local:
     |-- 192.0.2.2
        /32 host LOCAL
     |-- 172.17.0.1
        /32 host LOCAL
"""


class Noted(Rules):
    """Rules that are remembered instead of made: the order and the protocols are what matters."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, int, int | None]] = []  # network, action, priority, protocol

    def _add(self, to: ipaddress.IPv4Network, action: int, priority: int, extra: bytes = b"") -> None:
        protocol = extra[extra.index(b"\x05\x00\x16\x00") + 4] if extra else None
        self.made.append((str(to), action, priority, protocol))

    def prohibited(self, address: str, protocol: int, port: int = 0, *, resolver: str = "") -> bool:
        """What the kernel would decide, rule by rule."""
        for network, action, _, named in sorted(self.made, key=lambda rule: rule[2]):
            if action == 1 and named in (6, 17) and port != 53:
                continue  # only the resolvers' port
            if ipaddress.IPv4Address(address) in ipaddress.IPv4Network(network) and named in (None, protocol):
                return action != 1
        return False


def closed(others: list[str], resolvers: list[str]) -> Noted:
    rules = Noted()
    close_ways(rules, own_subnets(ROUTES), others, resolvers)
    return rules


def test_the_own_subnet_is_read_from_the_routes() -> None:
    assert own_subnets(ROUTES) == [ipaddress.IPv4Network("172.18.0.0/16")]
    assert own_subnets(ROUTES.splitlines()[0]) == []


@pytest.mark.parametrize(
    ("address", "protocol", "port", "is_closed"),
    [
        ("172.18.0.1", 6, 22, True),  # the bridge: this host
        ("172.18.0.7", 17, 53, True),  # a neighbour
        ("172.17.0.1", 6, 80, True),  # docker0
        ("192.0.2.2", 6, 80, True),  # the host's public address
        ("169.254.169.254", 6, 80, True),
        ("10.9.8.7", 6, 53, True),
        ("10.0.0.2", 17, 53, False),  # the resolver
        ("10.0.0.2", 6, 53, False),
        ("10.0.0.2", 6, 80, True),
        ("172.18.0.1", 0, 0, False),  # the kernel's look at an ARP question: it must be answered
        ("10.0.0.2", 1, 0, False),  # a router's "packet too large"
        ("9.255.255.255", 6, 443, False),
        ("11.0.0.0", 6, 443, False),
        ("172.15.255.255", 17, 443, False),
        ("172.32.0.0", 6, 443, False),
    ],
)
def test_only_the_internet_and_the_resolvers_stay_open(address: str, protocol: int, port: int, is_closed: bool) -> None:
    assert closed(["192.0.2.2/32"], ["10.0.0.2"]).prohibited(address, protocol, port) is is_closed


def test_a_rule_without_a_protocol_never_covers_the_own_subnet() -> None:
    own = ipaddress.IPv4Network("172.18.0.0/16")
    for network, _, _, protocol in closed(["172.18.0.1/32"], []).made:
        assert protocol is not None or not ipaddress.IPv4Network(network).overlaps(own), network


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("nameserver 10.0.0.2\nnameserver 127.0.0.11\nnameserver ::1\nsearch corp\n", ["10.0.0.2"]),
        ("nameserver 127.0.0.11\n# ExtServers: [10.0.0.2 host(127.0.0.53) 9.9.9.9]\n", ["10.0.0.2", "9.9.9.9"]),
        ("# nameserver 10.0.0.2\noptions ndots:0\n", []),
        ("nameserver fe80::1%eth0\nnameserver not-an-address\nnameserver 1.2.3.4 # home\n", ["1.2.3.4"]),
        ("", []),
    ],
)
def test_resolvers_are_those_that_docker_asks(text: str, servers: list[str]) -> None:
    assert known_resolvers(text) == servers


def test_own_addresses_are_all_interfaces_but_loopback() -> None:
    assert own_addresses(TRIE) == ["172.17.0.1", "192.0.2.2"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give it up")
def test_without_the_right_to_close_it_does_not_go_on() -> None:
    """A sidecar that could not close the ways out must not run."""
    command = [sys.executable, netguard.__file__, "--user", "65532", "--", "echo", "went on"]
    # In a namespace of its own: were it to go on, it would close this host's ways out.
    drop = ["unshare", "-n", "setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", "--"]
    done = subprocess.run([*drop, *command], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stdout == "", done
    assert done.stderr.startswith("netguard: ") and "Traceback" not in done.stderr

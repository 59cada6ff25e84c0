"""Closes a network namespace towards everything but the internet, from within, and then becomes another program.

Owns the routing rules by which a container on a bridge cannot reach the machine it runs on, that machine's private
networks, the cloud's metadata service or its neighbours. They live in the container's own namespace, so they need no
right on the host; whoever joins the namespace without CAP_NET_ADMIN cannot take them away. The first program of a
`public` sandbox's sidecar (see `docker_network`), which it turns into an ordinary user before it goes on.

This file is copied alone into the relay's image: standard library only, any Python from 3.8 on, no `ip` program.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import socket
import struct
import sys
from pathlib import Path

# What is not the internet (IANA's special-purpose registry). Loopback is the namespace's own.
NOT_INTERNET = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
)
# Protocols that a socket can speak without CAP_NET_RAW: TCP, UDP, DCCP, L2TP, SCTP, UDP-Lite. Rules for the namespace's
# own subnet name them: a rule without a protocol would also hold for the kernel's look at who asks for our hardware
# address, and the bridge's question would go unanswered.
_PROTOCOLS = (6, 17, 33, 115, 132, 136)
_ICMP = 1
CLOSED = "netguard: closed"  # what it says when nothing but the internet is left
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_EXCL, _NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
_RTM_NEWRULE, _NLMSG_ERROR = 32, 2
_FRA_DST, _FRA_PRIORITY, _FRA_TABLE, _FRA_IP_PROTO, _FRA_DPORT_RANGE = 1, 6, 15, 22, 24
_TO_TABLE, _PROHIBIT = 1, 8
_MAIN = 254  # the routing table that leads out
_OPEN_PRIORITY, _CLOSED_PRIORITY = 100, 200


class Rules:
    """Routing rules of this namespace, added through rtnetlink (linux/fib_rules.h). Needs CAP_NET_ADMIN."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._number = 0

    def close(self) -> None:
        self._socket.close()

    def open_icmp(self) -> None:
        """Without it the notes of routers on the way (a packet is too large) are lost. Echo requests pass as well."""
        self._add(ipaddress.IPv4Network("0.0.0.0/0"), _TO_TABLE, _OPEN_PRIORITY, _protocol(_ICMP))

    def open_dns(self, server: str) -> None:
        for number in (6, 17):
            extra = _attribute(_FRA_DPORT_RANGE, struct.pack("=HH", 53, 53)) + _protocol(number)
            self._add(ipaddress.IPv4Network(server), _TO_TABLE, _OPEN_PRIORITY, extra)

    def close_network(self, network: ipaddress.IPv4Network) -> None:
        self._add(network, _PROHIBIT, _CLOSED_PRIORITY)

    def close_own_subnet(self, network: ipaddress.IPv4Network) -> None:
        for number in _PROTOCOLS:
            self._add(network, _PROHIBIT, _CLOSED_PRIORITY, _protocol(number))

    def _add(self, to: ipaddress.IPv4Network, action: int, priority: int, extra: bytes = b"") -> None:
        table = _MAIN if action == _TO_TABLE else 0
        body = struct.pack("=8BI", socket.AF_INET, to.prefixlen, 0, 0, table, 0, 0, action, 0)
        if to.prefixlen:
            body += _attribute(_FRA_DST, to.network_address.packed)
        body += _attribute(_FRA_PRIORITY, struct.pack("=I", priority)) + extra
        self._number += 1
        flags = _NLM_F_REQUEST | _NLM_F_ACK | _NLM_F_CREATE | _NLM_F_EXCL
        self._socket.send(struct.pack("=IHHII", 16 + len(body), _RTM_NEWRULE, flags, self._number, 0) + body)
        answer = self._socket.recv(8192)
        _, kind, _, _, _, error = struct.unpack_from("=IHHIIi", answer)
        if kind != _NLMSG_ERROR or error:
            raise OSError(-error, f"cannot close the way to {to}: {os.strerror(-error)}")


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _protocol(number: int) -> bytes:
    return _attribute(_FRA_IP_PROTO, bytes([number]))


def close_ways(rules: Rules, subnets: list[ipaddress.IPv4Network], others: list[str], resolvers: list[str]) -> None:
    """Leave the internet, port 53 of `resolvers`, and ICMP. `others` are closed beside what is never the internet."""
    rules.open_icmp()
    for server in resolvers:
        rules.open_dns(server)
    for subnet in subnets:
        rules.close_own_subnet(subnet)
    closed = [ipaddress.IPv4Network(text) for text in (*NOT_INTERNET, *others)]
    for network in ipaddress.collapse_addresses(piece for whole in closed for piece in _without(whole, subnets)):
        rules.close_network(network)


def _without(network: ipaddress.IPv4Network, holes: list[ipaddress.IPv4Network]) -> list[ipaddress.IPv4Network]:
    rest = [network]
    for hole in holes:
        rest = [
            piece
            for whole in rest
            for piece in (
                [] if whole.subnet_of(hole) else whole.address_exclude(hole) if hole.subnet_of(whole) else [whole]
            )
        ]
    return rest


def own_subnets(routes: str) -> list[ipaddress.IPv4Network]:
    """The directly attached networks in the text of /proc/net/route."""
    found = []
    for line in routes.splitlines()[1:]:
        _, destination, gateway, _, _, _, _, mask = line.split()[:8]
        if gateway == "00000000" and mask != "00000000":
            address, bits = (struct.pack("=I", int(text, 16)) for text in (destination, mask))
            found.append(ipaddress.IPv4Network((address, str(ipaddress.IPv4Address(bits)))))
    return found


def known_resolvers(resolv_conf: str) -> list[str]:
    """The IPv4 servers a resolv.conf names, Docker's comment on those behind its own resolver included."""
    named = re.findall(r"^nameserver\s+(\S+)", resolv_conf, re.MULTILINE)
    for line in re.findall(r"^# ExtServers: \[(.*)\]", resolv_conf, re.MULTILINE):
        named += line.replace("host(", "").replace(")", "").split()
    servers = []
    for name in named:
        try:
            address = ipaddress.IPv4Address(name)
        except ValueError:
            continue
        if not address.is_loopback:
            servers.append(str(address))
    return servers


def main(argv: list[str] | None = None) -> int:
    """Close, give up every right, run the command. Returns (1) only when one of these failed."""
    args = _parser().parse_args(argv)
    try:
        resolvers = [*args.resolver, *known_resolvers(Path("/etc/resolv.conf").read_text())]
        rules = Rules()
        subnets = own_subnets(Path("/proc/net/route").read_text())
        close_ways(rules, subnets, args.closed, list(dict.fromkeys(resolvers)))
        rules.close()
        os.setgroups([])
        os.setgid(args.user)
        os.setuid(args.user)
        print(CLOSED, flush=True)
        command = args.command[1:] if args.command[0] == "--" else args.command
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:
        print(f"netguard: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="netguard", description="Close this network namespace but for the internet.")
    parser.add_argument("--user", type=int, required=True, help="uid and gid to go on as")
    parser.add_argument("--closed", action="append", default=[], metavar="CIDR", help="one more network to close")
    parser.add_argument("--resolver", action="append", default=[], metavar="IP", help="its port 53 stays open")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program to become")
    return parser


if __name__ == "__main__":
    sys.exit(main())

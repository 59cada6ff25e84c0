"""Containers in the network of a run, baits on the host, and a look at what reached them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker

from sandboxes.base import Access, BoxSpec, Command, Mount, Network, Sandbox
from sandboxes.docker import DockerBackend, DockerConfig
from sandboxes.docker_api import connect
from sandboxes.docker_labels import RUN
from sandboxes.docker_relay import own_addresses

PROBE = Path(__file__).with_name("netprobe.py").read_text()
METADATA = "169.254.169.254"


@dataclass
class Box:
    """A sandbox, and what it can reach."""

    sandbox: Sandbox

    @property
    def name(self) -> str:
        return self.sandbox.sandbox_id

    @property
    def relay(self) -> str:
        return f"{self.name}-net"

    async def run(self, *argv: str, user: str | None = None) -> tuple[int, str]:
        result = await self.sandbox.run(Command(argv, user=user, timeout_s=60))
        assert result.exit_code is not None, result
        return result.exit_code, result.stdout + result.stderr

    async def answered(self, targets: Sequence[Sequence[Any]], user: str | None = None) -> list[Any]:
        """Which of the targets answered."""
        _, output = await self.run("python3", "-c", PROBE, json.dumps(targets), user=user)
        results = json.loads(output)
        assert len(results) == len(targets)
        return [target for target, answered, _ in results if answered]


@dataclass
class Engine:
    """The real engine, for one run."""

    api: docker.APIClient
    address: str
    image: str
    registry: Path
    run_id: str

    def run(self, access: Access, *, spares: int = 0) -> DockerBackend:
        config = DockerConfig(host=self.address, image=self.image, relay_base=self.image, spare_relays=spares)
        return DockerBackend(config, run_id=self.run_id, registry=self.registry, access=access)

    @contextlib.asynccontextmanager
    async def box(
        self, run: DockerBackend, network: Network, *, user: str = "root", mounts: tuple[Mount, ...] = ()
    ) -> AsyncIterator[Box]:
        spec = BoxSpec("network-test", image=self.image, user=user, network=network, mounts=mounts)
        async with run.sandbox(spec) as sandbox:
            yield Box(sandbox)

    def left(self) -> list[str]:
        """What of the run is still in the engine or on record."""
        filters = {"label": f"{RUN}={self.run_id}"}
        names = [c["Names"][0].lstrip("/") for c in self.api.containers(all=True, filters=filters)]
        names += [n["Name"] for n in self.api.networks(filters=filters)]
        return names + [path.name for path in self.registry.glob("*")]


def open_engine(address: str, image: str, folder: Path) -> Engine:
    return Engine(connect(address), address, image, folder / "owned", f"test-{folder.name}")


@dataclass
class Baits:
    """Listeners on this host that no sandbox may reach. `touched` says which were."""

    everywhere: int = 0  # ports
    loopback: int = 0
    ipv6: int | None = None
    udp: int = 0
    touched: list[str] = field(default_factory=list)

    def targets(self) -> list[list[Any]]:
        """Every address of this host, with every bait."""
        targets: list[list[Any]] = []
        for address in [*own_addresses(Path("/proc/net/fib_trie").read_text()), "127.0.0.1", "127.0.0.2"]:
            targets += [["tcp", address, port] for port in (self.everywhere, self.loopback)]
            targets.append(["udp", address, self.udp])
        for address in _own_ipv6():
            targets += [["tcp", address, port] for port in (self.ipv6, self.everywhere) if port is not None]
        return targets


@contextlib.asynccontextmanager
async def baits() -> AsyncIterator[Baits]:
    found = Baits()

    def bait(name: str) -> Any:
        async def touch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.touched.append(f"{name} from {writer.get_extra_info('peername')}")
            writer.close()

        return touch

    class Udp(asyncio.DatagramProtocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: Any) -> None:
            found.touched.append(f"udp from {addr}")
            self.transport.sendto(data, addr)

    async with contextlib.AsyncExitStack() as stack:
        for name, host in (("everywhere", "0.0.0.0"), ("loopback", "127.0.0.1"), ("ipv6", "::")):
            with contextlib.suppress(OSError):  # a host without IPv6
                server = await asyncio.start_server(bait(name), host, 0)
                await stack.enter_async_context(server)
                setattr(found, name, server.sockets[0].getsockname()[1])
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Udp, ("0.0.0.0", 0))
        stack.callback(transport.close)
        found.udp = transport.get_extra_info("sockname")[1]
        assert found.everywhere and found.loopback
        yield found


def gateways(api: docker.APIClient) -> list[str]:
    """The host's addresses on the engine's networks, docker0's among them."""
    configs = [config for network in api.networks() for config in network["IPAM"]["Config"] or []]
    return [config["Gateway"] for config in configs if "Gateway" in config]


def _own_ipv6() -> list[str]:
    try:
        text = Path("/proc/net/if_inet6").read_text()
    except OSError:
        return []
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[:32])) for line in text.splitlines()]


def blocks_vsock(api: docker.APIClient) -> bool:
    """Engines refuse AF_VSOCK, which is no part of a network namespace, by default since 23.0."""
    major = re.match(r"\d+", api.version()["Version"])
    return major is not None and int(major[0]) >= 23

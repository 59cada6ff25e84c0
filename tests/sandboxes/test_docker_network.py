"""From inside a container: nothing answers but what the mode allows. The engine, the relay and the gateway are real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker
import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from sandboxes.base import Access, Endpoint, Network, NetworkMode, Proxy, SandboxError
from sandboxes.docker import DockerBackend
from sandboxes.docker_images import Images
from sandboxes.docker_network import GATEWAY_PORT, PROXY_PORT, DockerNetwork
from sandboxes.docker_sidecar import NetworkLink
from sandboxes.ownership import claim
from tests.capture.serving import Served, served
from tests.sandboxes.netboxes import METADATA, Baits, Box, Engine, baits, blocks_vsock, gateways, open_engine

SEALED = Network(NetworkMode.PROXY_ONLY)
PUBLIC = Network(NetworkMode.PUBLIC)
NONE = Network(NetworkMode.NONE)
CHAT = """
import json, sys, time, urllib.request
url, token, stream = sys.argv[1], sys.argv[2], sys.argv[3] == "stream"
body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
headers = {"authorization": "Bearer " + token, "content-type": "application/json"}
request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
with opener.open(request, timeout=30) as answer:
    for line in answer:
        print(round(time.monotonic(), 3), line.decode().strip(), flush=True)
"""
# rtnetlink: take the guard's first rule away (RTM_DELRULE, priority 200); a new dummy interface (RTM_NEWLINK).
CHANGES = [
    ["netlink", 33, "020000000000000000000000" + "08000600c8000000"],
    ["netlink", 16, "00" * 16 + "10001200" + "0a00010064756d6d79000000"],
]


@pytest.fixture
def engine(docker_engine: str, docker_base_image: str, tmp_path: Path) -> Iterator[Engine]:
    """Fails the test that leaves something of its run behind."""
    folders = set(Path(tempfile.gettempdir()).glob("network-*"))
    engine = open_engine(docker_engine, docker_base_image, tmp_path)
    yield engine
    left = engine.left()
    engine.api.close()
    assert left == []
    mine = [f for f in set(Path(tempfile.gettempdir()).glob("network-*")) - folders if f"-{os.getpid()}-" in f.name]
    assert mine == []


@contextlib.asynccontextmanager
async def sealed(
    engine: Engine, tmp_path: Path, network: Network = SEALED
) -> AsyncIterator[tuple[Box, Served, DockerBackend]]:
    async with served(ScriptedEngine([Reply(["one ", "two ", "three"])]), tmp_path / "store.sqlite") as gateway:
        async with engine.run(Access(gateway=Endpoint(url=gateway.agent_url))) as run:
            async with engine.box(run, network) as box:
                yield box, gateway, run


def elsewhere(engine: Engine, found: Baits) -> list[list[object]]:
    """What is neither this host nor the sandbox: metadata, name servers, the internet, private networks."""
    hosts = [*gateways(engine.api), METADATA, "100.100.100.200", "10.0.0.1", "192.168.0.1", "1.1.1.1", "fd00:ec2::254"]
    targets: list[list[object]] = [["tcp", host, port] for host in hosts for port in (80, found.everywhere)]
    targets += [["udp", host, 53] for host in hosts] + [["tcp", host, 53] for host in hosts]
    targets += [["dns", name] for name in ("example.com", "metadata.google.internal", "host.docker.internal")]
    return targets


def ways_out(engine: Engine) -> list[list[object]]:
    """Other families of sockets than a network's."""
    sockets = ["/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/ht/control.sock"]
    targets: list[list[object]] = [["unix", path] for path in (*sockets, engine.address.removeprefix("unix://"))]
    targets += [["raw", "127.0.0.1"], ["packet", "lo"], ["packet", "eth0"]]
    return targets + ([["vsock", 2]] if blocks_vsock(engine.api) else [])


@pytest.mark.parametrize("user", ["0", "65534"], ids=["root", "nobody"])
async def test_sealed_nothing_answers_but_the_gateways_agent_port(engine: Engine, tmp_path: Path, user: str) -> None:
    async with sealed(engine, tmp_path) as (box, gateway, _), baits() as found:
        admin_port = int(gateway.admin_url.rpartition(":")[2])
        agent_port = int(gateway.agent_url.rpartition(":")[2])
        own = ["127.0.0.1", *gateways(engine.api)]
        targets = [*found.targets(), *elsewhere(engine, found), *ways_out(engine)]
        targets += [["tcp", host, port] for host in own for port in (admin_port, agent_port)]
        door = ["tcp", "127.0.0.1", GATEWAY_PORT]
        assert len(targets) > 50
        assert await box.answered([*targets, door], user=user) == [door]
        assert found.touched == []
        token = (await gateway.mint(f"s{user}")).token
        code, said = await box.run("python3", "-c", CHAT, str(box.sandbox.gateway_url), token, "whole", user=user)
        assert code == 0 and json.loads(said.split(" ", 1)[1])["choices"][0]["message"]["content"] == "one two three"
        code, said = await box.run("python3", "-c", CHAT, str(box.sandbox.gateway_url), "wrong", "whole", user=user)
        assert code != 0 and "401" in said


async def test_sealed_a_stream_arrives_piece_by_piece(engine: Engine, tmp_path: Path) -> None:
    scripted = ScriptedEngine([Reply(["one", "two", "three"])], piece_delay_s=0.3)
    async with served(scripted, tmp_path / "store.sqlite") as gateway:
        async with (
            engine.run(Access(gateway=Endpoint(url=gateway.agent_url))) as run,
            engine.box(run, SEALED) as box,
        ):
            token = (await gateway.mint()).token
            code, said = await box.run("python3", "-c", CHAT, str(box.sandbox.gateway_url), token, "stream")
    assert code == 0
    times = [float(line.split()[0]) for line in said.splitlines() if re.search('"content": ?"(one|two|three)"', line)]
    assert len(times) == 3 and times[1] - times[0] > 0.15 and times[2] - times[1] > 0.15


async def test_a_gateway_with_a_socket_is_reached_without_a_bridge_and_again_after_a_restart(
    engine: Engine, tmp_path: Path
) -> None:
    async def once(word: bytes) -> asyncio.Server:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(word)
            writer.close()

        server = await asyncio.start_unix_server(answer, path)
        os.chmod(path, 0o666)
        return server

    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        path = Path(name) / "agents" / "gateway.sock"
        path.parent.mkdir(mode=0o711)
        read = "exec 3<>/dev/tcp/127.0.0.1/$1 && cat <&3"
        first = await once(b"first")
        async with engine.run(Access(gateway=Endpoint(url="http://127.0.0.1:9", socket=path))) as run:
            async with engine.box(run, SEALED) as box:
                ask = ("bash", "-c", read, "-", str(GATEWAY_PORT))
                assert await box.run(*ask) == (0, "first")
                first.close()
                path.unlink()
                _, said = await box.run(*ask)
                assert said == "" or "reset" in said, "nobody is there now"
                second = await once(b"second")
                assert await box.run(*ask) == (0, "second")
                second.close()


async def test_sandboxes_of_one_run_do_not_reach_each_other(engine: Engine, tmp_path: Path) -> None:
    serve = "import http.server as h; h.HTTPServer(('0.0.0.0', 8000), h.SimpleHTTPRequestHandler).serve_forever()"
    mine = ["tcp", "127.0.0.1", 8000]
    async with served(ScriptedEngine("ok"), tmp_path / "store.sqlite") as gateway:
        async with engine.run(Access(gateway=Endpoint(url=gateway.agent_url))) as run:
            for network in (SEALED, PUBLIC):
                async with engine.box(run, network) as one, engine.box(run, network) as two:
                    await one.run("bash", "-c", f'nohup python3 -c "{serve}" >/dev/null 2>&1 &')
                    async with asyncio.timeout(10):
                        while not await one.answered([mine]):
                            pass
                    _, addresses = await one.run("hostname", "-I")
                    neighbour = [["tcp", address, 8000] for address in addresses.split()]
                    assert bool(neighbour) == (network is PUBLIC)
                    assert await one.answered(neighbour) == neighbour, "it does serve there"
                    assert await two.answered([mine, *neighbour]) == []


async def test_root_inside_finds_no_way_out(engine: Engine, tmp_path: Path) -> None:
    attempts = {
        "a new network namespace": "unshare -n true",
        "a user namespace": "unshare -Ur true",
        "the host's namespace": "nsenter -t 1 -n true",
        "a mount": "mount -t tmpfs none /mnt",
        "forwarding": "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "IPv6": "echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6",
        "this machine's memory": "mknod /tmp/mem c 1 1 && exec 3<>/tmp/mem",
        "the relay's files": "ls /run/ht",
        "the relay's process": "pgrep -f '[r]elay.py'",
    }
    async with sealed(engine, tmp_path) as (box, _, _):
        for what, script in attempts.items():
            code, said = await box.run("bash", "-c", script)
            assert code != 0, f"{what}: {said}"
        assert await box.answered([*CHANGES, ["tunnel", "/tmp/tun"], ["packet", "lo"], ["raw", "127.0.0.1"]]) == []
        _, devices = await box.run("bash", "-c", "tail -n +3 /proc/net/dev | cut -d: -f1")
        assert devices.split() == ["lo"]
        _, resolver = await box.run("cat", "/etc/resolv.conf")
        assert re.findall(r"nameserver (\S+)", resolver) == ["127.0.0.1"], "nothing of this host's resolver is told"
        _, told = await box.run("bash", "-c", "cat /etc/hosts /etc/hostname; env")
        assert os.uname().nodename not in told.split()


async def test_the_proxy_of_the_person_who_runs_docker_stays_outside(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker's client gives it to every container it makes, password and all, unless told not to."""
    proxies = {"default": {"httpProxy": "http://me:secret@proxy.corp:3128", "noProxy": "corp"}}
    (tmp_path / "config.json").write_text(json.dumps({"proxies": proxies}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    async with sealed(engine, tmp_path) as (box, _, _):
        _, env = await box.run("env")
        assert "proxy" not in env.lower()
        made = await asyncio.to_thread(engine.api.inspect_container, box.relay)
        assert "secret" not in str(made["Config"])


async def test_without_a_network_there_is_loopback_and_nothing_else(engine: Engine, tmp_path: Path) -> None:
    async with sealed(engine, tmp_path, NONE) as (box, _, _), baits() as found:
        assert (box.sandbox.gateway_url, box.sandbox.proxy_url) == (None, None)
        door = ["tcp", "127.0.0.1", GATEWAY_PORT]
        assert await box.answered([*found.targets(), *elsewhere(engine, found), *ways_out(engine), door]) == []
        assert found.touched == []
        assert (await asyncio.to_thread(engine.left))[1:] == [f"{box.name}.json"], "no relay, no network"


async def test_a_run_without_a_gateway_is_sealed_too(engine: Engine) -> None:
    async with engine.run(Access()) as run, engine.box(run, SEALED) as box, baits() as found:
        assert box.sandbox.gateway_url is None
        assert await box.answered([*found.targets(), *elsewhere(engine, found)]) == []


async def test_public_reaches_the_gateway_but_no_port_or_neighbour_of_this_host(engine: Engine, tmp_path: Path) -> None:
    async with sealed(engine, tmp_path, PUBLIC) as (box, gateway, _), baits() as found:
        admin_port = int(gateway.admin_url.rpartition(":")[2])
        hosts = [*gateways(engine.api), METADATA, "100.100.100.200", "10.0.0.1", "192.168.0.1", "fd00:ec2::254"]
        targets = [*found.targets(), *ways_out(engine)]
        targets += [["tcp", host, port] for host in hosts for port in (80, 22, admin_port, found.everywhere)]
        assert any(host in gateways(engine.api) for _, host, *_ in targets)
        assert await box.answered(targets) == []
        assert found.touched == []
        token = (await gateway.mint()).token
        code, said = await box.run("python3", "-c", CHAT, str(box.sandbox.gateway_url), token, "stream")
        assert code == 0 and "three" in said
        for script in ("unshare -n true", "echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6"):
            assert (await box.run("bash", "-c", script))[0] != 0
        assert await box.answered([*CHANGES, ["tunnel", "/tmp/tun"]]) == []
        assert (await box.run("cat", "/proc/net/if_inet6"))[1].strip() == ""


@pytest.fixture
def outside() -> Iterator[str]:
    """An address beyond this host: another network namespace, with a web server in it."""
    name = f"ht-test-{os.getpid()}"
    pair = f"ht{os.getpid() % 10**6}"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make a network namespace to stand for the internet: {error}")
    server = None
    try:
        ip("link", "add", f"{pair}a", "type", "veth", "peer", "name", f"{pair}b", "netns", name)
        ip("addr", "add", "203.0.113.1/30", "dev", f"{pair}a")
        ip("link", "set", f"{pair}a", "up")
        for command in (["addr", "add", "203.0.113.2/30", "dev", f"{pair}b"], ["link", "set", f"{pair}b", "up"]):
            ip("-n", name, *command)
        argv = ["ip", "netns", "exec", name, "python3", "-u", "-m", "http.server", "80", "--bind", "203.0.113.2"]
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert server.stdout is not None and "Serving" in server.stdout.readline()
        yield "203.0.113.2"
    finally:
        if server is not None:
            server.kill()
            server.communicate()
        ip("netns", "del", name)
        subprocess.run(["ip", "link", "del", f"{pair}a"], check=False, capture_output=True)


async def test_public_reaches_the_internet_and_sealed_does_not(engine: Engine, tmp_path: Path, outside: str) -> None:
    target = ["tcp", outside, 80]
    async with sealed(engine, tmp_path, PUBLIC) as (box, _, run):
        assert await box.answered([target, ["tcp", "203.0.113.1", 80]]) == [target]
        code, page = await box.run("curl", "-sS", "--max-time", "5", f"http://{outside}/")
        assert code == 0 and "Directory listing" in page
        async with engine.box(run, SEALED) as other:
            assert await other.answered([target]) == []


async def test_a_killed_relay_is_the_sandboxs_fault_and_nobody_elses(engine: Engine, tmp_path: Path) -> None:
    async with sealed(engine, tmp_path) as (box, _, run):
        async with engine.box(run, SEALED) as other:
            await box.sandbox.renew()
            await asyncio.to_thread(engine.api.kill, box.relay)
            started = time.monotonic()
            while True:
                try:
                    await box.sandbox.renew()
                except SandboxError as error:
                    assert "relay" in str(error) and "exit code 137" in str(error)
                    break
                assert time.monotonic() - started < 2
                await asyncio.sleep(0.01)
            await other.sandbox.renew()
            assert await other.answered([["tcp", "127.0.0.1", GATEWAY_PORT]]) != []


async def test_a_removed_relay_is_noticed(engine: Engine, tmp_path: Path) -> None:
    async with sealed(engine, tmp_path) as (box, _, _):
        await asyncio.to_thread(engine.api.remove_container, box.relay, force=True)
        await asyncio.sleep(0.1)
        with pytest.raises(SandboxError, match="removed"):
            await box.sandbox.renew()


async def test_a_relay_that_cannot_start_says_why(engine: Engine, tmp_path: Path) -> None:
    async with gateway_run(engine, tmp_path) as run:
        link = await place(engine, run, "same-name")
        again = await place(engine, run, "same-name")
        await link.start()
        with pytest.raises(SandboxError, match="relay could not be started: .*already in use"):
            await again.start()
        await link.remove()
        await again.remove()


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.1, 0.3])
async def test_a_cancelled_start_leaves_nothing(engine: Engine, tmp_path: Path, pause_s: float) -> None:
    async with gateway_run(engine, tmp_path) as run:
        link = await place(engine, run, "cancelled")
        starting = asyncio.create_task(link.start())
        await asyncio.sleep(pause_s)
        starting.cancel()
        await asyncio.wait([starting])
        await link.remove()
        await link.remove()


@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.05, 0.2])
async def test_a_run_that_is_cancelled_while_it_prepares_leaves_nothing(
    engine: Engine, tmp_path: Path, pause_s: float
) -> None:
    async with gateway_run(engine, tmp_path, prepared=False) as run:
        preparing = asyncio.create_task(run.network.prepare(PUBLIC))
        await asyncio.sleep(pause_s)
        preparing.cancel()
        await asyncio.wait([preparing])


async def test_twenty_sandboxes_leave_nothing(engine: Engine, tmp_path: Path) -> None:
    async with gateway_run(engine, tmp_path) as run:
        cap = asyncio.Semaphore(4)

        async def one(number: int) -> None:
            network = PUBLIC if number % 5 == 0 else SEALED
            async with cap, engine.box(run, network) as box:
                assert await box.answered([["tcp", "127.0.0.1", GATEWAY_PORT]])

        await asyncio.gather(*(one(number) for number in range(20)))
        left = [name for name in await asyncio.to_thread(engine.left) if not name.endswith(".json")]
        assert len(left) == 1 and left[0].startswith("network-"), "one network for the run, and no container"
    # the fixture looks for what is left after the run


@contextlib.asynccontextmanager
async def gateway_run(engine: Engine, tmp_path: Path, *, prepared: bool = True) -> AsyncIterator[DockerBackend]:
    async with served(ScriptedEngine("ok"), tmp_path / "store.sqlite") as gateway:
        async with engine.run(Access(gateway=Endpoint(url=gateway.agent_url))) as run:
            if prepared:
                await run.network.prepare(SEALED)
            yield run


async def place(engine: Engine, run: DockerBackend, name: str) -> NetworkLink:
    """A sandbox's place in the network, without the sandbox."""
    owner = await asyncio.to_thread(claim, engine.registry, "sandbox", run_id=engine.run_id)
    owner.release()  # only its labels matter here
    return run.network.link(f"{engine.run_id}-{name}", SEALED, owner)


# --- what cannot be had ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "access", "network", "says"),
    [
        ("tcp://far:2376", Access(gateway=Endpoint(url="http://127.0.0.1:1")), SEALED, "on this machine"),
        ("ssh://far", Access(gateway=Endpoint(url="u", public_url="https://x")), SEALED, "mode public"),
        ("ssh://far", Access(gateway=Endpoint(url="http://127.0.0.1:1")), PUBLIC, "public URL"),
        ("unix:///x", Access(), Network(NetworkMode.ALLOWLIST, ("a.example",)), "interception proxy .* a.example"),
        ("unix:///x", Access(), Network(NetworkMode.PROXY_ONLY, ("a.example",)), "mode allowlist"),
        (
            "unix:///x",
            Access(proxies=(Proxy(Endpoint(url="http://127.0.0.1:1"), ("a.example", "b.example")),)),
            Network(NetworkMode.ALLOWLIST, ("a.example",)),
            "none runs",
        ),
    ],
)
def test_a_mode_that_cannot_be_had_is_refused_before_anything_starts(
    tmp_path: Path, address: str, access: Access, network: Network, says: str
) -> None:
    with pytest.raises(SandboxError, match=says):
        _unopened(tmp_path, address, access).check(network)


@pytest.mark.parametrize(
    ("address", "access", "network"),
    [
        ("tcp://far:2376", Access(gateway=Endpoint(url="u", public_url="https://x.example")), PUBLIC),
        ("tcp://far:2376", Access(gateway=Endpoint(url="http://127.0.0.1:1")), NONE),
        ("tcp://far:2376", Access(), SEALED),
        (
            "unix:///x",
            Access(proxies=(Proxy(Endpoint(url="http://127.0.0.1:1"), ("B.example", "a.example")),)),
            Network(NetworkMode.ALLOWLIST, ("a.example", "b.example")),
        ),
    ],
)
def test_a_mode_that_can_be_had_passes(tmp_path: Path, address: str, access: Access, network: Network) -> None:
    _unopened(tmp_path, address, access).check(network)


def _unopened(folder: Path, address: str, access: Access) -> DockerNetwork:
    api = docker.APIClient("unix:///nowhere", version="1.41")  # connects only when asked something
    images = Images(address, registry=folder, run_id="r", cache=folder)
    return DockerNetwork(
        api, address=address, run_id="r", registry=folder, access=access, images=images, relay_base="x"
    )


def test_both_ports_are_outside_the_range_of_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 <= GATEWAY_PORT < lowest and 1024 <= PROXY_PORT < lowest and GATEWAY_PORT != PROXY_PORT

"""What a sealed local sandbox hides: attacked from inside, with baits laid out on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from local_boxes import backend, need_bubblewrap, soon

from sandboxes import bubblewrap
from sandboxes.base import (
    Access,
    BoxSpec,
    Command,
    Endpoint,
    Limits,
    Mount,
    Network,
    NetworkMode,
    Proxy,
    RunResult,
    Sandbox,
    SandboxError,
    SandboxGone,
)


@pytest.fixture(autouse=True)
def sealing() -> None:
    need_bubblewrap()


@pytest.fixture
def isolation() -> str:
    return "bubblewrap"


@asynccontextmanager
async def sealed(root: Path, registry: Path, access: Access | None = None, **spec: object) -> AsyncIterator[Sandbox]:
    async with backend("bubblewrap", root, registry, access or Access()) as opened:
        async with opened.sandbox(BoxSpec("test", **spec)) as box:  # type: ignore[arg-type]
            yield box


async def sh(box: Sandbox, script: str, **options: object) -> RunResult:
    return await box.run(Command.shell(script, **options))


# --- files ---------------------------------------------------------------------------------------------------------


async def test_nothing_of_this_machine_but_its_programs_can_be_seen(box: Sandbox, tmp_path: Path) -> None:
    bait = tmp_path / "secret"
    bait.write_text("treasure")
    bait.chmod(0o666)
    hidden = [
        str(bait),
        str(Path.home() / ".ssh"),
        str(Path.home() / ".bashrc"),
        "/run",
        "/var/run/docker.sock",
        "/sys",
        "/etc/shadow",
        "/etc/ssh",
        "/boot",
        "/var/log",
        str(Path(__file__)),
        "/proc/kcore",
        "/dev/mem",
        "/dev/kmsg",
        "/dev/sda",
        "/dev/vda",
        "/dev/fuse",
    ]
    for path in hidden:
        result = await sh(box, f"cat {path} || ls {path}")
        assert result.exit_code != 0 and "treasure" not in result.stdout, path
    top = set((await sh(box, "ls -A /")).stdout.split())
    assert top <= {
        *("app", "home", "tmp", "logs", "usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "dev"),
        *(Path(mount.target).parts[1] for mount in bubblewrap.own_mounts()),
    }


TIME_ZONE = os.path.realpath("/etc/localtime")


@pytest.mark.skipif(TIME_ZONE == "/etc/localtime", reason="this machine's time zone is no link")
async def test_the_time_zone_is_named_by_a_link(box: Sandbox) -> None:
    """Where it is a plain file, ICU reads the whole time zone database at each start of Node or Bun."""
    assert (await sh(box, "readlink /etc/localtime")).stdout.strip() == TIME_ZONE
    assert (await sh(box, f"cmp /etc/localtime {TIME_ZONE}")).exit_code == 0


async def test_nothing_of_this_machine_can_be_written(box: Sandbox) -> None:
    for path in ("/usr/x", "/bin/x", "/lib/x", "/etc/x", "/etc/passwd", "/etc/ld.so.preload", "/dev/x", "/proc/x"):
        assert (await sh(box, f"echo x > {path}")).exit_code != 0, path
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/mem", "/dev/null/x"):
        assert (await sh(box, f"echo x > {path}")).exit_code != 0, path
    for program in ("mount -t tmpfs x /usr", "mknod /tmp/sda b 8 0", "mv /usr /usr2", "rm -rf /bin", "chroot / true"):
        assert (await sh(box, program)).exit_code != 0, program
    assert (await sh(box, "test -x /bin/sh && test ! -e /usr2")).exit_code == 0


async def test_privileges_are_gone_and_cannot_be_regained(box: Sandbox) -> None:
    status = (await sh(box, "cat /proc/self/status")).stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["CapEff"] == fields["CapPrm"] == "0" * 16 and fields["NoNewPrivs"] == "1"
    assert "0" not in fields["Uid"].split()
    assert (await sh(box, "id -un; hostname; echo $HOME $TMPDIR $PWD:$SANDBOX_ROOT")).stdout == (
        "agent\nsandbox\n/home /tmp /app:\n"
    )
    assert (await sh(box, "setpriv --reuid 0 id || su -c id || unshare -r mount -t tmpfs x /usr")).exit_code != 0


async def test_what_programs_expect_of_a_machine_is_there(box: Sandbox) -> None:
    result = await sh(
        box, "echo one > /dev/stdout; echo two > /dev/stderr; echo three | tee /dev/stderr; cat /dev/stdin"
    )
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one\nthree\n", "two\nthree\n")
    locks = "import multiprocessing as m, pty, tempfile; m.Lock(); tempfile.mkdtemp(); pty.spawn(['echo', 'pty'])"
    assert "pty" in (await box.run(Command(["python3", "-c", locks]))).stdout
    job = await box.start_job(Command.shell("echo one > /dev/stdout; echo two > /dev/stderr"))
    status = await box.wait_job(job, 20)
    assert (status.exit_code, status.stdout, status.stderr) == (0, "one\n", "two\n")


async def test_other_sandboxes_are_out_of_sight(box: Sandbox, root: Path, registry: Path) -> None:
    async with sealed(root, registry) as other:
        await other.put_text("theirs", "/app/theirs", 0o666)
        await sh(other, "sleep 456 & touch started")
        assert "456" in (await sh(other, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
        seen = await sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ls -R /app /tmp /home /dev/shm")
        assert "456" not in seen.stdout and "theirs" not in seen.stdout
        assert (await sh(box, f"ls {root}")).exit_code != 0
        await sh(box, "kill -9 -1")
        assert (await sh(other, "cat /app/theirs")).stdout == "theirs"


async def test_processes_and_environment_of_this_machine_are_hidden(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bait_process() as pid:
        listed = await sh(box, "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'; ls /proc")
        assert "hunter2" not in listed.stdout and "PYTEST_CURRENT_TEST" not in listed.stdout
        assert (await sh(box, f"kill -0 {pid}")).exit_code != 0
    numbers = [name for name in listed.stdout.split() if name.isdigit()]
    assert max(map(int, numbers)) < 100


@contextlib.contextmanager
def bait_process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"], env={"SECRET": "hunter2"}) as process:
        try:
            yield process.pid
        finally:
            process.kill()


async def test_process_1_can_be_neither_killed_nor_entered(box: Sandbox) -> None:
    attack = (
        "kill -9 1; kill -STOP 1; kill -TERM 1; kill -CHLD 1; for fd in /proc/1/fd/*; do cat $fd; done; "
        "python3 -c 'import ctypes; print(\"traced\", ctypes.CDLL(None).ptrace(16, 1, 0, 0))'; "
        "cat /proc/1/mem /proc/1/environ /proc/1/root/etc/passwd; ls -l /proc/1/fd/"
    )
    result = await sh(box, attack, timeout_s=20)
    assert "traced -1" in result.stdout and "socket" not in result.stdout and "hold" not in result.stdout
    for folder in ("/proc/1/cwd", "/proc/1/root"):
        assert (await sh(box, f"ls {folder}/..")).exit_code != 0
    assert (await sh(box, "echo fine")).stdout == "fine\n"


async def test_killing_every_process_leaves_the_sandbox_usable(box: Sandbox) -> None:
    result = await sh(box, "kill -9 -1; sleep 100", timeout_s=10)
    assert not result.timed_out and result.exit_code == 137
    assert (await sh(box, "echo fine")).stdout == "fine\n"


async def test_a_fork_bomb_ends_at_the_time_limit_and_with_kill_all(box: Sandbox, root: Path, registry: Path) -> None:
    async with backend("bubblewrap", root, registry, limits={"processes": 60}) as opened:
        async with opened.sandbox(BoxSpec("bomb")) as small:
            bomb = "import os, time\nfor _ in range(9): os.fork()\ntime.sleep(60)"
            result = await small.run(Command(["python3", "-c", bomb], timeout_s=30))
            assert result.exit_code == 137 and "limit of 60 processes" in result.stderr
            result = await sh(small, "for i in $(seq 40); do setsid sleep 300 & done; wait", timeout_s=0.3)
            assert result.timed_out
            assert (await sh(small, "ls -d /proc/[0-9]* | wc -l")).stdout.strip() in ("4", "5")


async def test_the_init_of_a_box_that_died_is_reported_once_and_for_all(box: Sandbox, root: Path) -> None:
    monitor = json.loads((root / box.sandbox_id / "control" / "monitor.json").read_text())[0]
    task = asyncio.create_task(sh(box, "sleep 300"))
    await soon(lambda: "sleep" in " ".join(bubblewrap_children(monitor)))
    for pid in children(monitor):
        os.kill(pid, 9)
    with pytest.raises(SandboxGone):
        await task
    with pytest.raises(SandboxGone):
        await sh(box, "true")
    with pytest.raises(SandboxGone):
        await box.renew()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def bubblewrap_children(monitor: int) -> list[str]:
    from sandboxes.processes import find_below

    names = []
    for pid in find_below(monitor):
        with contextlib.suppress(OSError):
            names.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return names


# --- mounts --------------------------------------------------------------------------------------------------------


async def test_mounts_are_read_only_and_their_paths_cannot_be_taken(root: Path, registry: Path, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    (tool / "bin").mkdir(parents=True)
    (tool / "bin" / "run").write_text("#!/bin/sh\necho real\n")
    (tool / "bin" / "run").chmod(0o755)
    targets = (str(tool), "/opt/harness/agent", "/home/agents/one", "/srv/tool")
    async with sealed(root, registry, mounts=tuple(Mount(tool, target) for target in targets)) as box:
        for target in targets:
            assert (await box.run(Command([f"{target}/bin/run"]))).stdout == "real\n"
            assert (await sh(box, f"echo x > {target}/bin/run")).exit_code != 0
            anchor = "/".join(target.split("/")[: 2 if target.startswith(("/opt", "/srv")) else 3])
            for move in (f"mv {target} {target}.old", f"mv {anchor} /tmp/old", f"rm -rf {anchor}", f"touch {anchor}/x"):
                if anchor == target:
                    continue
                assert (await sh(box, move)).exit_code != 0, move
            assert (await box.run(Command([f"{target}/bin/run"]))).stdout == "real\n"
            with pytest.raises(SandboxError, match="read-only"):
                await box.put_text("x", f"{target}/bin/run")
        assert (await sh(box, "mv /home /tmp/home2; mv /home/agents /tmp/agents2")).exit_code != 0
        assert (await sh(box, "touch /home/mine /tmp/mine")).exit_code == 0
    assert (tool / "bin" / "run").read_text() == "#!/bin/sh\necho real\n"


async def test_our_python_runs_inside_from_its_virtual_environment(root: Path, registry: Path) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("the tests do not run from a virtual environment")
    mounts = tuple(Mount(Path(prefix), prefix) for prefix in {sys.prefix, sys.base_prefix})
    async with sealed(root, registry, mounts=mounts) as box:
        result = await box.run(Command([sys.executable, "-I", "-c", "import pydantic; print(pydantic.__name__)"]))
        assert result.stdout == "pydantic\n", result.stderr


async def test_files_of_this_machine_cannot_be_asked_to_be_written(box: Sandbox, tmp_path: Path) -> None:
    for path in ("/usr/local/bin/x", "/etc/x", "/app/../usr/x", "/proc/x", "/dev/shm/x"):
        with pytest.raises(SandboxError, match="read-only"):
            await box.put_text("x", path)
    with pytest.raises(SandboxError, match="read-only"):
        await box.reset_dir("/etc")


# --- network -------------------------------------------------------------------------------------------------------


class Bait:
    """A listener of this machine that counts who came."""

    def __init__(self) -> None:
        self.visits = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        line = await reader.readline()
        writer.write(b"echo:" + line)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def listening(host: str = "127.0.0.1") -> AsyncIterator[tuple[Bait, int]]:
    bait = Bait()
    server = await asyncio.start_server(bait.serve, host, 0)
    async with server:
        yield bait, server.sockets[0].getsockname()[1]


ASK = """
import socket, sys
try:
    s = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)
    s.sendall(b"hi\\n"); print(s.recv(100).decode().strip())
except OSError as e:
    print("no:", type(e).__name__)
"""


async def ask(box: Sandbox, host: str, port: int) -> str:
    return (await box.run(Command(["python3", "-c", ASK, host, str(port)], timeout_s=20))).stdout.strip()


def port_of(url: str | None) -> int:
    assert url is not None and url.startswith("http://127.0.0.1:")
    return int(url.rpartition(":")[2])


@pytest.mark.parametrize("mode", [NetworkMode.NONE, NetworkMode.PROXY_ONLY, NetworkMode.ALLOWLIST])
async def test_only_what_the_mode_allows_can_be_reached(root: Path, registry: Path, mode: NetworkMode) -> None:
    async with (
        listening() as (gateway, port),
        listening() as (proxy, proxy_port),
        listening("0.0.0.0") as (bait, other),
    ):
        allow = ("files.example",) if mode is NetworkMode.ALLOWLIST else ()
        access = Access(
            Endpoint(url=f"http://127.0.0.1:{port}"),
            (Proxy(Endpoint(url=f"http://127.0.0.1:{proxy_port}"), ("files.example",)),),
        )
        async with sealed(root, registry, access, network=Network(mode, allow)) as box:
            own = socket.gethostbyname(socket.gethostname())
            for host in ("127.0.0.1", own, "localhost", "::1", "169.254.169.254", "8.8.8.8"):
                for target in (port, proxy_port, other):
                    assert (await ask(box, host, target)).startswith("no:"), (host, target)
            assert (await sh(box, "getent hosts example.com; cat /etc/resolv.conf")).exit_code != 0
            interfaces = (await sh(box, "cat /proc/net/dev")).stdout.splitlines()[2:]
            assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
            assert (gateway.visits, proxy.visits, bait.visits) == (0, 0, 0)
            if mode is NetworkMode.NONE:
                assert box.gateway_url is None and box.proxy_url is None
                return
            assert await ask(box, "127.0.0.1", port_of(box.gateway_url)) == "echo:hi"
            assert (gateway.visits, bait.visits) == (1, 0)
            if mode is NetworkMode.PROXY_ONLY:
                assert box.proxy_url is None
                assert (await ask(box, "127.0.0.1", bubblewrap.PROXY_PORT)).startswith("no:")
            else:
                assert await ask(box, "127.0.0.1", port_of(box.proxy_url)) == "echo:hi"
                assert proxy.visits == 1


async def test_abstract_sockets_of_this_machine_are_out_of_reach(box: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0bait-{os.getpid()}")
        listener.listen()
        script = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0bait-{os.getpid()}')"
        result = await box.run(Command(["python3", "-c", script]))
        assert "ConnectionRefusedError" in result.stderr


async def test_a_gateway_behind_a_unix_socket_is_reached(root: Path, registry: Path, tmp_path: Path) -> None:
    bait = Bait()
    path = tmp_path / "gateway.sock"
    server = await asyncio.start_unix_server(bait.serve, path)
    async with server, sealed(root, registry, Access(Endpoint(socket=path))) as box:
        assert await ask(box, "127.0.0.1", port_of(box.gateway_url)) == "echo:hi"
        assert (await sh(box, f"ls {path}")).exit_code != 0


async def test_a_public_sandbox_has_this_machines_network_and_says_so(root: Path, registry: Path) -> None:
    async with listening() as (_, port):
        access = Access(Endpoint(url=f"http://127.0.0.1:{port}"))
        async with sealed(root, registry, access, network=Network(NetworkMode.PUBLIC)) as box:
            assert box.gateway_url == f"http://127.0.0.1:{port}"
            assert await ask(box, "127.0.0.1", port) == "echo:hi"
            assert "shares this machine's network" in box.description


async def test_servers_in_the_box_are_for_the_box_alone(box: Sandbox) -> None:
    await sh(box, "python3 -m http.server 18777 >/dev/null 2>&1 &")
    get = "for i in $(seq 100); do python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:18777\")'"
    result = await sh(box, f"{get} 2>/dev/null && exit 0; sleep 0.1; done; exit 1", timeout_s=30)
    assert result.exit_code == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 18777))


async def test_the_gateway_is_reached_after_kill_all_too(root: Path, registry: Path) -> None:
    async with listening() as (_, port):
        async with sealed(root, registry, Access(Endpoint(url=f"http://127.0.0.1:{port}"))) as box:
            await box.kill_all()
            await sh(box, "kill -9 -1")
            assert await ask(box, "127.0.0.1", port_of(box.gateway_url)) == "echo:hi"


async def test_many_sealed_sandboxes_at_once_start_and_leave_nothing(root: Path, registry: Path) -> None:
    async def one(number: int) -> str:
        async with sealed(root, registry, limits=Limits(deadline_s=60)) as box:
            return (await sh(box, f"echo {number} > /app/x; cat /app/x; ls -A /tmp /home")).stdout

    assert await asyncio.gather(*(one(i) for i in range(6))) == [f"{i}\n/home:\n\n/tmp:\n" for i in range(6)]
    assert os.listdir(root) == [] and os.listdir(registry) == []

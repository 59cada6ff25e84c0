"""What is Docker's own about a sandbox: how a container is made, how it ends, and what becomes of calls meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandboxes.base import (
    Access,
    BoxSpec,
    Command,
    Limits,
    Network,
    NetworkMode,
    SandboxError,
    SandboxGone,
    SetupFailed,
)
from sandboxes.docker import DockerBackend, DockerConfig

docker = pytest.importorskip("docker")

Open = Callable[..., AbstractAsyncContextManager[DockerBackend]]


@pytest.fixture
def api(docker_engine: str) -> Any:
    client = docker.APIClient(base_url=docker_engine, version="auto")
    yield client
    client.close()


@pytest.fixture
def opening(docker_engine: str, docker_base_image: str, registry: Path) -> Open:
    @asynccontextmanager
    async def opening(**settings: Any) -> AsyncIterator[DockerBackend]:
        defaults = {"host": docker_engine, "image": docker_base_image, "relay_base": docker_base_image}
        config = DockerConfig(**defaults | settings)
        async with DockerBackend(config, run_id="boxes", registry=registry, access=Access()) as backend:
            yield backend

    return opening


@pytest.fixture
async def backend(opening: Open) -> AsyncIterator[DockerBackend]:
    async with opening() as opened:
        yield opened


def left(api: Any, registry: Path) -> list[str]:
    """Names of the containers that boxes of this test's registry left."""
    found = api.containers(all=True, filters={"label": [f"harness-trainer.registry={registry.absolute()}"]})
    return [c["Names"][0] for c in found]


def records(registry: Path) -> list[str]:
    return [path.name for path in registry.glob("sandbox-*")]


async def test_a_container_gives_root_little_and_agents_nothing(backend: DockerBackend, api: Any) -> None:
    async with backend.sandbox(BoxSpec("caps", limits=Limits(cpus=0.5, memory_mb=128, processes=99, file_mb=3))) as box:
        host = api.inspect_container(box.sandbox_id)["HostConfig"]
        assert host["CapDrop"] == ["ALL"] and not host["Privileged"] and not host["Binds"] and not host.get("Mounts")
        assert {"SYS_ADMIN", "NET_ADMIN", "NET_RAW", "MKNOD", "SYS_CHROOT"}.isdisjoint(host["CapAdd"])
        assert (host["NanoCpus"], host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (
            5 * 10**8,
            2**27,
            2**27,
            99,
        )
        assert host["NetworkMode"] == "none"
        status = await box.run(Command(["grep", "-E", "^(NoNewPrivs|CapEff|CapPrm)", "/proc/self/status"]))
        assert status.stdout.split() == ["CapPrm:", "0" * 16, "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
        rooted = await box.run(
            Command.shell("grep ^NoNewPrivs /proc/self/status; ls /var/run/docker.sock", user="root")
        )
        assert rooted.stdout.split() == ["NoNewPrivs:", "1"]
        assert (await box.run(Command(["hostname"]))).stdout == "sandbox\n"


async def test_root_in_the_box_can_kill_everything_but_the_box(backend: DockerBackend) -> None:
    async with backend.sandbox(BoxSpec("suicide", user="root")) as box:
        for script in (
            "kill -9 -1",
            "kill -9 1; kill -TERM 1; kill -INT 1",
            "pkill -9 sleep; pkill -9 sh",
            "pkill -9 .",
        ):
            await box.run(Command.shell(script))
            assert (await box.run(Command(["echo", "alive"]))).stdout == "alive\n", script


async def test_limits_and_image_of_the_settings_are_the_default_and_the_tasks_win(opening: Open, api: Any) -> None:
    async with opening(limits={"memory_mb": 256, "processes": 50}, network="none") as backend:
        async with backend.sandbox(BoxSpec("own", limits=Limits(memory_mb=512))) as box:
            host = api.inspect_container(box.sandbox_id)["HostConfig"]
            assert (host["Memory"], host["PidsLimit"]) == (512 * 2**20, 50)


@pytest.mark.parametrize(
    ("spec", "user"),
    [
        (BoxSpec("default"), "1000"),
        (BoxSpec("named", user="nobody"), "nobody"),
        (BoxSpec("root", user="0"), "root"),
        (BoxSpec("with-group", user="1234:99"), "1234"),
    ],
    ids=lambda value: value.name if isinstance(value, BoxSpec) else "",
)
async def test_who_commands_run_as(backend: DockerBackend, spec: BoxSpec, user: str) -> None:
    async with backend.sandbox(spec) as box:
        assert box.user == user
        ran = await box.run(Command.shell('id -u; id -g; echo "$HOME"; touch /app/x && echo ok'))
        _, gid, home, ok = ran.stdout.split()
        assert ok == "ok" and gid == {"1000": "1000", "nobody": "65534", "root": "0", "1234": "99"}[user]
        assert home == {"1000": "/home", "nobody": "/nonexistent", "root": "/root", "1234": "/home"}[user]


async def test_an_unknown_user_fails_for_good(backend: DockerBackend) -> None:
    with pytest.raises(SetupFailed, match="no-such-user"):
        async with backend.sandbox(BoxSpec("who", user="no-such-user")):
            pass


@pytest.fixture
def image(api: Any, docker_base_image: str) -> Any:
    """Makes images out of the base image, with other settings."""
    made: list[str] = []

    def image(*changes: str) -> str:
        container = api.create_container(docker_base_image, "true")["Id"]
        try:
            made.append(api.commit(container, changes="\n".join(changes) or None)["Id"])
        finally:
            api.remove_container(container)
        return made[-1]

    yield image
    for one in made:
        api.remove_image(one, force=True)


async def test_a_tasks_own_image_says_who_and_where(backend: DockerBackend, image: Callable[..., str]) -> None:
    for changes, user, workdir in (
        ((), "root", "/app"),
        (("USER nobody", "WORKDIR /srv/work"), "nobody", "/srv/work"),
        (("USER 0", "ENV HOME=/elsewhere"), "root", "/app"),
    ):
        async with backend.sandbox(BoxSpec("image", image=image(*changes))) as box:
            assert (box.user, box.workdir) == (user, workdir)
            assert (await box.run(Command(["pwd"]))).stdout.strip() == workdir
            if "ENV HOME=/elsewhere" in changes:
                assert (await box.run(Command.shell("echo $HOME"))).stdout == "/elsewhere\n"


async def test_an_images_entrypoint_starts_its_services_and_kill_all_leaves_them(
    backend: DockerBackend, image: Callable[..., str]
) -> None:
    entry = 'ENTRYPOINT ["/bin/sh", "-c", "(exec sleep 12345) & exec \\"$@\\"", "entry"]'
    async with backend.sandbox(BoxSpec("services", image=image(entry))) as box:
        await box.run(Command.shell("(exec sleep 54321) & true"))
        await box.kill_all()
        seen = await box.run(Command(["pgrep", "-a", "-x", "sleep"]))
        assert "sleep 12345\n" in seen.stdout and "sleep 54321\n" not in seen.stdout


async def test_an_entrypoint_that_ends_at_once_fails_for_good_with_its_words(
    backend: DockerBackend, image: Callable[..., str]
) -> None:
    ends = 'ENTRYPOINT ["/bin/sh", "-c", "echo no licence; exit 3"]'
    with pytest.raises(SetupFailed, match="no licence"):
        async with backend.sandbox(BoxSpec("ends", image=image(ends))):
            pass


async def test_what_ends_the_container_is_gone_and_latched(backend: DockerBackend, api: Any) -> None:
    async with backend.sandbox(BoxSpec("gone")) as box:
        running = asyncio.create_task(box.run(Command(["sleep", "60"])))
        await box.put_text("x", "/app/x")
        api.remove_container(box.sandbox_id, force=True)
        with pytest.raises(SandboxGone):
            await asyncio.wait_for(running, 20)
        for _ in range(2):
            with pytest.raises(SandboxGone):
                await box.run(Command(["true"]))
        with pytest.raises(SandboxGone):
            await box.get_text("/app/x")


async def test_a_container_that_was_stopped_is_gone_too(backend: DockerBackend, api: Any) -> None:
    async with backend.sandbox(BoxSpec("stopped")) as box:
        api.kill(box.sandbox_id)
        with pytest.raises(SandboxGone, match="ended"):
            await box.renew()
        with pytest.raises(SandboxGone):
            await box.run(Command(["true"]))


async def test_a_stop_ends_what_ignores_it_and_can_be_repeated(
    backend: DockerBackend, api: Any, registry: Path
) -> None:
    box = backend.sandbox(BoxSpec("deaf", user="root"))
    async with box:
        await box.run(Command.shell("(trap '' TERM INT HUP; while :; do sleep 0.1; done) & true"))
        began = time.monotonic()
        await asyncio.gather(box.stop(), box.stop())
        await box.stop()
        assert time.monotonic() - began < 8
    assert left(api, registry) == [] and records(registry) == []


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.2, 0.3, 0.5])
async def test_a_cancelled_start_leaves_nothing(
    backend: DockerBackend, api: Any, registry: Path, after_s: float
) -> None:
    box = backend.sandbox(BoxSpec("cancelled"))
    task = asyncio.create_task(box.__aenter__())
    await asyncio.sleep(after_s)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    else:
        await box.stop()
    await box.stop()
    assert left(api, registry) == [] and records(registry) == []


async def test_leaving_the_backend_ends_every_sandbox(opening: Open, api: Any, registry: Path) -> None:
    async with opening() as backend:
        boxes = [backend.sandbox(BoxSpec(f"box-{n}")) for n in range(3)]
        await asyncio.gather(*(box.__aenter__() for box in boxes))
        assert len(left(api, registry)) == 3
    assert left(api, registry) == []
    with pytest.raises(SandboxError, match="gone"):
        await boxes[0].run(Command(["true"]))


async def test_many_long_commands_do_not_hold_up_short_calls(backend: DockerBackend) -> None:
    async with backend.sandbox(BoxSpec("busy")) as box:
        long = [asyncio.create_task(box.run(Command(["sleep", "300"]))) for _ in range(40)]
        await asyncio.sleep(1)
        began = time.monotonic()
        await box.put_text("x", "/app/x")
        assert await box.get_text("/app/x") == "x"
        assert (await box.run(Command(["echo", "hi"]))).stdout == "hi\n"
        assert time.monotonic() - began < 20
        await box.kill_all()
        done = await asyncio.wait_for(asyncio.gather(*long), 30)
        assert {result.exit_code for result in done} == {137}


@pytest.mark.parametrize("host", ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:1"])
async def test_an_engine_that_does_not_answer_is_told_in_a_line(registry: Path, host: str) -> None:
    backend = DockerBackend(DockerConfig(host=host), run_id="none", registry=registry, access=Access())
    with pytest.raises(SandboxError, match=r"no Docker engine answers at .*DOCKER_HOST") as failure:
        async with backend:
            pass
    assert "\n" not in str(failure.value)


async def test_what_cannot_be_had_is_refused_before_it_is_tried(backend: DockerBackend, tmp_path: Path) -> None:
    from sandboxes.base import Mount

    with pytest.raises(SandboxError, match="allowlist"):
        backend.check(BoxSpec("list", network=Network(NetworkMode.ALLOWLIST, ("example.org",))))
    with pytest.raises(SandboxError, match="no such folder"):
        backend.check(BoxSpec("mount", mounts=(Mount(tmp_path / "missing", "/opt/x"),)))
    if "disk_mb" not in backend.traits.limits:
        with pytest.raises(SandboxError, match="disk_mb"):
            backend.check(BoxSpec("disk", limits=Limits(disk_mb=100)))


_MAKER = """
import asyncio, json, os, sys
from pathlib import Path
from sandboxes.base import Access, BoxSpec, Command, Limits
from sandboxes.docker import DockerBackend, DockerConfig

async def main(host, image, registry):
    config = DockerConfig(host=host, image=image, relay_base=image)
    backend = await DockerBackend(config, run_id="maker", registry=Path(registry), access=Access()).__aenter__()
    box = await backend.sandbox(BoxSpec("made", env={"KEPT": "a b=c"}, user="nobody")).__aenter__()
    await box.put_text("theirs", "/app/file")
    job = await box.start_job(Command.shell("echo $KEPT; sleep 1.5; echo end; exit 5"))
    print(json.dumps([box.sandbox_id, job]), flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_another_process_takes_over_a_box_and_its_job(
    opening: Open, api: Any, docker_engine: str, docker_base_image: str, registry: Path
) -> None:
    arguments = [sys.executable, "-c", _MAKER, docker_engine, docker_base_image, str(registry)]
    made = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True, timeout=120)
    assert made.stdout, made.stderr
    sandbox_id, job = json.loads(made.stdout)
    async with opening() as backend:
        box = await backend.attach(sandbox_id)
        assert (box.sandbox_id, box.user, box.workdir) == (sandbox_id, "nobody", "/app")
        assert await box.get_text("/app/file") == "theirs"
        status = await box.wait_job(job, 20)
        assert (status.exit_code, status.stdout) == (5, "a b=c\nend\n")
        assert (await box.run(Command.shell('id -un; echo "$KEPT"'))).stdout == "nobody\na b=c\n"
        await box.run(Command.shell("(exec sleep 300) & true"))
        await box.kill_all()
        assert (await box.run(Command(["echo", "alive"]))).stdout == "alive\n"
    assert left(api, registry) == []


# --- engines that are reached otherwise than by a local socket ---


@asynccontextmanager
async def forwarded(engine: str) -> AsyncIterator[str]:
    """A TCP address that leads to the engine's Unix socket."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(engine.removeprefix("unix://"))
        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))
        writer.close()
        there_writer.close()

    server = await asyncio.start_server(join, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def use(backend: DockerBackend, folder: Path) -> None:
    """What goes over the wire in a way of its own: input, output left early, archives, mounts that are copied."""
    from sandboxes.base import Mount

    (folder / "tool").write_text("#!/bin/sh\necho tool\n")
    (folder / "tool").chmod(0o755)
    assert not backend.traits.mounts
    async with backend.sandbox(BoxSpec("remote", mounts=(Mount(folder, "/opt/x"),))) as box:
        assert (await box.run(Command(["wc", "-c"], stdin="x" * 500_000))).stdout.strip() == "500000"
        assert (await box.run(Command.shell("cat; sleep 60 & echo hi", stdin="in\n"))).stdout == "in\nhi\n"
        assert (await box.run(Command.shell("echo begun; sleep 60", timeout_s=1))).timed_out
        assert (await box.run(Command.shell("/opt/x/tool; echo x 2>/dev/null > /opt/x/tool"))).stdout == "tool\n"
        await box.put_dir(folder, "/app/in")
        await box.get_dir("/app/in", folder / "back")
        assert (folder / "back" / "tool").read_text() == "#!/bin/sh\necho tool\n"


async def test_a_mount_below_a_home_folder_that_others_may_not_enter_is_reachable(
    backend: DockerBackend, tmp_path: Path
) -> None:
    from sandboxes.base import Mount

    os.chmod(tmp_path, 0o755)
    (tmp_path / "tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "tool").chmod(0o755)
    async with backend.sandbox(BoxSpec("home", mounts=(Mount(tmp_path, "/root/.cache/x"),))) as box:
        assert (await box.run(Command.shell("id -u; /root/.cache/x/tool; ls /root 2>&1"))).stdout.startswith(
            "1000\ntool\nls: "
        ), "reachable by its name, and still nobody else's to list"


async def test_an_engine_at_a_tcp_address_works(opening: Open, docker_engine: str, tmp_path: Path) -> None:
    if not docker_engine.startswith("unix://"):
        pytest.skip("the engine is not at a Unix socket")
    (tmp_path / "tools").mkdir()
    async with forwarded(docker_engine) as host:
        async with opening(host=host) as backend:
            await use(backend, tmp_path / "tools")


async def test_an_engine_behind_ssh_works(
    opening: Open, docker_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("paramiko", reason="the SDK takes ssh:// only where paramiko is installed")
    if shutil.which("docker") is None or not docker_engine.startswith("unix://"):
        pytest.skip("the docker command is needed to stand in for the far end of ssh")
    (tmp_path / "bin").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f"#!/bin/sh\nexec docker -H {docker_engine} system dial-stdio\n")
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    async with opening(host="ssh://somewhere") as backend:
        await use(backend, tmp_path / "tools")

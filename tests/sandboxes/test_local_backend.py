"""What the local backend offers, refuses, warns of, and makes of a task's wishes."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest
from local_boxes import backend

from sandboxes import bubblewrap
from sandboxes.base import (
    Access,
    BoxSpec,
    Command,
    Endpoint,
    Healthcheck,
    Limits,
    Mount,
    Network,
    NetworkMode,
    Proxy,
    SandboxError,
    SandboxGone,
    SetupFailed,
)
from sandboxes.local import LocalConfig
from sandboxes.local_process import own_user


def test_traits_tell_the_truth(root: Path, registry: Path, isolation: str) -> None:
    traits = backend(isolation, root, registry).traits
    sealed = isolation == "bubblewrap"
    assert traits.boundary is sealed and traits.mounts is sealed and traits.users is False
    assert traits.networks == (frozenset(NetworkMode) if sealed else {NetworkMode.PUBLIC})
    assert traits.limits == {"cpu_s", "memory_mb", "file_mb", "processes", "deadline_s"}


def test_auto_seals_where_that_works(root: Path, registry: Path) -> None:
    assert LocalConfig().isolation == "auto"
    assert backend("auto", root, registry).traits.boundary is (bubblewrap.find().problem is None)


@pytest.mark.parametrize("mode", [NetworkMode.NONE, NetworkMode.ALLOWLIST])
def test_without_bubblewrap_what_cannot_be_enforced_is_refused(root: Path, registry: Path, mode: NetworkMode) -> None:
    allow = ("a.example",) if mode is NetworkMode.ALLOWLIST else ()
    access = Access(proxies=(Proxy(Endpoint(url="http://127.0.0.1:1"), ("a.example",)),))
    opened = backend("none", root, registry, access)
    for act in (opened.check, opened.sandbox):
        with pytest.raises(SandboxError, match=f"{mode} cannot be enforced.*bubblewrap"):
            act(BoxSpec("t", network=Network(mode, allow)))


def test_an_allow_list_needs_its_proxy(root: Path, registry: Path) -> None:
    access = Access(proxies=(Proxy(Endpoint(url="http://127.0.0.1:1"), ("a.example", "b.example")),))
    opened = backend("bubblewrap", root, registry, access)
    opened.check(BoxSpec("t", network=Network(NetworkMode.ALLOWLIST, ("B.example", "a.example"))))
    for allow in (("a.example",), ("a.example", "b.example", "c.example"), ()):
        with pytest.raises(SandboxError, match="needs an interception proxy"):
            opened.check(BoxSpec("t", network=Network(NetworkMode.ALLOWLIST, allow)))
    with pytest.raises(SandboxError, match="has no list"):
        opened.check(BoxSpec("t", network=Network(NetworkMode.PUBLIC, ("a.example",))))


async def test_the_default_network_is_warned_of_once_per_run_where_it_is_not_held(
    root: Path, registry: Path, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with backend(isolation, root, registry) as opened:
            for _ in range(3):
                async with opened.sandbox(BoxSpec("t")) as box:
                    assert (await box.run(Command(["true"]))).exit_code == 0
    warned = [record for record in caplog.records if "no bubblewrap" in record.getMessage()]
    assert len(warned) == (1 if isolation == "none" else 0)


def test_another_user_is_refused(root: Path, registry: Path, isolation: str) -> None:
    opened = backend(isolation, root, registry)
    opened.check(BoxSpec("t", user=bubblewrap.USER if isolation == "bubblewrap" else own_user()))
    with pytest.raises(SandboxError, match="wants to run as daemon"):
        opened.check(BoxSpec("t", user="daemon"))


async def test_asked_for_bubblewrap_that_does_not_work_is_an_error_that_says_what_to_do(
    root: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    bubblewrap.find.cache_clear()
    try:
        opened = backend("auto", root, registry)
        async with opened:
            assert not opened.traits.boundary
        config = LocalConfig(root=root, isolation="bubblewrap")
        with pytest.raises(SandboxError, match="not installed; install bubblewrap"):
            async with type(opened)(config, run_id="r", registry=registry, access=Access()):
                raise AssertionError("it opened")
    finally:
        bubblewrap.find.cache_clear()


async def test_a_task_gets_its_workspace_environment_and_working_directory(
    root: Path, registry: Path, isolation: str, tmp_path: Path
) -> None:
    build = tmp_path / "environment"
    (build / "src").mkdir(parents=True)
    (build / "Dockerfile").write_text("FROM scratch\n")
    (build / "src" / "main.py").write_text("print('hi')\n")
    (build / "src" / "Dockerfile").write_text("kept\n")
    spec = BoxSpec("t", build_dir=build, env={"ONE": "1", "TWO": "task"}, workdir="/srv/space")
    async with backend(isolation, root, registry) as opened, opened.sandbox(spec) as box:
        await opened.prepare(spec)
        assert box.workdir == "/srv/space"
        result = await box.run(Command.shell("pwd; find . -type f | sort; echo $ONE $TWO", env={"TWO": "2"}))
        assert result.stdout == f"{box.resolve('/srv/space')}\n./src/Dockerfile\n./src/main.py\n1 2\n"
        assert (await box.run(Command.shell("echo x >> src/main.py && touch new"))).exit_code == 0
    assert (build / "src" / "main.py").read_text() == "print('hi')\n"


async def test_a_workspace_that_leaves_its_folder_fails_every_rollout_alike(
    root: Path, registry: Path, isolation: str, tmp_path: Path
) -> None:
    build = tmp_path / "environment"
    build.mkdir()
    (build / "link").symlink_to("/etc/passwd")
    async with backend(isolation, root, registry) as opened:
        with pytest.raises(SetupFailed, match="link leaves"):
            await opened.sandbox(BoxSpec("t", build_dir=build)).__aenter__()
    assert os.listdir(root) == [] and os.listdir(registry) == []


async def test_the_tighter_limit_counts(root: Path, registry: Path, isolation: str) -> None:
    async with backend(isolation, root, registry, limits={"file_mb": 2, "cpu_s": 5}) as opened:
        for theirs, expected in ((1, 1), (3, 2), (None, 2)):
            async with opened.sandbox(BoxSpec("t", limits=Limits(file_mb=theirs, cpus=4))) as box:
                result = await box.run(Command.shell("ulimit -f; ulimit -t"))
                assert result.stdout.split() == [str(expected * 2048), "5"]


async def test_mounts_are_there_at_their_targets(root: Path, registry: Path, isolation: str, tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "file").write_text("mounted")
    mounts = (Mount(tmp_path / "agent", "/opt/agent"), Mount(tmp_path / "agent", str(tmp_path / "agent")))
    async with backend(isolation, root, registry) as opened:
        async with opened.sandbox(BoxSpec("t", mounts=mounts)) as box:
            assert (await box.run(Command(["cat", box.resolve("/opt/agent/file")]))).stdout == "mounted"
            assert (await box.run(Command(["cat", str(tmp_path / "agent" / "file")]))).stdout == "mounted"
        with pytest.raises(SandboxError, match="no folder"):
            opened.sandbox(BoxSpec("t", mounts=(Mount(tmp_path / "none", "/opt/none"),)))
    assert (tmp_path / "agent" / "file").read_text() == "mounted"


async def test_a_health_check_is_waited_for(root: Path, registry: Path, isolation: str) -> None:
    grow = "echo x >> n; test $(wc -l < n) -ge 4"
    slow = Healthcheck(grow, interval_s=0.01, retries=4)
    async with backend(isolation, root, registry) as opened:
        async with opened.sandbox(BoxSpec("t", healthcheck=slow)) as box:
            assert await box.get_text("/app/n") == "x\n" * 4
        starting = Healthcheck(grow, start_period_s=30, start_interval_s=0.01, retries=1)
        async with opened.sandbox(BoxSpec("t", healthcheck=starting)) as box:
            assert await box.get_text("/app/n") == "x\n" * 4
        sick = Healthcheck("echo no service >&2; exit 3", interval_s=0.01, retries=2)
        with pytest.raises(SetupFailed, match="not healthy after 2 tries: exit code 3: no service"):
            await opened.sandbox(BoxSpec("sick", healthcheck=sick)).__aenter__()
        hangs = Healthcheck("sleep 100", interval_s=0.01, timeout_s=0.1, retries=1)
        with pytest.raises(SetupFailed, match="timed out"):
            await opened.sandbox(BoxSpec("hangs", healthcheck=hangs)).__aenter__()
    assert os.listdir(root) == [] and os.listdir(registry) == []


async def test_leaving_the_backend_stops_what_it_made(root: Path, registry: Path, isolation: str) -> None:
    async with backend(isolation, root, registry) as opened:
        boxes = [opened.sandbox(BoxSpec("t")) for _ in range(2)]
        await asyncio.gather(*(box.__aenter__() for box in boxes))
        assert len(os.listdir(root)) == 2
    assert os.listdir(root) == [] and os.listdir(registry) == []
    with pytest.raises(SandboxGone):
        await boxes[0].run(Command(["true"]))


async def test_what_never_was_cannot_be_attached(root: Path, registry: Path, isolation: str) -> None:
    async with backend(isolation, root, registry) as opened:
        for wrong in ("sandbox-1-2-00000000", "../x", ""):
            with pytest.raises(SandboxGone):
                await opened.attach(wrong)


async def test_the_network_of_the_config_wins(root: Path, registry: Path) -> None:
    opened = backend("bubblewrap", root, registry, network="none")
    box = opened.sandbox(BoxSpec("t", network=Network(NetworkMode.ALLOWLIST, ("a.example",))))
    assert "has no network" in box.description

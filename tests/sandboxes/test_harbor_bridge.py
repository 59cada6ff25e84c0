"""The bridge to Harbor's environments: what the conformance suite does not ask of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandboxes.base import (
    Access,
    BoxSpec,
    Command,
    Endpoint,
    Limits,
    Network,
    NetworkMode,
    SandboxError,
    SandboxGone,
    SetupFailed,
)
from sandboxes.box_calls import Exec
from sandboxes.harbor import HarborBackend, HarborConfig
from sandboxes.harbor_exec import parse_news, poll_script, start_script

PLAIN = "harbor_plain_docker:PlainDockerEnvironment"


def in_shell(script: str) -> str:
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, timeout=30).stdout


# --- streams out of answers, in a shell of this machine -----------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "out", "err", "code"),
    [
        (Exec(["sh", "-c", "echo a; echo b >&2; exit 3"]), b"a\n", b"b\n", 3),
        (Exec(["printf", "%s", "it's \"odd\" $HOME\n'"]), b"it's \"odd\" $HOME\n'", b"", 0),
        (Exec(["cat"], stdin=b"\x00\xff'\n"), b"\x00\xff'\n", b"", 0),
        (Exec(["sh", "-c", 'printf %s "$A"'], env={"A": "x y='z'\n"}), b"x y='z'\n", b"", 0),
        (Exec(["pwd"], cwd="/usr/bin/.."), b"/usr\n", b"", 0),
        (Exec(["head", "-c", "5000000", "/dev/zero"]), bytes(5_000_000), b"", 0),
    ],
)
def test_a_commands_streams_come_whole(tmp_path: Path, command: Exec, out: bytes, err: bytes, code: int) -> None:
    folder, got = str(tmp_path / "d"), (b"", b"")
    script = start_script(command, folder)
    while True:
        sizes = len(got[0]), len(got[1])
        news = parse_news(in_shell(script + poll_script(folder, *sizes)), *sizes)
        assert news is not None
        got, script = (got[0] + news.out, got[1] + news.err), ""
        if news.is_all:
            break
    assert (got[0].replace(b"/usr/bin/..\n", b"/usr\n"), got[1], news.code) == (out, err, code)
    assert not Path(folder).exists()


def test_what_is_left_in_the_background_holds_nothing_open(tmp_path: Path) -> None:
    folder = str(tmp_path / "d")
    began = time.monotonic()
    script = start_script(Exec(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; echo hi"]), folder)
    news = parse_news(in_shell(script + poll_script(folder, 0, 0)), 0, 0)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert news is not None and (news.out, news.code, news.is_all) == (b"hi\n", 0, True)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("text", ["", "Killed", "@ 3 0 0\nYWJj", "@ 3 0 0\nYW!j\n\n", "@ 5 0 -\n\n"])
def test_an_answer_that_was_cut_short_is_no_news(text: str) -> None:
    assert parse_news(text, 0, 0) is None


def test_a_command_that_went_without_a_code_is_known_to_be_gone(tmp_path: Path) -> None:
    folder = str(tmp_path / "d")
    in_shell(start_script(Exec(["sleep", "60"]), folder))
    pid = int((tmp_path / "d" / "pid").read_text())
    noter = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(noter, signal.SIGKILL)  # the shell that would note the code
    os.kill(pid, signal.SIGKILL)
    news = parse_news(in_shell(poll_script(folder, 0, 0)), 0, 0)
    assert news is not None and news.code is None and news.is_all


# --- what Harbor is asked for -------------------------------------------------------------------------------------


def backend(
    tmp_path: Path, *, python: str | None = None, access: Access | None = None, **settings: object
) -> HarborBackend:
    config = HarborConfig(python=None if python is None else Path(python), **settings)  # type: ignore[arg-type]
    return HarborBackend(config, run_id="test", registry=tmp_path / "owned", access=access or Access())


AWAY = Access(Endpoint(url="http://127.0.0.1:1", public_url="https://gate.example/x"))


@pytest.mark.parametrize(
    ("network", "policy", "gateway"),
    [
        (Network(), {"network_mode": "allowlist", "allowed_hosts": ["gate.example"]}, "https://gate.example/x"),
        (Network(NetworkMode.NONE), {"network_mode": "no-network"}, None),
        (Network(NetworkMode.PUBLIC), {"network_mode": "public"}, "https://gate.example/x"),
        (
            Network(NetworkMode.ALLOWLIST, ("a.example:*", "*.b.example", "[2001:db8::1]:*")),
            {"network_mode": "allowlist", "allowed_hosts": ["a.example", "*.b.example", "2001:db8::1", "gate.example"]},
            "https://gate.example/x",
        ),
    ],
)
def test_networks_in_harbors_terms(tmp_path: Path, network: Network, policy: object, gateway: str | None) -> None:
    assert backend(tmp_path, access=AWAY).policy(BoxSpec("t", network=network)) == (policy, gateway)


@pytest.mark.parametrize(
    ("spec", "access", "words"),
    [
        (BoxSpec("t"), Access(Endpoint(url="http://127.0.0.1:1")), "gateway.public_url"),
        (BoxSpec("t", network=Network(NetworkMode.ALLOWLIST, ("a.example:22",))), AWAY, "whole hosts"),
        (BoxSpec("t", limits=Limits(processes=5)), AWAY, "cannot limit processes"),
    ],
)
def test_what_harbor_cannot_do_is_refused_before_a_run(
    tmp_path: Path, spec: BoxSpec, access: Access, words: str
) -> None:
    with pytest.raises(SandboxError, match=words):
        backend(tmp_path, access=access).check(spec)


async def test_without_harbor_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_TRAINER_HARBOR_PYTHON", raising=False)
    monkeypatch.setattr("sandboxes.harbor._OF_CHECKOUT", tmp_path / "none")
    for python, words in ((None, "harness-trainer setup harbor"), ("/no/such/python", "is no program")):
        with pytest.raises(SandboxError, match=words):
            await backend(tmp_path, python=python).__aenter__()
    with pytest.raises(SandboxError, match="No module named 'harbor'"):
        await backend(tmp_path, python=sys.executable).__aenter__()
    assert list((tmp_path / "owned").glob("*.json")) == []


# --- with real Harbor ---------------------------------------------------------------------------------------------


@pytest.fixture
def harbor(harbor_python: str, docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return harbor_python


def containers() -> list[str]:
    argv = ["docker", "ps", "-aq", "--filter", "label=plain-docker-environment=1"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.harbor
async def test_what_cannot_be_had_is_the_tasks_fault(harbor: str, docker_base_image: str, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "Dockerfile").write_text(f"FROM {docker_base_image}\nRUN exit 9\n")
    for name, spec in (
        ("no-such-environment", BoxSpec("t")),
        ("no_such_module:Class", BoxSpec("t")),
        (PLAIN, BoxSpec("t", build_dir=tmp_path / "env")),
    ):
        async with backend(tmp_path, python=harbor, name=name, image=docker_base_image) as opened:
            with pytest.raises(SetupFailed) as caught:
                await opened.sandbox(spec).__aenter__()
            assert "\n" not in str(caught.value)
    assert containers() == [] and list((tmp_path / "owned").glob("*.json")) == []


@pytest.mark.harbor
async def test_a_worker_that_died_is_gone_and_nothing_hangs(
    harbor: str, docker_base_image: str, tmp_path: Path
) -> None:
    async with backend(tmp_path, python=harbor, name=PLAIN, image=docker_base_image) as opened:
        async with opened.sandbox(BoxSpec("t")) as box:
            await opened.worker.stop()
            for _ in range(2):
                with pytest.raises(SandboxGone, match="worker ended"):
                    await box.run(Command(["true"]))
    assert containers() == []


OWNER = """
import asyncio, pathlib, sys
from sandboxes.base import Access, BoxSpec
from sandboxes.harbor import HarborBackend, HarborConfig

async def main(python, image, folder):
    config = HarborConfig(name="harbor_plain_docker:PlainDockerEnvironment", python=python, image=image)
    async with HarborBackend(config, run_id="r", registry=pathlib.Path(folder) / "owned", access=Access()) as backend:
        async with backend.sandbox(BoxSpec("t")) as box:
            print("started", flush=True)
            await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.harbor
def test_a_killed_owner_leaves_no_environment(harbor: str, docker_base_image: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", OWNER, harbor, docker_base_image, str(tmp_path)]
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), root])}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "started\n"
        assert len(containers()) == 1
        owner.kill()
    end = time.monotonic() + 60
    while containers():
        assert time.monotonic() < end, "the container outlived its owner"
        time.sleep(0.2)

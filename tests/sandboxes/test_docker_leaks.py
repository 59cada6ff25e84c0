"""Nothing is left in a real engine by a run that was killed, cancelled or could not stop: the product's own backend,
killed exactly between two calls to the engine, beside a live run that must not notice.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import docker
import pytest
from engine_gate import CREATE, RELAY_START, REMOVE, START, EngineGate
from engine_state import layers, objects_of, opened

from sandboxes.lifecycle import reap

SCRIPT = Path(__file__).with_name("docker_owner.py")
ROOT = Path(__file__).parent.parent.parent
WAIT_S = 60.0


@dataclass
class World:
    """What the runs of these tests share: an engine, a registry, a folder for temporary files."""

    engine: str
    image: str
    folder: Path  # short, for the paths of sockets
    api: docker.APIClient
    gates: contextlib.ExitStack
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def registry(self) -> Path:
        return self.folder / "owned"

    @property
    def temp(self) -> Path:
        return self.folder / "tmp"

    def start(self, address: str, action: str, folder: Path | None = None) -> subprocess.Popen[str]:
        gateway = str(self.folder / "gateway.sock")
        argv = [sys.executable, str(SCRIPT), address, self.image, str(self.registry), gateway, action]
        process = subprocess.Popen(
            [*argv, *([str(folder)] if folder else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "TMPDIR": str(self.temp),
                "PYTHONPATH": str(ROOT),
                "HARNESS_TRAINER_CACHE": str(self.folder / "cache"),
            },
        )
        self.processes.append(process)
        return process

    def gate(self) -> EngineGate:
        """Open until the end: records name its address."""
        path = self.folder / f"gate-{os.urandom(4).hex()}.sock"
        return self.gates.enter_context(EngineGate(self.engine, path))

    def left(self) -> list[str]:
        """Everything that runs of this registry own now: objects in the engine, records, temporary folders."""
        return sorted(
            [
                *objects_of(self.api, self.registry),
                *(f"record {path.stem}" for path in self.registry.glob("*.json")),
                *(f"folder {path.name}" for path in self.temp.iterdir()),
            ]
        )

    def runs_in_a_box(self, command: str) -> bool:
        """Whether some sandbox of these runs has a process with this command line."""
        for name in objects_of(self.api, self.registry):
            kind, _, container = name.partition(" /")
            if kind == "container":
                with contextlib.suppress(docker.errors.APIError):
                    if any(command in line[-1] for line in self.api.top(container, "-eo pid,args")["Processes"] or []):
                        return True
        return False


@pytest.fixture(scope="module")
def world(docker_engine: str, docker_base_image: str) -> Iterator[World]:
    if not docker_engine.startswith("unix://"):
        pytest.skip(f"the engine at {docker_engine} has no socket to stand in front of")
    folder = Path(tempfile.mkdtemp(prefix="leaks-"))
    with opened(docker_engine) as api, socket.socket(socket.AF_UNIX) as gateway, contextlib.ExitStack() as gates:
        gateway.bind(str(folder / "gateway.sock"))
        gateway.listen()
        made = World(docker_engine, docker_base_image, folder, api, gates)
        made.temp.mkdir()
        yield made
        for process in made.processes:
            process.kill()
            process.wait()
        reap(made.registry)
        left = made.left()
    shutil.rmtree(folder)
    assert left == []


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    poll = select.poll()  # unlike select(), good for any number of open files
    poll.register(process.stdout, select.POLLIN)
    assert poll.poll(WAIT_S * 1000), "the run says nothing"
    return process.stdout.readline().strip()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.05)


@dataclass
class Live:
    process: subprocess.Popen[str]
    gate: EngineGate
    owns: list[str]

    def say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go on\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def live(world: World) -> Live:
    """Another run, with a sandbox that works."""
    gate = world.gate()
    process = world.start(gate.address, "live")
    assert line_of(process).startswith("ready ")
    return Live(process, gate, world.left())


@dataclass(frozen=True)
class Fault:
    """Where a run is killed: at a request to the engine, or when something can be seen from outside."""

    action: str
    request: bytes | None = None
    after: bool = False  # the engine has done it, and nobody knows
    skip: int = 0
    process: str = ""  # in a box


FAULTS = {
    "before its container exists": Fault("box", CREATE),
    "after create": Fault("box", CREATE, after=True),
    "after start": Fault("box", START, after=True),
    "with only the relay created": Fault("box", RELAY_START),
    "with the relay started": Fault("box", RELAY_START, after=True),
    "with a spare relay created": Fault("spare", RELAY_START),
    "with a spare relay started": Fault("spare", RELAY_START, after=True),
    "with a spare relay handed over": Fault("spare", CREATE),
    "with a container on a spare relay": Fault("spare", CREATE, after=True),
    "with a spare relay that nobody took": Fault("spare", process="sleep 600"),
    "during set-up": Fault("set-up", process="sleep 600"),
    "during run": Fault("box", process="sleep 600"),
    "during run on the run's network": Fault("public", process="sleep 600"),
    "during verify": Fault("verify", process="sleep 601"),
    "before stop": Fault("stop", REMOVE),
    "after stop": Fault("stop", REMOVE, after=True),
    "during pool fill": Fault("pool", CREATE, after=True, skip=2),
}

NO_CONTAINER = ("before its container exists", "after stop")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Its tests never end."""
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "task.toml").write_text("[metadata]\n")
    (folder / "instruction.md").write_text("Wait.\n")
    (folder / "tests" / "test.sh").write_text("sleep 601\n")
    return folder


@pytest.mark.parametrize("where", FAULTS)
def test_a_run_killed_here_leaves_nothing_after_the_next_start(
    world: World, live: Live, task: Path, where: str
) -> None:
    fault = FAULTS[where]
    gate = world.gate()
    if fault.request:
        gate.hold(fault.request, after=fault.after, skip=fault.skip)
    owner = world.start(gate.address, fault.action, task)
    if fault.request:
        assert gate.held.wait(WAIT_S)
    else:
        until(lambda: world.runs_in_a_box(fault.process))
    owner.kill()
    owner.wait()
    gate.drop()
    owned = set(world.left()) - set(live.owns)
    assert any(name.startswith("record sandbox") for name in owned)
    assert any(name.startswith("container") for name in owned) or where in NO_CONTAINER

    problems = [item.problem for item in reap(world.registry)]

    assert problems and set(problems) == {""}
    assert world.left() == live.owns


def test_a_killed_build_leaves_no_container_no_layer_and_no_image(world: World, live: Live, tmp_path: Path) -> None:
    word = f"word-{os.urandom(6).hex()}"
    lines = [f"FROM {world.image}", f"RUN echo one {word}", f"RUN echo two {word}; sleep 602"]
    (tmp_path / "Dockerfile").write_text("\n".join(lines) + "\n")
    owner = world.start(world.engine, "build", tmp_path)
    logs = world.folder / "cache" / "images" / "logs"
    until(lambda: any(f"\ntwo {word}" in log.read_text() for log in logs.glob("*.log")))
    assert layers(world.api, word)
    owner.kill()
    owner.wait()
    reaped = reap(world.registry)
    assert {item.problem for item in reaped} == {""} and "image_build" in {item.kind for item in reaped}
    assert layers(world.api, word) == []
    assert world.left() == live.owns


def test_two_starts_at_once_after_a_crash_share_the_work(world: World, live: Live) -> None:
    owners = [world.start(world.engine, "box") for _ in range(2)]
    assert [line_of(owner) for owner in owners] == ["ready", "ready"]
    for owner in owners:
        owner.kill()
        owner.wait()
    script = (
        "import sys, pathlib, sandboxes.lifecycle as l; print([r.problem for r in l.reap(pathlib.Path(sys.argv[1]))])"
    )
    argv = [sys.executable, "-c", script, str(world.registry)]
    reapers = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    said = [reaper.communicate()[0] for reaper in reapers]
    assert all(reaper.returncode == 0 for reaper in reapers) and not any("could not" in text for text in said)
    assert world.left() == live.owns


def test_a_live_run_in_the_middle_of_a_creation_does_not_notice_and_ends_clean(world: World, live: Live) -> None:
    live.gate.hold(CREATE, after=True)  # the engine has made the container, and the run does not know yet
    live.say()
    assert live.gate.held.wait(WAIT_S)
    until(lambda: sum("-net" in name for name in objects_of(world.api, world.registry)) == 2)
    owns = world.left()
    assert len(owns) > len(live.owns)
    dead = world.start(world.engine, "box")
    assert line_of(dead) == "ready"
    dead.kill()
    dead.wait()
    assert {item.problem for item in reap(world.registry)} == {""}
    assert world.left() == owns
    live.gate.release()
    assert line_of(live.process).startswith("started ")
    live.say()
    assert [line_of(live.process), line_of(live.process)] == ["alive", "alive"]
    assert live.process.wait(WAIT_S) == 0
    assert world.left() == []

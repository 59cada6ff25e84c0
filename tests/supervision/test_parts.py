"""Parts of a run, as real processes: watched, started again, ended."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from harness_trainer.errors import EngineFailed, GatewayFailed, TrainingFailed
from harness_trainer.supervision.parts import Part, Parts
from harness_trainer.supervision.restarts import RestartConfig, Restarts
from sandboxes.lifecycle import start_process


class Run:
    """Parts in a folder, with what was said and written of them."""

    def __init__(self, folder: Path, **restarts) -> None:
        self.folder, self.events, self.lines = folder, [], []
        self.parts = Parts(
            Restarts(RestartConfig(**{"backoff_s": 0.05, **restarts})),
            event=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
            say=self.lines.append,
        )

    def spawn(self, name: str, code: str = "import time; print('at work', flush=True); time.sleep(600)"):
        return start_process(
            [sys.executable, "-c", code],
            env=dict(os.environ),
            cwd=self.folder,
            log_path=self.folder / f"{name}.log",
            registry=self.folder / "owned",
            kind=name,
        )

    def part(self, name: str = "gateway", error=GatewayFailed, launch=None, **more) -> Part:
        part = Part(name, self.folder / f"{name}.log", error, launch or (lambda: self.spawn(name)), **more)
        self.parts.start(part)
        return part

    def look_until(self, condition) -> None:
        until = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < until, self.lines
            self.parts.look()
            time.sleep(0.02)

    def kinds(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["kind"] == kind]


@pytest.fixture
def make(tmp_path):
    made = []

    def make_run(**restarts) -> Run:
        made.append(Run(tmp_path, **restarts))
        return made[-1]

    yield make_run
    for run in made:
        run.parts.stop()
    assert list((tmp_path / "owned").glob("*.json")) == []


def kill(part: Part) -> int:
    pid = part.process.pid
    until = time.monotonic() + 20
    while "at work" not in part.log.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    part.process.wait(10)
    return pid


def lives(pid: str) -> bool:
    """A process whose parent is gone may stay as a zombie, which holds nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_part_that_is_killed_runs_again_and_its_death_is_on_record(make):
    run = make()
    deaths = []
    part = run.part(on_death=lambda: deaths.append(part.process.alive()))
    first = kill(part)
    run.look_until(lambda: len(run.kinds("started")) == 2)
    assert part.running and part.process.alive() and part.process.pid != first
    assert deaths == [False], "seen once, and before the next one was started"
    (restart,) = run.kinds("restart")
    told = {"part": "gateway", "pid": first, "exit_code": -9, "last_line": "at work", "deaths": 1, "in_s": 0.0}
    assert restart == {"kind": "restart", **told}
    assert run.lines == [
        "the gateway died (signal 9): at work; it is started again (death 1 of at most 3)",
        "the gateway runs again",
    ]


def test_what_is_left_of_a_part_ends_before_the_next_one_starts(make, tmp_path):
    """Killed is the process that watches over it: the part itself lives on, and holds what it holds."""
    run = make()
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); print('at work', flush=True); time.sleep(600)"
    seen = []

    def launch():
        if (tmp_path / "pid").exists():
            seen.append(lives((tmp_path / "pid").read_text()))
        return run.spawn("gateway", code)

    kill(run.part(launch=launch))
    assert lives((tmp_path / "pid").read_text()), "else this test shows nothing"
    run.look_until(lambda: len(run.kinds("started")) == 2)
    assert seen == [False]


def test_the_others_are_watched_while_one_is_slow_to_start_again(make):
    run = make()
    may_start = threading.Event()
    lives = []

    def launch():
        if lives:
            may_start.wait(20)
        lives.append(1)
        return run.spawn("engine")

    engine, gateway = run.part("engine", EngineFailed, launch, give_up=may_start.set), run.part()
    kill(engine)
    run.look_until(lambda: engine.starting is not None)
    kill(gateway)
    run.look_until(lambda: [event["part"] for event in run.kinds("started")] == ["engine", "gateway", "gateway"])
    assert not engine.running and gateway.running
    may_start.set()
    run.look_until(lambda: engine.running)


def test_a_part_that_says_itself_why_it_ended_ends_the_run(make):
    run = make()
    failing = "raise SystemExit(1)"
    run.part("learner", TrainingFailed, lambda: run.spawn("learner", failing), reason=lambda: "loss is nan")
    with pytest.raises(TrainingFailed, match=r"^loss is nan$"):
        run.look_until(lambda: False)
    assert run.kinds("restart") == []


def test_a_part_that_dies_too_often_ends_the_run_with_the_count_and_its_last_line(make):
    run = make(max_deaths=2)
    run.part(launch=lambda: run.spawn("gateway", "print('no memory'); raise SystemExit(7)"))
    with pytest.raises(GatewayFailed, match=r"died 3 times within 3600 s: no memory \(log: .*gateway\.log\)"):
        run.look_until(lambda: False)
    assert [event["exit_code"] for event in run.kinds("restart")] == [7, 7]


def test_a_start_that_fails_counts_as_a_death(make):
    run = make(max_deaths=2)
    lives = []

    def launch():
        lives.append(1)
        if len(lives) > 1:
            raise EngineFailed("the port is taken")
        return run.spawn("engine")

    kill(run.part("engine", EngineFailed, launch))
    with pytest.raises(EngineFailed, match=r"the engine died 3 times within 3600 s: the port is taken"):
        run.look_until(lambda: False)
    assert [(event["exit_code"], event["last_line"]) for event in run.kinds("restart")] == [
        (-9, "at work"), (None, "the port is taken"),
    ]  # fmt: skip


def test_without_restarts_the_first_death_ends_the_run(make):
    run = make(max_deaths=0)
    kill(run.part())
    with pytest.raises(GatewayFailed, match=r"^the gateway died: at work \(log: "):
        run.look_until(lambda: False)


def test_a_part_whose_purpose_is_to_end_is_finished_then_and_only_then(make):
    run = make()
    part = run.part("learner", TrainingFailed, lambda: run.spawn("learner", "print('done')"), ends=True)
    run.look_until(lambda: part.finished)
    run.parts.look()
    assert run.kinds("restart") == []
    killed = run.part("gateway", launch=lambda: run.spawn("gateway", "print('done')"))
    run.look_until(lambda: run.kinds("restart"))
    assert not killed.finished


def test_stopping_ends_a_part_that_is_just_being_started_again(make):
    run = make()
    given_up = threading.Event()
    lives = []

    def launch():
        process = run.spawn("engine")
        lives.append(process)
        if len(lives) > 1:
            given_up.wait(20)
        return process

    part = run.part("engine", EngineFailed, launch, give_up=given_up.set)
    kill(part)
    run.look_until(lambda: len(lives) == 2)
    run.parts.stop()
    assert [process.alive() for process in lives] == [False, False]
    assert [event["part"] for event in run.kinds("stopped")] == ["engine"]

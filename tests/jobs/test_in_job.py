"""The process in a job: copies made and brought back, the deadline, being told to go, and other writers."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness_trainer.cli.launch_inside import CHECK
from harness_trainer.errors import RunDirError
from harness_trainer.in_job import NOT_KEPT, STOPPED, TAKEN, JobRun, Pace
from harness_trainer.job_order import JobOrder
from harness_trainer.learner.checkpoints import read_state
from harness_trainer.run_copy import newest_step, snapshot
from harness_trainer.rundir import RunDir
from jobs.copies import FolderCopy, HubCopy
from jobs.errors import JobsError
from jobs.hf import client
from jobs.masking import Mask
from tests.jobs.playing_train import take_step, write_checkpoint
from tests.jobs.standin import Standin

TRAIN = [sys.executable, "-m", "tests.jobs.playing_train"]
SECRET = "e2b_0123456789abcdef"
QUICK = Pace(poll=0.02, save=3.0, end=5.0, push_again=0.1, push_apart=0.0, last_pushes=(0.05, 0.05, 0.0))


class Job:
    """One life on one machine; the copy is what lives on."""

    def __init__(self, folder: Path, volume: Path, *, life: dict[str, Any] | None = None, **order: object) -> None:
        """`life`: of `JobRun`, beside the usual."""
        config = {"steps": 4, "pause_s": 0.05, "save_steps": 2, **order.pop("config", {})}  # type: ignore[dict-item]
        given = {"run": "math", "runs": str(volume), "timeout_s": 600.0, "margin_s": 60.0, "config": config, **order}
        self.copy = FolderCopy(volume / "math")
        self.run = RunDir(folder / "runs" / "math")
        self.out = io.StringIO()
        self.published: list[Path] = []
        usual = {"train": TRAIN, "mask": Mask([SECRET]), "publish": self.publish, "out": self.out, "pace": QUICK}
        self.job = JobRun(JobOrder.model_validate(given), self.copy, self.run, **{**usual, **(life or {})})

    def publish(self, folder: Path) -> str:
        self.published.append(folder)
        return "hub/me/model"

    @property
    def told(self) -> str:
        return self.out.getvalue()


@pytest.fixture(autouse=True)
def ordinary_signals(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("E2B_API_KEY", SECRET)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """In a thread, once it is so."""

    def wait() -> None:
        end = time.monotonic() + 20
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def steps_in(store: Path) -> list[int]:
    with sqlite3.connect(store) as db:
        return [row[0] for row in db.execute("SELECT step FROM steps ORDER BY rowid")]


def test_a_run_is_copied_published_and_its_secrets_are_not_shown(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "volume")
    assert job.job.go() == 0
    assert "training from step 0; key ***" in job.told and SECRET not in job.told
    assert "the run is over" in job.told and job.published == [job.run.path / "model"]
    back = RunDir(tmp_path / "back")
    assert FolderCopy(tmp_path / "volume" / "math").pull(back.path)
    assert newest_step(back) == 4 and steps_in(back.store) == [1, 2, 3, 4]
    assert not (back.path / "internal").exists()


def test_another_machine_goes_on_from_the_copy(tmp_path: Path) -> None:
    first = Job(tmp_path / "a", tmp_path / "volume", config={"fails": True})
    assert first.job.go() == 6
    assert "to go on after step 4: harness-trainer launch hf-jobs resume" in first.told and not first.published
    second = Job(tmp_path / "b", tmp_path / "volume", config={"steps": 6})
    assert second.job.go() == 0
    assert "going on after step 4" in second.told and "training from step 4" in second.told
    assert steps_in(second.run.store) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_go_it_leaves_a_checkpoint_and_ends_the_run(tmp_path: Path, number: int) -> None:
    job = Job(tmp_path, tmp_path / "volume", config={"steps": 10_000, "save_steps": 10_000})
    going = when(lambda: "step 3" in job.told, lambda: os.kill(os.getpid(), number))
    assert job.job.go() == STOPPED
    going.join()
    assert "told to go" in job.told and "sandboxes are closed" in job.told
    back = RunDir(tmp_path / "back")
    assert FolderCopy(tmp_path / "volume" / "math").pull(back.path)
    step = newest_step(back)
    assert step is not None and step >= 3 and steps_in(back.store)[:step] == list(range(1, step + 1))
    assert read_state(back.checkpoints / f"checkpoint-{step}").policy_version == step + 1


def test_in_the_middle_of_a_long_step_the_last_checkpoint_counts(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "volume", config={"steps": 2, "pause_s": 0.05, "save_steps": 1})
    assert job.job.go() == 0
    stubborn = Job(tmp_path / "b", tmp_path / "volume", config={"steps": 9, "pause_s": 60.0})
    stubborn.job._pace = Pace(poll=0.02, save=0.0, end=5.0, last_pushes=(0.0,))
    when(lambda: "training from" in stubborn.told, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert stubborn.job.go() == STOPPED
    assert "the last one counts" in stubborn.told and "to go on after step 2" in stubborn.told


def test_before_the_timeout_it_warns_saves_and_ends(tmp_path: Path) -> None:
    config = {"steps": 10_000, "save_steps": 10_000}
    job = Job(tmp_path, tmp_path / "volume", config=config, timeout_s=3.0, margin_s=1.0)
    began = time.monotonic()
    assert job.job.go() == STOPPED
    assert time.monotonic() - began < 6
    warned, ended = job.told.index("WARNING: the job's timeout is near"), job.told.index("ending the run")
    assert warned < ended and "to go on after step" in job.told
    assert newest_step(job.run) is not None


def test_a_second_job_of_the_same_run_is_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "volume", config={"steps": 10_000, "save_steps": 1})
    other = tmp_path / "other"
    other.write_bytes(b"x")

    def take() -> None:
        rival = FolderCopy(tmp_path / "volume" / "math")
        rival.pull(tmp_path / "theirs")
        rival.push({"store.sqlite": other}, "theirs")

    when(lambda: "copied step" in job.told, take)
    assert job.job.go() == TAKEN
    assert "changed by somebody else" in job.told and "no further copy" in job.told
    back = tmp_path / "back"
    FolderCopy(tmp_path / "volume" / "math").pull(back)
    assert [path.name for path in back.iterdir()] == ["store.sqlite"]


# -- before it trains ----------------------------------------------------------------------------------------------


def saying(text: str, code: int = 0, then_s: float = 0.0) -> dict[str, Any]:
    program = f"import sys, time; print({text!r}, sys.argv[1:], flush=True); time.sleep({then_s}); sys.exit({code})"
    return {"check": [sys.executable, "-c", program]}


def test_the_machine_is_checked_with_what_will_be_trained(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "volume", life=saying(f"all is well, {SECRET}"))
    assert job.job.go() == 0
    line = next(line for line in job.told.splitlines() if line.startswith("all is well, ***"))
    assert f"'--run-dir', '{job.run.path}'" in line and "math.yaml" in line
    assert job.told.index("all is well") < job.told.index("training from step 0")


def test_a_machine_that_will_not_do_is_left_alone(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "volume", life=saying("no engine; make one", code=3))
    assert job.job.go() == 3
    assert "no engine; make one" in job.told and "nothing was started" in job.told and "training" not in job.told
    assert not (tmp_path / "volume" / "math").exists()


def test_the_real_checks_name_what_is_wrong_in_the_jobs_log(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = {"gateway": {"port": taken.getsockname()[1]}}
        job = Job(tmp_path, tmp_path / "volume", life={"check": CHECK})
        job.job._order = job.job._order.model_copy(update={"config": config})
        assert job.job.go() == 3
    assert f"port {config['gateway']['port']} for the gateway: " in job.told and "--gateway.port 0" in job.told


def test_checks_that_hang_keep_no_run_from_starting(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "volume", life=saying("", then_s=60) | {"pace": replace(QUICK, check=0.2)})
    assert job.job.go() == 0
    assert "WARNING: the checks of this machine took over" in job.told and "the run is over" in job.told


def test_told_to_go_before_it_trains_it_starts_nothing(tmp_path: Path) -> None:
    assert Job(tmp_path / "a", tmp_path / "volume", config={"fails": True}).job.go() == 6
    job = Job(tmp_path / "b", tmp_path / "volume", life=saying("looking", then_s=60))
    when(lambda: "looking" in job.told, lambda: os.kill(os.getpid(), signal.SIGTERM))
    began = time.monotonic()
    assert job.job.go() == STOPPED and time.monotonic() - began < 10
    assert "not started: this machine was told to go" in job.told and "to go on after step 4" in job.told
    assert "training" not in job.told


def test_what_the_job_has_lived_already_counts(tmp_path: Path) -> None:
    config = {"steps": 10_000, "save_steps": 10_000}
    job = Job(tmp_path, tmp_path / "volume", config=config, timeout_s=1000.0, margin_s=100.0, life={"spent_s": 890.0})
    job.job._clock = lambda: 9.0 + job.job._began + 890.0 if "step 1" not in job.told else 11.0 + job.job._began + 890.0
    assert job.job.go() == STOPPED
    assert "ending the run: the job's timeout is 2 minutes away" in job.told


def test_a_copy_comes_back_as_a_whole_in_the_place_of_what_is_there(tmp_path: Path) -> None:
    assert Job(tmp_path / "a", tmp_path / "volume", config={"fails": True}).job.go() == 6
    job = Job(tmp_path / "b", tmp_path / "volume", config={"steps": 6})
    job.run.path.mkdir(parents=True)
    for name in ("store.sqlite-wal", "store.sqlite-shm", "store.sqlite"):  # of a run that has no checkpoint
        (job.run.path / name).write_bytes(b"of another store")
    job.run.path.with_name(".math.back").mkdir()
    assert job.job.go() == 0
    assert steps_in(job.run.store) == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in job.run.path.parent.iterdir()) == ["math", "math.yaml"]


@pytest.mark.parametrize(("elsewhere", "says"), [(0, "going on with the run that is in"), (6, "going on after step 6")])
def test_a_disk_that_has_kept_the_run_goes_on_from_the_later_of_it_and_the_copy(
    tmp_path: Path, elsewhere: int, says: str
) -> None:
    volume = tmp_path / "volume"
    assert Job(tmp_path / "a", volume, config={"fails": True}).job.go() == 6  # after step 4
    if elsewhere:
        assert Job(tmp_path / "b", volume, config={"steps": elsewhere, "fails": True}).job.go() == 6
    again = Job(tmp_path / "a", volume, config={"steps": 8})
    assert again.job.go() == 0
    assert says in again.told and f"training from step {elsewhere or 4}" in again.told
    assert steps_in(again.run.store) == [1, 2, 3, 4, 5, 6, 7, 8]
    back = RunDir(tmp_path / "back")
    assert FolderCopy(volume / "math").pull(back.path) and newest_step(back) == 8


def test_told_to_go_with_a_full_disk_it_ends_in_order_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch = Path.touch

    def full(path: Path, *given: Any) -> None:
        if path.name == "save-now":
            raise OSError(errno.ENOSPC, "No space left on device")
        touch(path, *given)

    monkeypatch.setattr(Path, "touch", full)
    job = Job(tmp_path, tmp_path / "volume", config={"steps": 10_000, "save_steps": 1})
    when(lambda: "step 3" in job.told, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert job.job.go() == STOPPED
    assert "can be asked for (No space left on device)" in job.told and "sandboxes are closed" in job.told


@pytest.mark.parametrize("lasts", [False, True])
def test_a_run_folder_that_cannot_be_looked_at_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    glob, failures = Path.glob, []
    job = Job(tmp_path, tmp_path / "volume", config={"steps": 5, "pause_s": 0.1})

    def stale(path: Path, pattern: str) -> Any:
        is_watching = "training from" in job.told and threading.current_thread() is threading.main_thread()
        if is_watching and path == job.run.checkpoints and (lasts or len(failures) < 5):
            failures.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", stale)
    assert job.job.go() == 0
    assert len(failures) >= 5 and job.told.count("cannot be read: Stale file handle. The run goes on") == 1
    assert (f"[job] the run folder {job.run.path} can be read again" in job.told) is not lasts
    back = RunDir(tmp_path / "back")
    assert FolderCopy(tmp_path / "volume" / "math").pull(back.path)
    assert steps_in(back.store) == [1, 2, 3, 4, 5], "the last copy is made all the same"


def test_told_to_go_with_a_stale_disk_it_ends_in_order_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists

    def stale(path: Path) -> bool:
        if path.name == "save-now":
            raise OSError(errno.ESTALE, "Stale file handle")
        return exists(path)

    monkeypatch.setattr(Path, "exists", stale)
    pace = replace(QUICK, save=0.3)
    job = Job(tmp_path, tmp_path / "volume", config={"steps": 10_000, "save_steps": 1}, life={"pace": pace})
    when(lambda: "step 3" in job.told, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert job.job.go() == STOPPED
    assert "cannot be read: Stale file handle" in job.told and "sandboxes are closed" in job.told


def test_a_log_that_takes_no_more_for_a_while_neither_ends_nor_stops_the_run(tmp_path: Path) -> None:
    class Full(io.StringIO):
        num_refused = 0

        def write(self, text: str) -> int:
            if "step 2" in text or 0 < self.num_refused < 3:
                self.num_refused += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    full = Full()
    job = Job(tmp_path, tmp_path / "volume", config={"steps": 6}, life={"out": full})
    assert job.job.go() == 0
    assert "the log took no lines for a while: up to" in full.getvalue() and "the run is over" in full.getvalue()
    assert "step 6" in full.getvalue() and full.num_refused >= 3


def test_a_disk_on_which_no_run_can_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="run folder .*file/runs/math: .*check the path and the disk"):
        Job(tmp_path / "file", tmp_path / "volume").job.go()


# -- copies ----------------------------------------------------------------------------------------------------------


def test_an_error_that_nobody_foresaw_in_a_copy_does_not_end_the_training(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "volume", config={"steps": 6, "save_steps": 2, "pause_s": 0.2})
    push, fails = job.copy.push, iter([True])

    def push_sometimes(files: Mapping[str, Path], message: str) -> str:
        if next(fails, False):
            raise KeyError("a library's own")
        return push(files, message)

    job.copy.push = push_sometimes  # type: ignore[method-assign]
    assert job.job.go() == 0
    assert 'the copy could not be made, and is tried again: KeyError: "a library\'s own"' in job.told


def test_a_disk_that_takes_no_copy_of_a_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    take_step(run, 1)
    write_checkpoint(run, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(RunDirError, match="checkpoint-1 cannot be copied: .*No space left"), snapshot(run):
        pass


def test_a_copy_that_fails_is_made_later(tmp_path: Path, hub: Standin) -> None:
    job = Job(tmp_path, tmp_path / "volume", config={"steps": 6, "save_steps": 2, "pause_s": 0.2})
    job.job._copies = HubCopy(client(), "me/runs", "math")
    hub.repos.refuses = 2
    assert job.job.go() == 0
    assert "the copy could not be made, and is tried again" in job.told
    assert "math/checkpoints/checkpoint-6/model.safetensors" in hub.repos.files("me/runs")
    assert not any("checkpoint-2" in path or "checkpoint-4" in path for path in hub.repos.files("me/runs"))


def test_a_result_that_nobody_keeps_is_a_failure(tmp_path: Path, hub: Standin) -> None:
    job = Job(tmp_path, tmp_path / "volume")
    job.job._copies = HubCopy(client(), "me/runs", "math")
    hub.repos.refuses = 10**6
    assert job.job.go() == NOT_KEPT
    assert "the run is over" not in job.told


def test_a_copy_that_cannot_be_brought_back_stops_the_job_before_it_trains(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "volume")
    (tmp_path / "volume" / "math").mkdir(parents=True)
    (tmp_path / "volume" / "math" / "current.json").write_text("{")
    with pytest.raises(JobsError, match="remove it to begin anew"):
        job.job.go()
    assert "training" not in job.told


def test_a_snapshot_stays_as_it_is_while_the_run_goes_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with snapshot(run) as nothing:
        assert nothing is None
    run.path.mkdir(exist_ok=True)
    for step in (1, 2):
        take_step(run, step)
        write_checkpoint(run, step)
    with snapshot(run) as found:
        assert found is not None and found.step == 2
        take_step(run, 3)
        write_checkpoint(run, 3)  # which removes that of step 2
        assert steps_in(found.files["store.sqlite"]) == [1, 2]
        assert found.files["checkpoints/checkpoint-2/model.safetensors"].read_bytes() == b"0002" * 500
        assert found.files["metrics.jsonl"].read_text().count("\n") == 2
    assert not (run.internal / "copy").exists()


BLOCKED = """
import os, sys
from harness_trainer.job_log import JobLog
log = JobLog(sys.stdout)
for number in range(20_000):
    log.say("x" * 1000)
log.close(wait_s=0.2)
sys.exit(75)
"""


@pytest.mark.parametrize("kind", ["full", "no reader", "a reader that hangs"])
def test_a_log_that_takes_nothing_neither_holds_a_job_nor_becomes_its_exit_code(kind: str) -> None:
    read, write = os.pipe()
    if kind == "full":
        os.close(write)
        write = os.open("/dev/full", os.O_WRONLY)
    elif kind == "no reader":
        os.close(read)
    done = subprocess.run([sys.executable, "-c", BLOCKED], stdout=write, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (75, b"")
    for file in (write,) if kind == "no reader" else (write, read):
        os.close(file)

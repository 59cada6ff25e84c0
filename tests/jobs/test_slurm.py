"""Jobs through submitit: with its local executor, which runs them as real processes here, and what sbatch would get."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("submitit", reason="the extra slurm is not installed")

from harness_trainer import in_job
from harness_trainer.cli.launch_slurm_inside import WARNING, on_nodes, scratch_of, take_secrets
from harness_trainer.cli.launch_slurm_order import SlurmOrder, make, read_order, write_order
from harness_trainer.config import RunConfig
from harness_trainer.errors import ConfigError, SetupError
from jobs import slurm_step
from jobs.errors import JobsError
from jobs.slurm import Order, _told_by, checked_extra, is_alive, jobs_of, minutes_of, script, submit
from jobs.slurm_follow import Follower, Pace, Tail, outcome
from jobs.slurm_step import Step, ended_with, warning_signal
from tests.jobs.slurm_inside import INSIDE

ROOT = Path(__file__).parents[2]
QUICK = Pace(poll=0.05, look=0.1)
SECRET = "e2b_0123456789abcdef"


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where a job's process finds these tests; and no job outlives its test."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("E2B_API_KEY", SECRET)
    yield


def play(monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
    monkeypatch.setenv("PLAY", json.dumps({"steps": 3, "pause_s": 0.02, "save_steps": 1, **config}))


def an_order(runs: Path, **more: Any) -> SlurmOrder:
    given = {"config": RunConfig().model_dump(mode="json"), "run": "math", "runs": str(runs), "minutes": 60}
    return SlurmOrder.model_validate({**given, "margin_s": 120, "secrets": ["E2B_API_KEY"], **more})


class Sent:
    """A job of the local executor, ended with the test."""

    def __init__(self, order: SlurmOrder, step: dict[str, Any] | None = None) -> None:
        sent = make(order, write_order(order), INSIDE)
        quick = Step(sent.step.command, linger_s=0.0, **(step or {}))
        self.job = submit(Order(run="math", folder=sent.folder, step=quick, minutes=60, margin_s=120), "local")
        self.said: list[str] = []

    def followed(self) -> tuple[str, Follower]:
        follower = Follower(self.job, say=self.said.append, pace=QUICK)
        return "\n".join(follower.lines()), follower

    def log_has(self, text: str, times: int = 1) -> None:
        wait_for(lambda: (self.job.stdout() or "").count(text) >= times)

    def signal(self, number: int) -> None:
        """To submitit's process of the job, as SLURM does."""
        controller = int(self.job.job_id)
        (task,) = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
        os.kill(int(task), number)

    def __enter__(self) -> Sent:
        return self

    def __exit__(self, *_: object) -> None:
        if self.job._process.poll() is None:  # type: ignore[attr-defined]
            with suppress(ValueError, OSError):  # it has ended this moment
                self.signal(signal.SIGTERM)
        self.job._process.wait(60)  # type: ignore[attr-defined]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def steps_in(runs: Path) -> set[int]:
    with closing(sqlite3.connect(runs / "math" / "store.sqlite")) as db:
        return {row[0] for row in db.execute("SELECT step FROM steps")}


# -- a job's life -------------------------------------------------------------------------------------------------


def test_a_job_trains_in_the_shared_folder_and_its_log_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch)
    with Sent(an_order(tmp_path)) as sent:
        log, follower = sent.followed()
    assert follower.code == 0 and follower.ended == "the run is over"
    assert "training from step 0; key ***" in log and SECRET not in log
    assert [line for line in log.splitlines() if line.startswith("step ")] == ["step 1", "step 2", "step 3"]
    assert (tmp_path / "math" / "model").is_dir() and steps_in(tmp_path) == {1, 2, 3}
    folder = tmp_path / "math.slurm"
    assert jobs_of(folder) == [sent.job.job_id]
    assert not any(SECRET.encode() in path.read_bytes() for path in folder.iterdir() if path.is_file())


def test_warned_of_the_limit_it_saves_is_queued_again_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, steps=8, pause_s=0.2, save_steps=100)
    with Sent(an_order(tmp_path)) as sent:
        sent.log_has("step 3")
        sent.signal(warning_signal())
        log, follower = sent.followed()
    assert follower.code == 0, log
    assert "ending the run: the job's time limit is 2 minutes away" in log and "sandboxes are closed" in log
    assert "Requeued job" in log  # submitit's word
    began, again = [int(line.split()[3][:-1]) for line in log.splitlines() if line.startswith("training from")]
    assert began == 0 and again >= 3
    assert "going on with the run that is in" in log and steps_in(tmp_path) == set(range(1, 9))


def test_told_to_end_it_saves_and_is_not_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, steps=1000, pause_s=0.1, save_steps=1000)
    order = an_order(tmp_path)
    with Sent(order) as sent:
        sent.log_has("step 2")
        sent.signal(signal.SIGTERM)
        log, follower = sent.followed()
    assert follower.code == in_job.STOPPED and follower.ended is not None and "stopped in order" in follower.ended
    assert "sandboxes are closed" in log and "Requeued" not in log
    assert f": {order.again}" in log.splitlines()[-1]
    play(monkeypatch, steps=4)
    with Sent(order) as sent:
        log, follower = sent.followed()
    assert follower.code == 0 and "training from step 0" not in log


def test_cancelled_it_saves_even_where_its_own_process_is_killed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, steps=1000, pause_s=0.1, save_steps=1000)
    with Sent(an_order(tmp_path)) as sent:
        sent.log_has("step 2")
        sent.job.cancel()  # the local executor interrupts, and kills a second later
        sent.log_has("to go on after step")
    assert "sandboxes are closed" in (sent.job.stdout() or "")


def test_a_run_on_the_machines_own_disk_goes_on_from_its_copy_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, fails=True)
    monkeypatch.setenv("MACHINE", str(tmp_path / "a"))
    order = an_order(tmp_path / "shared", scratch="$MACHINE/scratch")
    with Sent(order) as sent:
        log, follower = sent.followed()
    assert follower.code == 6 and follower.ended == "exit code 6" and "the loss is nan" in log
    assert not (tmp_path / "shared" / "math" / "store.sqlite").exists()
    play(monkeypatch, steps=5)
    monkeypatch.setenv("MACHINE", str(tmp_path / "b"))
    with Sent(order) as sent:
        log, follower = sent.followed()
    assert follower.code == 0 and "going on after step 3, from the copy at" in log
    assert steps_in(tmp_path / "b" / "scratch") == {1, 2, 3, 4, 5}


def test_a_secret_that_the_job_does_not_have_is_named_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch)
    monkeypatch.delenv("E2B_API_KEY")
    with Sent(an_order(tmp_path)) as sent:
        log, follower = sent.followed()
    assert follower.code == 1 and "E2B_API_KEY is not set" in log and "SBATCH_EXPORT" in log


def test_a_machine_that_will_not_do_ends_the_job_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch)
    monkeypatch.setenv("PLAY_CHECK", "3")
    with Sent(an_order(tmp_path)) as sent:
        log, follower = sent.followed()
    assert follower.code == 3 and "nothing was started" in log and "training" not in log


def test_the_other_nodes_work_until_the_first_has_ended(tmp_path: Path) -> None:
    seen, spec = tmp_path / "seen", tmp_path / "learner.json"
    spec.write_text("old")
    os.utime(spec, (1, 1))  # an earlier job's
    first = "import sys, time; time.sleep(0.5); open(sys.argv[1], 'w').write('new'); time.sleep(1.2)"
    other = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + open(sys.argv[3]).read() + ' ')"
    step = Step(
        (sys.executable, "-c", first, str(spec)),
        worker=(sys.executable, "-c", other, str(seen), slurm_step.RANK, str(spec)),
        worker_reads=spec,
        worker_again_s=0.1,
    )
    order = Order(run="math", folder=tmp_path / "jobs", step=step, minutes=60, margin_s=120, nodes=2)
    job = submit(order, "local")
    assert job._process.wait(60) == 0  # type: ignore[attr-defined]
    # Again and again, with its number, and never on what another job has left.
    assert len(seen.read_text().split()) >= 2 and set(seen.read_text().split()) == {"1new"}
    assert ended_with(tmp_path / "jobs", job.job_id) == 0


# -- what is sent -------------------------------------------------------------------------------------------------


def test_the_script_is_what_was_asked_for(tmp_path: Path) -> None:
    order = an_order(
        tmp_path, partition="a100", account="lab", constraint="nvlink", nodes=2, gpus=4, cpus=32,
        extra={"mem": "64G", "exclusive": True}, setup=["module load cuda"], margin_s=300,
    )  # fmt: skip
    lines = script(make(order, tmp_path / "order-1.json")).splitlines()
    wanted = {
        "--partition=a100", "--account=lab", "--constraint=nvlink", "--nodes=2", "--ntasks-per-node=1",
        "--gpus-per-node=4", "--cpus-per-task=32", "--mem=64G", "--exclusive", "--time=60", "--requeue",
        "--job-name=harness-trainer-math", f"--signal={WARNING.name.removeprefix('SIG')}@300", "--open-mode=append",
        f"--output={tmp_path}/math.slurm/%j_0_log.out",
    }  # fmt: skip
    assert {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")} == wanted
    assert lines.index("module load cuda") < next(i for i, line in enumerate(lines) if line.startswith("srun "))
    assert "--cpus-per-task=32" in next(line for line in lines if line.startswith("srun "))
    assert not any(path.name.endswith(".slurm") for path in tmp_path.iterdir())  # nothing was made


_TIMES = {"90m": 90, "6h": 360, "1.5h": 90, "2d": 2880}
_SLURMS_TIMES = {"90": 90, "90:30": 91, "6:00:00": 360, "1-12": 2160, "1-12:30": 2190, "1-00:00:01": 1441}


@pytest.mark.parametrize(("text", "minutes"), [*_TIMES.items(), *_SLURMS_TIMES.items()])
def test_times_are_read_as_slurm_reads_them(text: str, minutes: int) -> None:
    assert minutes_of(text) == minutes


@pytest.mark.parametrize("text", ["", "6x", "0", "-5m", "1:2:3:4", "0:00:00"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(JobsError, match="write 90m"):
        minutes_of(text)


@pytest.mark.parametrize(("name", "says"), [("time", "--time"), ("output", "cannot be given"), ("Mem", "long options")])
def test_parameters_that_are_not_free(name: str, says: str) -> None:
    with pytest.raises(JobsError, match=says):
        checked_extra({name: "x"})


def test_a_controller_that_does_not_answer_holds_nobody_up() -> None:
    began = time.monotonic()
    assert _told_by(["sleep", "30"], timeout_s=0.1) == "" and time.monotonic() - began < 5
    assert _told_by(["echo", "RUNNING|n1"]) == "RUNNING|n1\n" and _told_by(["false"]) == ""


# -- inside -------------------------------------------------------------------------------------------------------


def test_the_exit_code_and_the_signal_are_one_thing_on_both_sides() -> None:
    assert slurm_step.STOPPED == in_job.STOPPED and warning_signal() == WARNING


def test_secrets_in_files_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"a $b #c 'd'\nsecond\n")
    (tmp_path / "key").write_bytes(b"hf_abc\n")
    files = {"ODD": str(tmp_path / "odd"), "HF_TOKEN": str(tmp_path / "key")}
    environ: dict[str, str] = {}
    take_secrets(an_order(tmp_path, secrets=[], secret_files=files), environ)
    assert environ == {"ODD": "a $b #c 'd'\nsecond\n", "HF_TOKEN": "hf_abc"}
    (tmp_path / "key").write_bytes(b"a\0b")
    with pytest.raises(SetupError, match="zero byte"):
        take_secrets(an_order(tmp_path, secrets=[], secret_files=files), environ)
    with pytest.raises(SetupError, match="gone cannot be read"):
        take_secrets(an_order(tmp_path, secrets=[], secret_files={"X": str(tmp_path / "gone")}), environ)


def test_scratch_is_a_place_of_the_machine() -> None:
    assert scratch_of("$FAST/${WHO}", {"FAST": "/fast", "WHO": "me"}) == Path("/fast/me")
    with pytest.raises(ConfigError, match="no absolute path on this machine; set here: TMPDIR"):
        scratch_of("$NOT_HERE/runs", {"TMPDIR": "/tmp"})


def test_on_several_nodes_accelerate_is_told_of_them(tmp_path: Path) -> None:
    import yaml

    order = an_order(tmp_path, nodes=2)
    write_order(order)
    assert on_nodes(order, ["n1"]) == order.config
    for name in ("ddp", "fsdp2", "multi_node"):
        order.config["learner"]["accelerate_config"] = name
        path = on_nodes(order, ["n1", "n2"])["learner"]["accelerate_config"]
        settings = yaml.safe_load(Path(path).read_text())
        assert settings["num_machines"] == 2 and settings["main_process_ip"] == "n1" and settings["main_process_port"]
    assert order.config["learner"]["accelerate_config"] == "multi_node"  # the order itself stays


def test_an_order_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "order-1.json").write_text('{"run": "x", "colour": "red"}')
    with pytest.raises(ConfigError, match="of another version"):
        read_order(tmp_path / "order-1.json")
    with pytest.raises(ConfigError, match="on a disk that all machines see"):
        read_order(tmp_path / "order-2.json")


# -- following ----------------------------------------------------------------------------------------------------


def test_a_state_is_an_end_only_when_it_stays_one(tmp_path: Path) -> None:
    states = iter(["PENDING", "PREEMPTED", "PENDING", "RUNNING", "UNKNOWN", "NODE_FAIL", "NODE_FAIL"])

    class Played:
        job_id = "7"

        class paths:
            folder = tmp_path
            stdout = tmp_path / "7_0_log.out"

        @property
        def state(self) -> str:
            return next(states)

    said: list[str] = []
    follower = Follower(Played(), say=said.append, pace=Pace(0.0, 0.0), sleep=lambda _: None)  # type: ignore[arg-type]
    assert list(follower.lines()) == []
    assert follower.ended == "NODE_FAIL" and follower.code is None
    assert [line.split()[2] for line in said] == ["PENDING", "PREEMPTED", "PENDING", "RUNNING", "UNKNOWN", "NODE_FAIL"]
    assert is_alive("CANCELLED by 1000") is False and is_alive("") is None


def test_a_log_is_shown_by_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    with path.open("ab") as file:
        for text, new in ((b"one\ntw", ["one"]), (b"o\n", ["two"]), (b"\xc3", []), (b"\xa9\nrest", ["é"])):
            file.write(text)
            file.flush()
            assert list(tail.lines()) == new
    assert list(tail.rest()) == ["rest"] and list(tail.rest()) == []
    assert outcome(-9) == "signal 9"

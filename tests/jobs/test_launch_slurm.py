"""`harness-trainer launch slurm` from the command line to a stand-in for SLURM's programs, and back."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("submitit", reason="the extra slurm is not installed")

from harness_trainer.cli import launch_slurm, main
from harness_trainer.errors import HarnessTrainerError
from tests.jobs import slurm_standin
from tests.jobs.slurm_inside import INSIDE

ROOT = Path(__file__).parents[2]
KEY = "e2b_0123456789abcdef"
RUN = ["--run", "math"]
E2B = ["--sandbox", "e2b", "--tasks", "hf:me/tasks"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "shared runs"  # with a space: it stands in a script


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in's folder. Jobs that are still there at the end are ended."""
    slurm_standin.install(tmp_path / "bin")
    folder = tmp_path / "slurm"
    folder.mkdir()
    monkeypatch.setattr(slurm_standin, "ROOT", folder)
    monkeypatch.setenv("SLURM_STANDIN", str(folder))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setenv("PLAY", json.dumps({"steps": 2, "pause_s": 0.02, "save_steps": 1}))
    monkeypatch.chdir(ROOT)
    yield folder
    for state in folder.glob("*.state"):
        if state.read_text() == "RUNNING":
            slurm_standin.scancel(state.stem)
            slurm_standin.kill(state.stem)
            wait_for(lambda state=state: state.read_text() != "RUNNING")


def launch(*arguments: str | Path) -> int:
    """With the exit codes of the command line."""
    try:
        return launch_slurm.run([str(word) for word in arguments], inside=INSIDE)
    except HarnessTrainerError as error:
        print(f"harness-trainer: {error}", file=sys.stderr)
        return error.exit_code


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def when(condition: Callable[[], bool], act: Callable[[], object]) -> None:
    def wait() -> None:
        wait_for(condition)
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_dry_run_is_the_script_that_sbatch_gets_and_needs_no_slurm(
    runs: Path, slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--runs", runs, *RUN, "--time", "6h", *E2B, "--partition", "full", "--slurm.mem", "64G"]
    given += ["--slurm.comment=of " + KEY, "--secret-file", f"HF_TOKEN={slurm / 'token'}", "--detach"]
    (slurm / "token").write_text("hf_token_in_a_file")
    with monkeypatch.context() as without:
        without.setenv("PATH", "/usr/bin:/bin")
        assert launch(*given, "--dry-run") == 0
    assert not runs.exists()
    told = capsys.readouterr().out
    assert KEY not in told and "hf_token_in_a_file" not in told and "'of ***'" in told
    assert launch(*given) == 0
    job = capsys.readouterr().out.strip()
    sent = (slurm / f"{job}.sh").read_text()
    assert told.startswith(sent.replace(KEY, "***")) and "#SBATCH --mem=64G" in sent
    order = json.loads(re.sub(r"^# ", "", told[told.index("# {") :], flags=re.M))
    assert order["secrets"] == ["E2B_API_KEY"] and order["config"]["sandbox"]["type"] == "e2b"
    kept = (runs / "math.slurm" / "order-1.json").read_text()
    assert json.loads(kept.replace(KEY, "***")) == order and "hf_token_in_a_file" not in kept


def test_a_run_is_launched_followed_and_has_one_job_at_a_time(
    runs: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("--runs", runs, *RUN, "--time", "6h", *E2B) == 0
    told = capsys.readouterr()
    assert "training from step 0; key ***" in told.out and "step 2" in told.out and KEY not in told.out + told.err
    assert "the run is over" in told.err
    wait_for(lambda: slurm_standin.state_of("100") == "COMPLETED")
    assert launch("status", "--runs", runs, *RUN) == 0
    told_of = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told_of["job"] == "100 (of 1)" and told_of["state"] == "COMPLETED" and told_of["ended"] == "the run is over"
    assert told_of["step"] == "2" and told_of["nodes"] == "localhost"
    assert launch("resume", "--runs", runs, *RUN, "--partition", "full", "--time", "12h", "--detach") == 0
    assert "#SBATCH --time=720" in (slurm / "101.sh").read_text()  # and it goes on with the same settings
    first, second = (json.loads((runs / "math.slurm" / f"order-{n}.json").read_text()) for n in (1, 2))
    assert first["config"] == second["config"] and second["secrets"] == first["secrets"]
    assert launch("--runs", runs, *RUN, "--time", "6h") == 3  # while it waits
    assert "job 101 of run math is PENDING" in capsys.readouterr().err
    assert launch("cancel", "--runs", runs, *RUN) == 0 and slurm_standin.state_of("101").startswith("CANCELLED")
    assert f"launch slurm resume --runs '{runs}' --run math" in capsys.readouterr().err
    assert launch("status", "--runs", runs, *RUN, "--job", "100") == 0
    assert launch("status", "--runs", runs, *RUN, "--job", "99") == 2
    assert "100, 101" in capsys.readouterr().err


def test_before_its_limit_a_job_is_queued_again_by_slurm_and_the_run_goes_on(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAY", json.dumps({"steps": 6, "pause_s": 0.2, "save_steps": 100}))
    log = runs / "math.slurm" / "100_0_log.out"
    when(
        lambda: log.exists() and "step 2" in log.read_text(),
        lambda: slurm_standin.scancel("100", "--signal", "USR2"),
    )
    assert launch("--runs", runs, *RUN, "--time", "6h") == 0
    out = capsys.readouterr().out
    assert out.count("training from step") == 2 and out.count("training from step 0") == 1
    assert "the job's time limit is 15 minutes away" in out and "Requeued job 100" in out


def test_a_cancelled_job_leaves_a_checkpoint_and_says_how_to_go_on(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAY", json.dumps({"steps": 1000, "pause_s": 0.1, "save_steps": 1000}))
    assert launch("--runs", runs, *RUN, "--time", "6h", "--detach") == 0
    log = runs / "math.slurm" / "100_0_log.out"
    wait_for(lambda: log.exists() and "step 2" in log.read_text())
    assert launch("cancel", "--runs", runs, *RUN) == 0
    wait_for(lambda: "to go on after step" in log.read_text())
    slurm_standin.kill("100")
    wait_for(lambda: slurm_standin.state_of("100") == "CANCELLED by 1000")
    assert "sandboxes are closed" in log.read_text()
    assert launch("status", "--runs", runs, *RUN) == 0
    step = re.search(r"^step +(\d+)$", capsys.readouterr().out, re.M)
    assert step is not None and int(step[1]) >= 2


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["--time", "6x"], "no duration", 3),
        (["--time", "4m"], "no time to train", 2),
        (["--margin", "4h"], "no time to train", 2),
        (["--run", "a.b"], "letters", 2),
        (["--secret", "KEY=hush"], "--secret 'KEY': give the name alone", 2),
        (["--secret", "NOT_HERE"], "NOT_HERE is not set: export it, or give --secret-file", 3),
        (["--secret-file", "KEY"], "NAME=FILE", 2),
        (["--secret-file", "KEY=/not/here"], "cannot be read", 3),
        (["--slurm.partition", "a100"], "give --partition instead", 3),
        (["--slurm.output", "x"], "cannot be given", 3),
        (["--slurm.mem"], "needs a value", 2),
        (["--partition", "nowhere"], "invalid partition specified: nowhere", 3),
        (["--gpus", "-1"], "0 or more", 2),
        (["--gpus", "2", "--engine.replicas", "2", "--learner.device", "cuda"], "replicas and the learner take 3", 2),
        (["--nodes", "2"], "learner.num_processes 1 must be a multiple", 2),
        (["--nodes", "2", "--learner.num-processes", "4", "--scratch", "/x"], "from all of them", 2),
        (["--rollouts.group-size", "1"], "group_size", 2),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str, code: int
) -> None:
    assert launch("--runs", runs, "--time", "6h", *RUN, *arguments) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert says in last and last.startswith("harness-trainer: ")


def test_without_slurm_or_the_extra_it_says_what_to_do(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ["launch", "slurm", "--runs", str(runs), "--time", "6h"]
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(usual) == 3
    assert "sbatch, srun, scancel, squeue not found: run this on the cluster's login node" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", None)
    for arguments in (usual, [*usual, "--dry-run"]):
        assert main(arguments) == 3
        assert "pip install 'harness-trainer[slurm]'" in capsys.readouterr().err
    assert main(["launch", "slurm", "status", "--runs", str(runs)]) == 2
    assert "no job was launched from" in capsys.readouterr().err
    assert not runs.exists()

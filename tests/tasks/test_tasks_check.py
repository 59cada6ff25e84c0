"""`harness-trainer tasks`: what it says of good and of broken tasks, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness_trainer.cli import main

REWARD = "${SANDBOX_ROOT:-}/logs/verifier/reward.txt"
SCORE = f'if [ "$(cat answer.txt 2>/dev/null)" = yes ]; then echo 1; else echo 0; fi > "{REWARD}"\n'
SOLVE = '#!/bin/sh\necho yes > "${SANDBOX_ROOT:-}/app/answer.txt"\n'

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Writes a task folder below ./tasks; each part can be replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def make(name: str, *, toml: str = "", test: str = SCORE, solve: str | None = SOLVE) -> Path:
        folder = tmp_path / "tasks" / name
        files = {"task.toml": toml, "instruction.md": "Say yes.", "tests/test.sh": test, "solution/solve.sh": solve}
        for path, text in files.items():
            if text is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        return folder

    return make


def check(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the reports by task."""
    code = main(["tasks", "check", "tasks", "--json", "--logs", "logs", *flags])
    return code, {report["name"]: report for report in json.loads(capsys.readouterr().out)}


def test_a_good_task_is_good(make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make("good")
    code, reports = check(capsys)
    report = reports["good"]
    assert code == 0 and report["ok"] and (report["valid"], report["built"]) == (True, True)
    assert (report["oracle"], report["empty"], report["problems"]) == (1.0, 0.0, [])
    logs = tmp_path / report["logs"]
    assert {"oracle.log", "oracle.verifier.log", "empty.verifier.log"} <= {path.name for path in logs.iterdir()}
    assert (logs / "oracle.verifier.log").read_text().startswith("reward: 1.0\n")


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "solution-too-weak": ({"solve": "#!/bin/sh\necho perhaps > answer.txt\n"}, "the solution scores 0, not 1"),
    "solution-fails": ({"solve": "#!/bin/sh\nexit 7\n"}, "(its exit code was 7)"),
    "solution-hangs": (
        {"solve": "#!/bin/sh\nsleep 60\n", "toml": "[agent]\ntimeout_sec = 0.5"},
        "(it did not end in time)",
    ),
    "no-solution": ({"solve": None}, "no solution/solve.sh"),
    "nothing-scores-the-top": ({"test": f'echo 1 > "{REWARD}"'}, "doing nothing scores 1"),
    "range-not-reached": ({"toml": "[metadata]\nreward_range = [0, 5]"}, "the solution scores 1, not 5"),
    "out-of-range": ({"test": f'echo 7 > "{REWARD}"'}, "the solution was not scored"),
    "tests-write-nothing": ({"test": "true"}, "the solution was not scored"),
    "tests-hang": ({"test": "sleep 60", "toml": "[verifier]\ntimeout_sec = 0.5"}, "did not end within"),
    "solution-needs-a-variable": (
        {"toml": "[solution.env]\nKEY = '${A_VARIABLE_NOBODY_SETS}'"},
        "export A_VARIABLE_NOBODY_SETS=",
    ),
    "unhealthy": (
        {"toml": "[environment.healthcheck]\ncommand = 'exit 3'\nretries = 1\ninterval_sec = 0"},
        "health",
    ),
    "not-valid": ({"toml": "[environment]\ngpus = 4"}, "no GPU"),
}


def test_each_broken_task_has_its_own_problem_and_hides_no_other(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (parts, _) in BROKEN.items():
        make(name, **parts)
    make("zz-good")
    code, reports = check(capsys, "--jobs", "4")
    assert code == 1 and set(reports) == {*BROKEN, "zz-good"}
    for name, (_, words) in BROKEN.items():
        assert not reports[name]["ok"] and any(words in p for p in reports[name]["problems"]), reports[name]
    assert reports["zz-good"]["ok"]
    assert (reports["not-valid"]["valid"], reports["not-valid"]["built"]) == (False, None)
    assert reports["tests-write-nothing"]["oracle"] is None  # never 0


def test_a_reward_floor_is_no_failure_and_other_ranges_have_other_tops(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    test = SCORE.replace("echo 1", "echo 2.5").replace("echo 0", "echo -1")
    make("signed", toml="[metadata]\nreward_range = [-1, 2.5]", test=test)
    code, reports = check(capsys)
    assert code == 0 and (reports["signed"]["oracle"], reports["signed"]["empty"]) == (2.5, -1.0)


def test_an_unscored_empty_workspace_is_a_note(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make("shy", test=f'[ -e answer.txt ] && echo 1 > "{REWARD}"')
    code, reports = check(capsys)
    assert code == 0 and reports["shy"]["empty"] is None
    assert any("doing nothing is not scored" in note for note in reports["shy"]["notes"])


def test_the_solution_runs_as_its_first_line_says(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    python = "#!/usr/bin/env python3\nimport os, pathlib\npathlib.Path('answer.txt').write_text(os.environ['WORD'])\n"
    make("python", solve=python, toml="[solution.env]\nWORD = '${NO_SUCH_WORD:-yes}'")
    code, reports = check(capsys)
    assert code == 0, reports


def test_jsonl_tasks_can_bring_their_solution(make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [
        {"name": "with", "instruction": "Say yes.", "verify": SCORE, "solution": "echo yes > answer.txt"},
        {"name": "without", "instruction": "Say yes.", "verify": SCORE},
    ]
    (tmp_path / "tasks").write_text("\n".join(map(json.dumps, lines)))
    code, reports = check(capsys)
    assert code == 1 and reports["with"]["ok"] and not reports["without"]["ok"]


def test_the_table_has_a_row_per_task(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make("good")
    make("bad", test=f'echo 1 > "{REWARD}" # [odd]')
    assert main(["tasks", "check", "tasks"]) == 1
    shown = capsys.readouterr()
    assert all(title in shown.out for title in ("task", "valid", "built", "oracle reward", "empty reward", "problem"))
    (row,) = (line for line in shown.out.splitlines() if line.strip().startswith("bad"))
    assert "yes" in row and "1.000" in row and "doing nothing scores 1" in row
    assert "1 of 2 tasks are good; logs: runs/tasks-check-" in shown.err


def test_ls_lists_broken_tasks_too(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make("good", toml="[metadata]\ndescription = 'All [of] it.'")
    make("bad", toml="[environment]\ngpus = 4")
    assert main(["tasks", "ls", "tasks"]) == 1
    shown = capsys.readouterr().out
    assert "All [of] it." in shown and "cannot be used" in shown and "no GPU" in shown
    main(["tasks", "ls", "tasks", "--json"])
    assert [row["task"] for row in json.loads(capsys.readouterr().out)] == ["bad", "good"]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["tasks", "check", "nowhere"], 2, "no tasks at 'nowhere'"),
        (["tasks", "check", "tasks", "--jobs", "0"], 2, "--jobs must be 1 or more"),
        (["tasks", "check", "tasks", "--network", "wifi"], 2, "--network"),
        (["tasks", "check", "tasks", "--sandbox", "cellar"], 2, "sandbox"),
        (["tasks", "check", "tasks", "--logs", "/dev/null/x"], 2, "--logs"),
    ],
)
def test_a_wrong_flag_is_explained_in_one_line(
    make: Make, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, words: str
) -> None:
    make("good")
    assert main(flags) == code
    said = capsys.readouterr().err.strip()
    assert words in said and "\n" not in said, said


def runs(pid: int) -> bool:
    """Whether the process lives; one that only waits to be taken off the list does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _as_in_a_terminal() -> None:
    """A shell starts what it puts in the background with SIGINT ignored, and so would everything below these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_leaves_nothing_behind(make: Make, tmp_path: Path, end: signal.Signals) -> None:
    started = tmp_path / "started"
    make(
        "slow", solve=f"#!/bin/sh\nsleep 987 & echo $! > pid; cp pid {started}.new; mv {started}.new {started}; wait\n"
    )
    argv = [sys.executable, "-m", "harness_trainer.cli", "tasks", "check", "tasks", "--sandbox.isolation", "none"]
    argv += ["--sandbox.root", str(tmp_path / "root")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env=env, stdout=pipe, stderr=pipe, text=True, preexec_fn=_as_in_a_terminal) as process:
        try:
            deadline = time.monotonic() + 30
            while not started.exists():
                assert process.poll() is None and time.monotonic() < deadline, "it has not started"
                time.sleep(0.02)
            process.send_signal(end)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()  # else what did not end would be waited for until the solution's own limit
    assert process.returncode == 130 and "Traceback" not in said, said
    assert not runs(int(started.read_text()))
    assert list((tmp_path / "root").iterdir()) == []
    assert list((tmp_path / "state").rglob("*.json")) == []


@pytest.mark.parametrize("sandbox", ["local", "docker"])
def test_files_beside_a_finished_image_are_in_the_workspace(
    make: Make, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, sandbox: str
) -> None:
    image = "any/image:1"
    if sandbox == "docker":
        request.getfixturevalue("docker_engine")
        image = request.getfixturevalue("docker_base_image")
    folder = make(
        "filed", toml=f"[environment]\ndocker_image = '{image}'", solve="#!/bin/sh\ncp data/word answer.txt\n"
    )
    (folder / "environment" / "data").mkdir(parents=True)
    (folder / "environment" / "data" / "word").write_text("yes\n")
    code, reports = check(capsys, "--sandbox", sandbox)
    assert code == 0, reports


def test_the_examples_pass_in_docker(
    make: Make, capsys: pytest.CaptureFixture[str], docker_engine: str, docker_base_image: str
) -> None:
    import docker

    client = docker.DockerClient(base_url=docker_engine)
    if not any("python:3.12-slim" in image.tags for image in client.images.list()):
        pytest.skip("the engine has no python:3.12-slim, which the example tasks are built on")
    code = main(["tasks", "check", "examples", "--json", "--logs", "logs", "--sandbox", "docker", "--jobs", "4"])
    reports = json.loads(capsys.readouterr().out)
    assert code == 0 and len(reports) == 11, reports
    assert all((report["oracle"], report["empty"]) == (1.0, 0.0) for report in reports)

"""What a person did wrong is one line that says what to do, an exit code that is not 0, and nothing left running."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness_trainer.cli import COMMANDS, main

TASK_TOML = 'version = "1.0"\n[metadata]\n[verifier]\ntimeout_sec = 10.0\n[agent]\ntimeout_sec = 10.0\n'


def one_line(capsys) -> str:
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("harness-trainer: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


def make_task(folder: Path) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(TASK_TOML)
    (folder / "instruction.md").write_text("Do it.")
    (folder / "tests" / "test.sh").write_text("exit 0")
    return folder


def run(tmp_path, *arguments):
    return main(["train", "--run-dir", str(tmp_path / "run"), "--plain", "--harness", "pyagent", *arguments])


def test_an_unknown_harness_names_the_known_ones(tmp_path, capsys):
    assert run(tmp_path, "--harness", "opncode") == 2
    assert "opencode" in one_line(capsys)


def test_an_unknown_sandbox_names_the_flag(tmp_path, capsys):
    assert run(tmp_path, "--sandbox", "dokcer") == 2
    assert "sandbox" in one_line(capsys)


def test_an_unknown_model_says_what_a_model_can_be(tmp_path, capsys):
    assert run(tmp_path, "--model", str(tmp_path / "no-such-model")) != 0
    assert "no-such-model" in one_line(capsys)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda task: (task / "task.toml").unlink(), "task.toml"),
        (lambda task: (task / "task.toml").write_text("[agent"), "task.toml"),
        (lambda task: (task / "task.toml").write_bytes(b"\xff\xfe"), "task.toml"),
        (lambda task: (task / "instruction.md").unlink(), "instruction.md"),
        (lambda task: (task / "tests" / "test.sh").unlink(), "test.sh"),
    ],
)
def test_a_task_folder_that_cannot_be_used_names_the_file(tmp_path, capsys, spoil, says):
    task = make_task(tmp_path / "task")
    spoil(task)
    assert run(tmp_path, "--tasks", str(task)) == 2
    assert says in one_line(capsys)


def test_tasks_that_do_not_exist_are_named(tmp_path, capsys):
    assert run(tmp_path, "--tasks", str(tmp_path / "nowhere")) == 2
    assert "nowhere" in one_line(capsys)


def test_without_npm_the_command_that_mends_it_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HARNESS_TRAINER_CACHE", str(tmp_path / "cache"))
    assert run(tmp_path, "--harness", "opencode") == 3
    line = one_line(capsys)
    assert "npm" in line and "--harness pyagent" in line


def test_a_run_folder_of_another_config_is_refused_with_the_difference(tmp_path, capsys):
    assert run(tmp_path, "--tasks", str(tmp_path / "nowhere")) == 2
    capsys.readouterr()
    assert run(tmp_path, "--tasks", str(tmp_path / "elsewhere")) == 5
    assert "tasks" in one_line(capsys)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_full_disk_in_the_run_folder_is_one_line(tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount here: " + mounted.stderr.decode())
    try:
        (disk / "filler").write_bytes(b"x" * 40_000)
        assert main(["train", "--run-dir", str(disk / "run"), "--plain"]) == 5
        line = one_line(capsys)
        assert "free" in line and str(disk) in line
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_traces_of_a_folder_without_a_run_say_where_to_start(tmp_path, capsys):
    assert main(["traces", "ls", "--run-dir", str(tmp_path)]) == 5
    assert "harness-trainer demo" in one_line(capsys)


def test_without_the_engine_environment_the_setup_command_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HARNESS_TRAINER_ENGINE_PYTHON", str(tmp_path / "no-python"))
    assert run(tmp_path) == 3
    assert "make setup" in one_line(capsys)


def test_help_of_every_command_needs_no_heavy_library():
    """A proxy for its speed that does not depend on the machine: what gets imported."""
    heavy = ("torch", "trl", "transformers", "openenv", "datasets", "openai", "starlette")
    for command in COMMANDS:
        code = (
            "import sys\nfrom harness_trainer.cli import main\n"
            f"try:\n    main([{command!r}, '--help'])\nexcept SystemExit:\n    pass\n"
            f"print('HEAVY', [m for m in {heavy!r} if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.rstrip().endswith("HEAVY []"), (command, done.stdout[-200:])

"""`harness-trainer clean`: what it removes, what it only tells, and that it needs no Docker."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.ownership import Claim, claim


def clean(tmp_path: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if k != "DOCKER_HOST"}
    base |= {"XDG_STATE_HOME": str(tmp_path / "state"), "HARNESS_TRAINER_CACHE": str(tmp_path / "cache"), **env}
    command = [sys.executable, "-m", "harness_trainer.cli", "clean", *argv]
    return subprocess.run(command, env=base, capture_output=True, text=True, timeout=120)


def left_by_a_dead_run(tmp_path: Path, engine: str = "") -> Claim:
    registry = tmp_path / "state" / "harness-trainer" / "owned"
    made = claim(registry, "sandbox", run_id="dead", engine=engine)
    made.release()
    made.owner = replace(made.owner, start_ticks=made.owner.start_ticks - 1)
    made.id = f"sandbox-{made.owner.pid}-{made.owner.start_ticks}-{os.urandom(4).hex()}"
    made.created_at -= 3600
    made.make_folder(tmp_path / "temp")
    return made


def test_it_says_what_it_would_remove_and_then_removes_it(tmp_path: Path) -> None:
    left = left_by_a_dead_run(tmp_path)
    sleeper = subprocess.Popen(["sleep", "600"], env={"HARNESS_TRAINER_OWNED": left.id})
    try:
        told = clean(tmp_path, "--dry-run", DOCKER_HOST="unix:///nowhere")
        assert told.returncode == 0 and "1 left-overs would be removed" in told.stdout
        assert f"{left.id}: 1 processes, folder {left.folders[0]}" in told.stdout
        assert Path(left.folders[0]).is_dir() and sleeper.poll() is None
        done = clean(tmp_path, DOCKER_HOST="unix:///nowhere")
        assert "1 left-overs removed" in done.stdout and done.returncode == 0
        assert not Path(left.folders[0]).exists() and sleeper.wait(10) == -9
        assert "nothing was left behind" in clean(tmp_path, DOCKER_HOST="unix:///nowhere").stdout
    finally:
        sleeper.kill()


def test_an_engine_that_is_named_and_silent_is_told_in_a_line(tmp_path: Path) -> None:
    done = clean(tmp_path, DOCKER_HOST="tcp://127.0.0.1:1")
    assert done.returncode == 0 and "nothing was left behind" in done.stdout
    assert "tcp://127.0.0.1:1 does not answer" in done.stderr and "Traceback" not in done.stderr


def test_what_cannot_be_removed_is_a_problem_and_an_exit_code(tmp_path: Path) -> None:
    left = left_by_a_dead_run(tmp_path, engine="docker:unix:///nowhere")
    done = clean(tmp_path, DOCKER_HOST="unix:///nowhere")
    assert done.returncode == 1 and f"{left.id}: " in done.stdout and "PROBLEM" in done.stdout
    assert (left.registry / f"{left.id}.json").exists()


@pytest.mark.parametrize("argv", [["--unused-days", "many"], ["--all"], ["--older"]])
def test_a_wrong_flag_is_told(tmp_path: Path, argv: list[str]) -> None:
    done = clean(tmp_path, *argv)
    assert done.returncode == 2 and "usage" in done.stderr and "Traceback" not in done.stderr


def test_containers_and_old_images_go_and_a_dry_run_only_names_them(
    tmp_path: Path, docker_engine: str, docker_base_image: str
) -> None:
    from sandboxes.docker_api import connect, is_absent
    from sandboxes.docker_labels import engine_of, image_labels, labels_of

    left = left_by_a_dead_run(tmp_path, engine=engine_of(docker_engine))
    api = connect(docker_engine)
    lost = replace(left, id=left.id[:-8] + os.urandom(4).hex())  # its record is not there
    for owned in (left, lost):
        api.create_container(docker_base_image, ["true"], name=owned.id, labels=labels_of(owned, "container"))
    content = os.urandom(32).hex()
    tag = content[:32]
    started = api.create_container(docker_base_image, ["true"])["Id"]
    changes = [f'LABEL {name}="{value}"' for name, value in image_labels(left, task="x", content=content).items()]
    api.commit(started, "harness-trainer/task", tag, changes=changes)
    api.remove_container(started)
    try:
        flags = ["--images", "--unused-days", "0"]
        told = clean(tmp_path, "--dry-run", *flags, DOCKER_HOST=docker_engine)
        for name in (f"container {left.id}", f"harness-trainer/task:{tag}"):
            assert name in told.stdout, told.stdout + told.stderr
        assert api.inspect_container(left.id) and api.inspect_image(f"harness-trainer/task:{tag}")
        # Any other run that starts on this engine removes what no record speaks for.
        assert f"container {lost.id}" in told.stdout or not api.containers(all=True, filters={"name": lost.id})
        # Not really with --images: others keep theirs in this engine.
        done = clean(tmp_path, DOCKER_HOST=docker_engine)
        assert done.returncode == 0, done.stderr
        for owned in (left, lost):
            with pytest.raises(Exception) as gone:
                api.inspect_container(owned.id)
            assert is_absent(gone.value)
    finally:
        api.remove_image(f"harness-trainer/task:{tag}", force=True)
        api.close()

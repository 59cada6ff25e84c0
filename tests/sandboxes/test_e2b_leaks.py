"""What a killed run leaves in E2B, and what the next start ends of it: all of its own, nothing of anybody else's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandboxes.lifecycle import reap
from tests.sandboxes.e2b_opening import SPEC, open_e2b, records
from tests.sandboxes.e2b_standin import KEY, Standin

SCRIPT = Path(__file__).with_name("e2b_owner.py")
REPO = Path(__file__).parents[2]


@contextlib.contextmanager
def owner(standin: Standin, folder: Path, count: int, point: str = "started") -> Iterator[subprocess.Popen[str]]:
    """A run in another process that has reached the fault point; killed at the end at the latest."""
    env = {**os.environ, "E2B_API_KEY": KEY, "PYTHONPATH": str(REPO)}
    argv = [sys.executable, str(SCRIPT), standin.url, str(folder), f"run-{folder.name}", str(count), point]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", KEY)


def of(standin: Standin, run_id: str) -> list[str]:
    return [life.sandbox_id for life in standin.running if life.metadata.get("harness-trainer.run") == run_id]


@pytest.mark.parametrize("point", ["started", "creating", "running", "stopping"])
def test_reaping_ends_a_killed_runs_sandboxes_and_spares_a_live_ones(
    standin: Standin, tmp_path: Path, point: str, key: None
) -> None:
    standin.page = 2  # five sandboxes are three pages
    folder = tmp_path / "runs"
    with owner(standin, folder, 2) as live:
        assert live.poll() is None
        other = of(standin, "run-runs")
        standin.create_delay_s = 1.0 if point == "creating" else 0.0
        if point == "stopping":
            standin.fail("kill", "hang", 3)
        with owner(standin, folder, 3, point) as dead:
            assert reap(folder / "owned") == []  # both live
            kill(dead)
        until(lambda: not standin.in_flight and len(standin.running) == 5)  # what the service was still making
        standin.forgive()

        reaped = reap(folder / "owned")

        assert len(reaped) == 3 and all(r.problem == "" and len(r.objects) == 1 for r in reaped)
        assert [life.sandbox_id for life in standin.running] == other
        assert len(records(folder)) == 2 and reap(folder / "owned") == []


def test_what_appears_after_reaping_is_ended_by_the_next_backend(standin: Standin, tmp_path: Path, key: None) -> None:
    standin.create_delay_s = 1.5
    with owner(standin, tmp_path, 2, "creating") as dead:
        kill(dead)
    assert len(reap(tmp_path / "owned")) == 2 and records(tmp_path) == []
    until(lambda: len(standin.running) == 2)
    with owner(standin, tmp_path, 0):
        assert standin.running == []


async def test_without_its_record_a_dead_owners_sandbox_is_ended_by_the_next_backend(
    standin: Standin, tmp_path: Path, key: None
) -> None:
    standin.page = 1
    with owner(standin, tmp_path / "a", 2) as dead, owner(standin, tmp_path / "b", 1) as live:
        kill(dead)
        for path in (tmp_path / "a" / "owned").iterdir():
            path.unlink()
        async with open_e2b(standin, tmp_path / "c"):
            assert live.poll() is None and len(standin.running) == 1
            assert of(standin, "run-b") == [standin.running[0].sandbox_id]


def test_without_a_key_the_record_stays_and_says_what_to_do(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with owner(standin, tmp_path, 1) as dead:
        kill(dead)
    (reaped,) = reap(tmp_path / "owned")
    assert "set E2B_API_KEY" in reaped.problem and "\n" not in reaped.problem
    assert len(records(tmp_path)) == 1 and len(standin.running) == 1
    monkeypatch.setenv("E2B_API_KEY", KEY)
    standin.fail("list", 401, 1)
    assert "401" in reap(tmp_path / "owned")[0].problem
    standin.fail("kill", 500, 1)
    assert "could not be ended" in reap(tmp_path / "owned")[0].problem
    assert len(records(tmp_path)) == 1 and len(standin.running) == 1
    assert [r.problem for r in reap(tmp_path / "owned")] == [""]
    assert standin.running == [] and records(tmp_path) == []


async def test_a_dry_run_only_tells(standin: Standin, tmp_path: Path, key: None) -> None:
    with owner(standin, tmp_path, 1) as dead:
        kill(dead)
    (told,) = reap(tmp_path / "owned", dry_run=True)
    assert told.objects == [f"E2B sandbox {standin.running[0].sandbox_id}"]
    assert len(standin.running) == 1 and len(records(tmp_path)) == 1
    reap(tmp_path / "owned")
    assert standin.running == []


async def test_strangers_and_other_machines_are_left_alone(standin: Standin, tmp_path: Path) -> None:
    """Also one of the same name: host names are not unique."""
    import e2b

    async with open_e2b(standin, tmp_path / "a") as backend:
        async with backend.sandbox(SPEC):
            ours = dict(standin.running[0].metadata)
    where = {"api_key": KEY, "api_url": standin.url, "sandbox_url": standin.url}
    dead = {**ours, "harness-trainer.owner.start_ticks": "1", "harness-trainer.registry": str(tmp_path / "none")}
    others = [
        {},
        {"harness-trainer.owner.host": ours["harness-trainer.owner.host"]},
        {**dead, "harness-trainer.owner.host": "another"},
        {**dead, "harness-trainer.machine": "another", "harness-trainer.owner.boot_id": "another"},
        {**dead, "harness-trainer.owner.pid": "many"},
    ]
    for metadata in others:
        await e2b.AsyncSandbox.create(metadata=metadata, **where)
    await e2b.AsyncSandbox.create(metadata=dead, **where)
    async with open_e2b(standin, tmp_path / "b"):
        assert [dict(life.metadata) for life in standin.running] == others


async def test_a_listing_that_ignores_its_filter_ends_nobody_elses(standin: Standin, tmp_path: Path) -> None:
    import e2b

    standin.ignore_filters = True
    await e2b.AsyncSandbox.create(api_key=KEY, api_url=standin.url, sandbox_url=standin.url)
    async with open_e2b(standin, tmp_path) as backend:
        standin.fail("create", "lost", 1)
        async with backend.sandbox(SPEC):
            pass
    assert len(standin.running) == 1


def test_clean_finds_what_is_on_no_record(standin: Standin, tmp_path: Path, key: None) -> None:
    with owner(standin, tmp_path, 1) as dead:
        kill(dead)
    for path in (tmp_path / "owned").iterdir():
        path.unlink()
    where = {"E2B_API_URL": standin.url, "XDG_STATE_HOME": str(tmp_path / "state"), "DOCKER_HOST": ""}
    env = {name: value for name, value in {**os.environ, **where}.items() if value}
    for options, left in ((["--dry-run"], 1), ([], 0)):
        argv = [sys.executable, "-m", "harness_trainer.cli", "clean", *options]
        told = subprocess.run(argv, env=env, cwd=REPO, capture_output=True, text=True, check=False)
        assert told.returncode == 0 and "E2B sandbox i" in told.stdout, told
        assert len(standin.running) == left

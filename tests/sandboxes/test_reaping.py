"""What is left after a run dies, and what reaping ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_boxes import backend, need_bubblewrap, running, soon

from sandboxes.base import Command, Sandbox, SandboxError, SandboxGone
from sandboxes.lifecycle import Claim, Owner, claim, reap
from sandboxes.processes import find_below, read_proc

SCRIPT = Path(__file__).with_name("owner_script.py")


@contextlib.contextmanager
def owner(
    isolation: str, registry: Path, root: Path, count: int, job: str | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[Any]]]:
    if isolation == "bubblewrap":
        need_bubblewrap()
    argv = [sys.executable, str(SCRIPT), isolation, str(registry), str(root), str(count), *([job] if job else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), str(SCRIPT.parent), *sys.path])}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def test_reaping_ends_a_killed_run_whole_and_spares_a_live_one(registry: Path, root: Path, isolation: str) -> None:
    with owner(isolation, registry, root, 3) as (dead, dead_ids), owner(isolation, registry, root, 1) as (_, live_ids):
        assert reap(registry) == []
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        if isolation == "none":
            assert all(running(root, i) == ["sleep 600"] * 4 for i in dead_ids)

        reaped = reap(registry)

        assert {r.id for r in reaped} == set(dead_ids)
        assert all(r.problem == "" for r in reaped)
        assert [running(root, i) for i in dead_ids] == [[], [], []]
        assert [p.name for p in root.iterdir()] == live_ids
        assert [p.stem for p in registry.glob("*.json")] == live_ids
        assert running(root, live_ids[0]) == ["sleep 600"] * 4
        assert reap(registry) == []
    reap(registry)
    assert list(root.iterdir()) == [] and running(root, live_ids[0]) == []


def test_a_sealed_sandbox_ends_with_its_owner_before_anybody_reaps(registry: Path, root: Path) -> None:
    with owner("bubblewrap", registry, root, 2) as (dead, ids):
        below = [find_below(monitor_of(root, i)) for i in ids]
        assert all(len(pids) >= 5 for pids in below)
        dead.kill()
        dead.wait()
        end = time.monotonic() + 5
        while any(find_below(monitor_of(root, i)) for i in ids) or any(
            read_proc(pid) for pids in below for pid in pids
        ):
            assert time.monotonic() < end
            time.sleep(0.01)
    mounts = Path("/proc/self/mounts").read_text()
    assert not any(i in mounts for i in ids)
    assert {r.id for r in reap(registry)} == set(ids)
    assert list(root.iterdir()) == [] and list(registry.iterdir()) == []


def monitor_of(root: Path, sandbox_id: str) -> int:
    return int(json.loads((root / sandbox_id / "control" / "monitor.json").read_text())[0])


JOB = "echo begun; while [ ! -e go ]; do sleep 0.02; done; echo done; exit 7"


async def test_a_job_outlives_its_owner_and_is_taken_over(registry: Path, root: Path, isolation: str) -> None:
    with owner(isolation, registry, root, 2, JOB) as (dead, pairs):
        (box_id, job_id), (other_id, _) = pairs
        async with backend(isolation, root, registry) as heir:
            with pytest.raises(SandboxError, match="belongs to process"):
                await heir.attach(box_id)
            dead.kill()
            dead.wait()
            box = await heir.attach(box_id)
            assert [r.id for r in reap(registry)] == [other_id]  # that one nobody took over
            status = await box.job(job_id)
            assert status.running and status.stdout == "begun\n"
            await box.put_text("", "/app/go")
            status = await box.wait_job(job_id, 10)
            assert (status.running, status.exit_code, status.stdout) == (False, 7, "begun\ndone\n")
            assert (await box.run(Command(["ls"]))).stdout == "go\n"
            await soon(lambda: running(root, box_id) == [] and running(root, other_id) == [])
            with pytest.raises(SandboxGone):
                await heir.attach(other_id)
    assert os.listdir(root) == [] and os.listdir(registry) == []


async def test_what_a_job_left_is_there_when_it_ended_without_an_owner(
    registry: Path, root: Path, isolation: str
) -> None:
    with owner(isolation, registry, root, 1, JOB) as (dead, pairs):
        box_id, job_id = pairs[0]
        dead.kill()
        dead.wait()
        (root / box_id / "root" / "app" / "go").touch()
        end = time.monotonic() + 10
        while not (root / box_id / "control" / "jobs" / job_id / "end.json").exists():
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        async with backend(isolation, root, registry) as heir:
            box = await heir.attach(box_id)
            status = await box.job(job_id)
            assert (status.running, status.exit_code, status.stdout) == (False, 7, "begun\ndone\n")
            assert (await box.run(Command(["ls"]))).stdout == "go\n"


async def test_of_several_heirs_one_gets_it(registry: Path, root: Path, isolation: str) -> None:
    with owner(isolation, registry, root, 1, JOB) as (dead, pairs):
        dead.kill()
        dead.wait()
        with owner(isolation, registry, root, 0) as (living, _):
            record = registry / f"{pairs[0][0]}.json"
            text = json.loads(record.read_text())
            text["owner"] |= {"pid": living.pid, "start_ticks": read_proc(living.pid).start_ticks}  # type: ignore[union-attr]
            record.write_text(json.dumps(text))
            async with backend(isolation, root, registry) as heir:
                with pytest.raises(SandboxError, match=f"belongs to process {living.pid}"):
                    await heir.attach(pairs[0][0])
    reap(registry)
    assert os.listdir(root) == []


def test_a_job_without_an_heir_is_reaped(registry: Path, root: Path, isolation: str) -> None:
    with owner(isolation, registry, root, 1, "setsid sleep 600 & sleep 600") as (dead, pairs):
        box_id = pairs[0][0]
        end = time.monotonic() + 10
        while running(root, box_id).count("sleep 600") < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        dead.kill()
        dead.wait()
        assert running(root, box_id).count("sleep 600") == 2
        assert [(r.id, r.problem) for r in reap(registry)] == [(box_id, "")]
        assert running(root, box_id) == [] and list(root.iterdir()) == []


def test_concurrent_reapers_share_the_work(registry: Path, tmp_path: Path, isolation: str) -> None:
    with owner(isolation, registry, tmp_path / "root", 3) as (dead, ids):
        dead.kill()
        dead.wait()
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.extend(r.id for r in reap(registry))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted(ids)
    assert list(registry.iterdir()) == [] and list((tmp_path / "root").iterdir()) == []


def dead_claim(registry: Path, **owner: object) -> Claim:
    """A record as a dead process of this machine would have left it."""
    made = claim(registry, "sandbox")
    made.release()
    gone = replace(made.owner, **{"start_ticks": made.owner.start_ticks - 1, **owner})  # type: ignore[arg-type]
    made.id = f"sandbox-{gone.pid}-{gone.start_ticks}-{os.urandom(4).hex()}"
    made.owner = gone
    made.save()
    return made


def test_a_reused_pid_does_not_keep_a_dead_owner_alive(registry: Path, tmp_path: Path) -> None:
    record = dead_claim(registry)  # same pid as this process, started earlier
    folder = record.make_folder(tmp_path / "root")
    assert [r.folders for r in reap(registry)] == [[str(folder)]]


def test_records_of_other_hosts_and_containers_are_left_alone(registry: Path) -> None:
    elsewhere = [dead_claim(registry, host="other"), dead_claim(registry, pid_namespace="pid:[1]")]
    assert reap(registry) == []
    assert {p.stem for p in registry.glob("*.json")} == {r.id for r in elsewhere}


def test_after_a_reboot_everything_of_this_host_is_dead(registry: Path) -> None:
    me = Owner.current()
    record = dead_claim(registry, boot_id="earlier", pid_namespace="pid:[1]", start_ticks=me.start_ticks)
    assert [r.id for r in reap(registry)] == [record.id]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"folders": 3}', '{"owner": {}, "folders": []}', "\0\0\0"])
def test_an_unreadable_record_is_judged_by_its_name(registry: Path, text: str) -> None:
    live, dead = claim(registry, "engine"), dead_claim(registry)
    sleeper = subprocess.Popen(["sleep", "600"], env={"HARNESS_TRAINER_OWNED": f"x/{dead.id}"})
    for record in (live, dead):
        (registry / f"{record.id}.json").write_text(text)
    assert [(r.id, r.num_processes) for r in reap(registry)] == [(dead.id, 1)]
    assert sleeper.wait() == -signal.SIGKILL
    assert [p.stem for p in registry.glob("*.json")] == [live.id]


def test_a_record_that_names_a_strangers_folder_removes_nothing(registry: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    record = dead_claim(registry)
    link = tmp_path / record.id
    link.symlink_to(precious)
    record.folders = [str(precious), str(link), str(tmp_path)]
    record.save()
    reap(registry)
    assert precious.is_dir() and not link.is_symlink()


def test_files_in_the_registry_that_are_not_records_are_left_alone(registry: Path) -> None:
    registry.mkdir()
    for name in ("notes.json", "sandbox-1-2.json", "readme"):
        (registry / name).write_text("{}")
    assert reap(registry) == []
    assert len(list(registry.iterdir())) == 3
    assert reap(registry / "missing") == []


async def test_many_sandboxes_leave_nothing_in_the_root(make: Callable[..., Sandbox], tmp_path: Path) -> None:
    for _ in range(10):
        async with make() as box:
            await box.run(Command(["sh", "-c", "mkdir -p x/y; echo hi > x/y/z; chmod 0 x/y x; touch $TMPDIR/t"]))
    assert list((tmp_path / "root").iterdir()) == []
    assert list((tmp_path / "owned").iterdir()) == []


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
async def test_a_start_that_is_cancelled_leaves_nothing(
    make: Callable[..., Sandbox], tmp_path: Path, num_steps: int
) -> None:
    task = asyncio.create_task(make().__aenter__())
    for _ in range(num_steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for folder in (tmp_path / "root", tmp_path / "owned"):
        assert not folder.exists() or os.listdir(folder) == []


async def test_folders_too_deep_for_python_are_removed(make: Callable[..., Sandbox], tmp_path: Path) -> None:
    deep = "import os\nfor _ in range(1500): os.mkdir('a' * 10); os.chdir('a' * 10)"
    async with make() as box:
        assert (await box.run(Command(["python3", "-c", deep]))).exit_code == 0
    assert list((tmp_path / "root").iterdir()) == []

"""Long-lived children: they end with their owner, on every path, and take their descendants along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandboxes.lifecycle import LifecycleError, OwnedProcess, start_process
from sandboxes.processes import Traces, find_all, read_proc

ENV = {"PATH": os.environ["PATH"]}
# A child that ignores SIGTERM, with one grandchild in a session of its own and one that hid its environment as well.
STUBBORN = "trap '' TERM; setsid sleep 600 & (env -i setsid sleep 600 &); echo up; while :; do sleep 0.05; done"


def start(tmp_path: Path, script: str, **options: object) -> OwnedProcess:
    return start_process(
        ["sh", "-c", script],
        env=ENV,
        cwd=tmp_path,
        log_path=tmp_path / "logs" / "child.log",
        registry=tmp_path / "owned",
        kind="engine",
        **options,  # type: ignore[arg-type]
    )


def wait_for(text: str, path: Path, limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end, f"no {text!r} in {path}"
        time.sleep(0.01)


def test_stop_ends_the_whole_tree_and_the_record(tmp_path: Path) -> None:
    child = start(tmp_path, STUBBORN)
    wait_for("up", child.log_path)
    assert child.alive() and child.returncode is None
    assert len(list((tmp_path / "owned").glob("*.json"))) == 1
    child.stop(grace_s=0.2)
    assert not child.alive()
    assert find_all(child.owned_id, Traces(log=child.log_path)) == []
    assert list((tmp_path / "owned").iterdir()) == []
    child.stop()


def test_sigterm_reaches_the_child_once_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    child = start(
        tmp_path, "trap 'echo term; n=$((n+1)); sleep 0.3; exit $n' TERM; echo up; while :; do sleep 0.05; done"
    )
    wait_for("up", child.log_path)
    assert child.stop() == 1
    assert child.log_path.read_text().count("term") == 1


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("kill -TERM $$", -15)])
def test_a_child_that_ends_itself_passes_on_how(tmp_path: Path, script: str, code: int) -> None:
    child = start(tmp_path, f"setsid sleep 600 & {script}")
    assert child.wait(5) == code and not child.alive()
    assert find_all(child.owned_id, Traces()) == []
    child.stop()


def test_a_program_that_does_not_exist_is_named_and_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(LifecycleError, match=r"engine.*no-such-program"):
        start_process(
            ["no-such-program"],
            env=ENV,
            cwd=tmp_path,
            log_path=tmp_path / "log",
            registry=tmp_path / "owned",
            kind="engine",
        )
    assert list((tmp_path / "owned").glob("*")) == []


def test_descriptors_are_passed_and_stdin_is_empty(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    child = start(tmp_path, f"cat; echo given > /proc/self/fd/{write_fd}", pass_fds=(write_fd,))
    os.close(write_fd)
    with os.fdopen(read_fd) as reader:
        assert reader.read() == "given\n"
    child.stop()


def test_stop_finds_what_a_killed_supervisor_left(tmp_path: Path) -> None:
    # setproctitle, as vLLM uses it, wipes the environment a process shows: only the log file gives it away.
    child = start(tmp_path, "env -i setsid sleep 600 & echo up; wait")
    wait_for("up", child.log_path)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(5)
    assert find_all(child.owned_id, Traces(log=child.log_path)) != []
    child.stop()
    assert find_all(child.owned_id, Traces(log=child.log_path)) == []


OWNER = """
import json, os, sys, threading, time
from pathlib import Path
from sandboxes.lifecycle import start_process
folder, script, grace = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
made = []
def begin():
    made.append(start_process(["sh", "-c", script], env={"PATH": os.environ["PATH"]}, cwd=folder,
        log_path=folder / "child.log", registry=folder / "owned", kind="runner", grace_s=grace))
thread = threading.Thread(target=begin)
thread.start()
thread.join()
print(json.dumps([made[0].owned_id, made[0].pid]), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_when_its_owner_dies_and_not_when_the_starting_thread_ends(tmp_path: Path, signum: int) -> None:
    argv = [sys.executable, "-c", OWNER, str(tmp_path), STUBBORN, "0.2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        owned_id, pid = json.loads(owner.stdout.readline())
        wait_for("up", tmp_path / "child.log")
        time.sleep(0.1)
        assert len(find_all(owned_id, Traces())) >= 3  # the thread that started it is over
        supervisor = os.pidfd_open(pid)
        owner.send_signal(signum)
        owner.wait()
    end = time.monotonic() + 5
    while find_all(owned_id, Traces(log=tmp_path / "child.log")):
        assert time.monotonic() < end
        time.sleep(0.02)
    os.close(supervisor)
    assert list((tmp_path / "owned").glob("*.json")) == []


def test_a_killed_runner_takes_its_sandboxes_along(tmp_path: Path) -> None:
    script = Path(__file__).with_name("owner_script.py")
    root = tmp_path / "root"
    runner = start_process(
        [sys.executable, str(script), "none", str(tmp_path / "owned"), str(root), "2"],
        env=ENV,
        cwd=tmp_path,
        log_path=tmp_path / "log",
        registry=tmp_path / "owned",
        kind="runner",
    )
    wait_for('"]\n', runner.log_path, 30.0)
    ids = json.loads(runner.log_path.read_text().splitlines()[-1])
    pids = find_all(runner.owned_id, Traces())
    os.kill(next(p for p in pids if (proc := read_proc(p)) and proc.ppid == runner.pid), signal.SIGKILL)
    assert runner.wait(10) == -signal.SIGKILL
    assert [find_all(i, Traces(folder=root / i)) for i in ids] == [[], []]
    assert list(root.iterdir()) == []
    runner.stop()
    assert list((tmp_path / "owned").iterdir()) == []


async def test_stop_off_the_event_loop(tmp_path: Path) -> None:
    child = start(tmp_path, "sleep 600")
    assert await child.stop_async(grace_s=2) == -signal.SIGTERM

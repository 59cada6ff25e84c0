"""SIGTERM to `train` alone, as a service sends it: what is learnt is saved, and everything ends.

The engine is a stand-in that starts in a second.
"""

import os
import signal
import time

import pytest

from harness_trainer.learner.checkpoints import last_checkpoint, read_state
from tests.e2e import stub_engine_server
from tests.e2e.test_restarts import Run, start
from tests.e2e.test_whole_run import processes_of

WITHIN_S = 25.0  # SLURM and Kubernetes kill after 30


@pytest.fixture
def launch(tmp_path):
    """Starts the run, again and again in the same folder; whatever happens, none is left."""
    runs: list[Run] = []
    settings = {
        "--engine.python": stub_engine_server.write_python(tmp_path),
        "--learner.verify-sync": "never",
        "--learner.save-steps": 1000,
    }

    def begin() -> Run:
        runs.append(start(tmp_path, num_steps=1000, **settings))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


def end(run: Run) -> str:
    """What a person is told; nothing of the run is left, on the machine or on record."""
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    run.process.send_signal(signal.SIGTERM)  # which cuts nothing short
    began = time.monotonic()
    _, err = run.process.communicate(timeout=60)
    assert time.monotonic() - began < WITHIN_S, err
    assert run.process.returncode == 143 and "Traceback" not in err, err
    assert "the same command continues" in err
    # What was just being started when it was told ends with its owner, a moment later.
    until_gone = time.monotonic() + WITHIN_S
    while processes_of(run.path) and time.monotonic() < until_gone:
        time.sleep(0.1)
    assert processes_of(run.path) == {}
    assert list((run.folder / "state" / "harness-trainer" / "owned").glob("*.json")) == []
    return err


def test_it_saves_what_is_learnt_and_ends_everything_also_while_it_starts(launch):
    run = launch()
    run.until(lambda: len(run.steps()) >= 2, "two steps")
    err = end(run)
    saved = last_checkpoint(run.path / "checkpoints")
    assert saved is not None and read_state(saved).step >= 2, err
    assert "a checkpoint first" in err and "last one counts" not in err
    for part in ("learner", "runner"):  # the first and the last that is started
        again = launch()
        num_started = len(run.events("started", part))
        again.until(lambda part=part, n=num_started: len(run.events("started", part)) > n, f"the {part}")
        end(again)
    assert last_checkpoint(run.path / "checkpoints") == saved


def test_before_anything_was_started_there_is_nothing_to_end(launch):
    run = launch()
    environ = f"/proc/{run.process.pid}/status"
    # From the moment that the signal is heeded: before, it ends a process that has started nothing.
    run.until(lambda: _catches(environ, signal.SIGTERM), "the signal is heeded")
    run.process.send_signal(signal.SIGTERM)
    _, err = run.process.communicate(timeout=60)
    assert run.process.returncode == 143 and "Traceback" not in err, err
    assert processes_of(run.path) == {}


def _catches(status: str, number: int) -> bool:
    if not os.path.exists(status):
        return False
    with open(status) as file:
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) & 1 << (number - 1))

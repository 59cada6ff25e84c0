"""A whole run whose learner is two processes (FSDP2, gloo): what `train` starts is what it restarts and continues.

The engine is the stand-in of `test_restarts`. What two processes compute is `tests/learner/test_several_processes`'s.
"""

from pathlib import Path

import psutil

from harness_trainer.learner.checkpoints import last_checkpoint
from tests.e2e import stub_engine_server
from tests.e2e.test_restarts import ended, finish, start  # noqa: F401

NUM_STEPS = 6


def ranks(run) -> set[int]:
    """Process ids of the learner's processes."""
    found = set()
    for process in psutil.process_iter():
        try:
            if str(run.path) in " ".join(process.cmdline()) and "RANK" in process.environ():
                found.add(process.pid)
        except psutil.Error:  # it ended this moment
            continue
    return found


def test_a_run_with_a_learner_of_two_processes_survives_one_of_them(tmp_path: Path, ended):  # noqa: F811
    run = start(
        tmp_path,
        num_steps=NUM_STEPS,
        **{
            "--engine.python": stub_engine_server.write_python(tmp_path),
            "--learner.verify-sync": "never",
            "--learner.num-processes": 2,
            "--learner.accelerate-config": "fsdp2",
        },
    )
    ended(run)
    run.until(lambda: len(run.steps()) >= 1, "the first step")
    first = ranks(run)
    assert len(first) == 2
    psutil.Process(max(first)).kill()
    run.until(lambda: len(run.events("restart", "learner")) == 1, "the death of one process is noticed")
    run.kill_in_the_middle_of_a_step("engine")
    finish(run, NUM_STEPS)
    assert {event["part"] for event in run.events("restart")} == {"learner", "engine"}
    last = last_checkpoint(run.path / "checkpoints")
    assert last is not None and last.name.endswith(str(NUM_STEPS))
    assert not ranks(run)

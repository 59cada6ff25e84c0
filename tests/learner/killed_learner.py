"""Learner processes that die by SIGKILL at a chosen write: imports TRL once, then forks one for each order on stdin.

An order is `SPEC KILL_AT TRACE`: the learner's spec, the number of the event to die at (-1 = live), and a file that
gets one line per event. An event is the moment before or after something that outlives the process is changed. Answers
each order with the exit status, e.g. `-9`.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from harness_trainer.learner import __main__ as learner
from harness_trainer.learner import checkpoints, trl_compat
from harness_trainer.learner.weight_transfer import ShmWeightTransfer
from harness_trainer.rollouts.store import RolloutStore

WATCHED: list[tuple[Any, str]] = [
    (RolloutStore, "set_state"),
    (RolloutStore, "mark_trained"),
    (RolloutStore, "rewind"),
    (RolloutStore, "continue_from"),
    (RolloutStore, "announce"),
    (RolloutStore, "publish"),
    (ShmWeightTransfer, "send_weights"),
    (ShmWeightTransfer, "resume"),
    (learner, "_forget_steps_after"),
    (learner, "_rollout_facts"),  # asked right before the step's line is written
    (trl_compat.HarnessGRPOTrainer, "save_model"),
    (trl_compat.HarnessGRPOTrainer, "_save_optimizer_and_scheduler"),
    (trl_compat.HarnessGRPOTrainer, "_save_rng_state"),
    (TrainerState, "save_to_json"),
    (checkpoints, "begin"),  # also before an older one is removed
    (checkpoints, "write_state"),
]


def watch(kill_at: int, trace: Path) -> None:
    """Count events from here on, and die at number `kill_at`."""
    num_events = 0

    def event(name: str) -> None:
        nonlocal num_events
        with trace.open("a") as file:
            file.write(f"{name}\n")
        if num_events == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        num_events += 1

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            event(f"before {name}")
            result = call(*args, **kwargs)
            event(f"after {name}")
            return result

        return wrapper

    for owner, name in WATCHED:
        setattr(owner, name, watched(name, getattr(owner, name)))


def live(spec: str, kill_at: int, trace: Path) -> int:
    torch.set_num_threads(1)
    watch(kill_at, trace)
    sys.argv = ["learner", "--spec", spec]
    return learner.main()


def main() -> None:
    for line in sys.stdin:
        spec, kill_at, trace = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(live(spec, int(kill_at), Path(trace)))
            except BaseException:
                traceback.print_exc()
                os._exit(99)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()

"""Does it learn? Trains with the shipped Python agent from several seeds and compares the first steps with the last.

    python -m benchmarks.learning [--seeds 0 1 2] [--steps 12] [--out runs/bench-learning]

Every step trains on one group of every task, so steps are comparable. "First" and "last" are all rollouts of the first
and last `--window` steps; the rise counts when it is more than two standard errors of the difference.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path

from harness_trainer.config import RunConfig
from harness_trainer.display import Display
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.run import train
from harness_trainer.rundir import RunDir

TASKS = ("lower-case", "cheer")


def config(seed: int, steps: int, tasks: str, group_size: int) -> RunConfig:
    num_tasks = len(tasks.split(","))
    return RunConfig.model_validate(
        {
            "tasks": tasks,
            "harness": "pyagent-chat",
            "rollouts": {"group_size": group_size, "max_concurrent": 8, "max_turns": 1, "max_tokens": 48, "seed": seed},
            "learner": {
                "max_steps": steps,
                "groups_per_step": num_tasks,
                "max_staleness": 1,
                "learning_rate": 2e-5,
                "token_budget": 4096,
                "save_steps": steps,
                "seed": seed,
            },
            "engine": {"max_model_len": 1024, "extra_args": ["--seed", str(seed)]},
        }
    )


def rewards_of(run_dir: Path, steps: range) -> list[float]:
    store = RolloutStore(RunDir(run_dir).store)
    try:
        return [r.reward for step in steps for r in store.trained_results(step) if r.reward is not None]
    finally:
        store.close()


def mean_and_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-learning"))
    options = parser.parse_args()
    print("seed  first reward    last reward     rise / standard error  minutes")
    all_rose = True
    for seed in options.seeds:
        run_dir = options.out / f"seed{seed}"
        started = time.monotonic()
        with Display() as display:
            train(config(seed, options.steps, options.tasks, options.group_size), run_dir, display)
        last_steps = range(options.steps - options.window + 1, options.steps + 1)
        first, first_error = mean_and_error(rewards_of(run_dir, range(1, options.window + 1)))
        last, last_error = mean_and_error(rewards_of(run_dir, last_steps))
        ratio = (last - first) / math.hypot(first_error, last_error)
        all_rose &= ratio > 2
        minutes = (time.monotonic() - started) / 60
        print(
            f"{seed:>4}  {first:.3f} ± {first_error:.3f}   {last:.3f} ± {last_error:.3f}   "
            f"{last - first:+.3f} / {ratio:.1f} errors   {minutes:.1f}",
            flush=True,
        )
    return 0 if all_rose else 1


if __name__ == "__main__":
    sys.exit(main())

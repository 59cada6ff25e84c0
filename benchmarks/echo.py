"""Does the echo example learn in minutes? `examples/white_box/echo.py` on SmolLM2, its first steps against its last.

    python -m benchmarks.echo [--seed 0] [--steps 18] [--out runs/bench-echo]

The model earns a tenth of the length of what it last told the environment to echo. "First" and "last" are all rollouts
of the first and last `--window` steps. The goal: the mean reward rises by more than two standard errors of the
difference, in under ten minutes on two cores, the engine's start included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.learning import mean_and_error, rewards_of
from harness_trainer.config import RunConfig
from harness_trainer.display import Display
from harness_trainer.errors import HarnessTrainerError
from harness_trainer.run import train

ECHO = Path(__file__).parents[1] / "examples" / "white_box" / "echo.py"
GOAL_ERRORS, GOAL_MINUTES = 2.0, 10.0


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("echo_example", ECHO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(echo: ModuleType, rows: Path, seed: int, steps: int) -> RunConfig:
    """The example's own settings for two cores, with a seed."""
    settings: dict[str, Any] = json.loads(json.dumps(echo.TWO_CORES))
    settings["env"] = {"type": "class", "target": f"{ECHO}:EchoEnv", "rewards": [f"{ECHO}:reward_length"]}
    settings["tasks"] = str(rows)
    settings["rollouts"]["seed"] = settings["learner"]["seed"] = seed
    settings["learner"] |= {"max_steps": steps, "save_steps": steps}
    settings["engine"]["extra_args"] = ["--seed", str(seed)]
    return RunConfig.model_validate(settings)


def verdict(first: list[float], last: list[float], minutes: float) -> tuple[str, bool]:
    """One line for people, and whether the goal is reached."""
    (before, before_error), (after, after_error) = mean_and_error(first), mean_and_error(last)
    error = math.hypot(before_error, after_error)
    rise = after - before
    ratio = rise / error if error else math.inf if rise > 0 else 0.0
    reached = ratio > GOAL_ERRORS and minutes < GOAL_MINUTES
    line = (
        f"mean reward {before:.3f} ± {before_error:.3f} (first {len(first)} rollouts) to"
        f" {after:.3f} ± {after_error:.3f} (last {len(last)}): {rise:+.3f}, {ratio:.1f} standard errors in"
        f" {minutes:.1f} minutes; goal > {GOAL_ERRORS:g} in < {GOAL_MINUTES:g}: {'yes' if reached else 'no'}"
    )
    return line, reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--window", type=int, default=3, help="steps that count as first, and as last")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-echo"))
    options = parser.parse_args()
    echo, run_dir = example(), options.out / f"seed{options.seed}"
    if run_dir.exists():
        print(f"benchmarks.echo: {run_dir} is there, and a run that goes on tells no time: remove it", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    rows = (options.out / "echo-rows.jsonl").resolve()
    rows.write_text("".join(json.dumps(row) + "\n" for row in echo.rows(shown=True)))
    began = time.monotonic()
    try:
        with echo.local_server() as url, Display() as display:
            os.environ["ECHO_URL"] = url
            train(config(echo, rows, options.seed, options.steps), run_dir, display)
    except HarnessTrainerError as error:
        print(f"benchmarks.echo: {error}", file=sys.stderr)
        return 2
    minutes = (time.monotonic() - began) / 60
    for step in range(1, options.steps + 1):
        mean, error = mean_and_error(rewards_of(run_dir, range(step, step + 1)))
        print(f"step {step:>3}  {mean:.3f} ± {error:.3f}")
    first = rewards_of(run_dir, range(1, options.window + 1))
    last = rewards_of(run_dir, range(options.steps - options.window + 1, options.steps + 1))
    line, reached = verdict(first, last, minutes)
    print(line)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())

"""A stand-in for `harness-trainer train` as a job starts it: a run folder as the real one leaves it, in no time.

Takes the real arguments. Its config says what it does: `steps` in all, `pause_s` before each, a checkpoint every
`save_steps`; `fails` ends it after its last step. It heeds Ctrl-C, and a request for a checkpoint before the next step.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import time
from pathlib import Path

import yaml

from harness_trainer.learner import checkpoints
from harness_trainer.learner.checkpoints import HarnessState, last_checkpoint, read_state
from harness_trainer.rundir import RunDir


def write_checkpoint(run: RunDir, step: int) -> None:
    folder = run.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json"):
        (folder / name).write_text(f"{name} of {step}")
    (folder / "model.safetensors").write_bytes(b"%04d" % step * 500)  # a large file, as the Hub sees it
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    checkpoints.complete(folder, HarnessState(step, step + 1), keep=1)


def take_step(run: RunDir, step: int) -> None:
    with sqlite3.connect(run.store) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE IF NOT EXISTS steps (step INTEGER)")
        db.execute("INSERT INTO steps VALUES (?)", (step,))
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    config = yaml.safe_load(options.config.read_text())
    run = RunDir(options.run_dir)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    run.config.write_text(yaml.safe_dump(config))
    last = last_checkpoint(run.checkpoints)
    step = saved = 0 if last is None else read_state(last).step
    print(f"training from step {step}; key {os.environ.get('E2B_API_KEY', 'none')}", flush=True)
    try:
        while step < config["steps"]:
            end = time.monotonic() + config["pause_s"]
            while time.monotonic() < end:
                if checkpoints.is_requested(run.checkpoints):
                    if step > saved:
                        write_checkpoint(run, step)
                        saved = step
                    checkpoints.answered(run.checkpoints)
                time.sleep(0.01)
            step += 1
            take_step(run, step)
            if step % config["save_steps"] == 0 or step == config["steps"]:
                write_checkpoint(run, step)
                saved = step
            print(f"step {step}", flush=True)
    except KeyboardInterrupt:
        print("sandboxes are closed", flush=True)
        return 130
    if config.get("fails"):
        print("the loss is nan", file=sys.stderr)
        return 6
    (run.path / "model").mkdir(exist_ok=True)
    (run.path / "model" / "config.json").write_text("{}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

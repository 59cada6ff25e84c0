"""`harness-trainer train` and what it shares with `demo`: resolve the config, run, show the table."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness_trainer.cli.flags import add_flags, resolve
from harness_trainer.config import RunConfig


def run(argv: Sequence[str]) -> int:
    return run_with_preset(argv, name="train", preset={}, default_run_dir="runs/train")


def run_with_preset(argv: Sequence[str], *, name: str, preset: Mapping[str, Any], default_run_dir: str) -> int:
    parser = argparse.ArgumentParser(prog=f"harness-trainer {name}", usage=f"harness-trainer {name} [options]")
    parser.add_argument(
        "--run-dir", type=Path, default=Path(default_run_dir), help="folder of the run; continued if it exists"
    )
    parser.add_argument("--config", type=Path, help="YAML file with any of the settings below")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--plain", action="store_true", help="plain progress lines, also on a terminal")
    add_flags(parser, RunConfig, preset)
    options = parser.parse_args(argv)
    config = resolve(RunConfig, options, preset, options.config)
    if options.dry_run:
        import yaml

        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
        return 0

    from harness_trainer.display import Display, print_step_table
    from harness_trainer.run import train

    with Display(plain=True if options.plain else None) as display:
        reports = train(config, options.run_dir, display)
    print_step_table(reports)
    _print_rollout_summary(options.run_dir)
    _print_where_to_look(options.run_dir)
    return 0


def _print_rollout_summary(run_dir: Path) -> None:
    from harness_trainer.rollouts.store import RolloutStore
    from harness_trainer.rollouts.summary import summary_lines
    from harness_trainer.rundir import RunDir

    store = RolloutStore(RunDir(run_dir).store)
    try:
        print("\nRollouts")
        for line in summary_lines(store):
            print(f"  {line}")
    finally:
        store.close()


def _print_where_to_look(run_dir: Path) -> None:
    print(f"\nRun folder: {run_dir}")
    print(f"  every step      {run_dir / 'metrics.jsonl'}")
    print(f"  checkpoints     {run_dir / 'checkpoints'}")
    print(f"  agents' logs    {run_dir / 'artifacts'}")
    beside_python = Path(sys.executable).with_name("harness-trainer")  # of an environment that is not activated
    program = "harness-trainer" if shutil.which("harness-trainer") else beside_python
    print("Look further:")
    print(f"  {program} traces ls --run-dir {run_dir}")
    print(f"  {program} traces show ROLLOUT --run-dir {run_dir}")
    print(f"  {program} traces export --run-dir {run_dir} --out traces.jsonl")

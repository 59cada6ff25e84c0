"""`harness-trainer rollout`: agents on tasks, or a model in an environment (`--env`), without learning.

Owns the command's flags and the printed table; `collect` runs it, `traces export` writes what was captured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_trainer.cli.flags import add_flags, note, resolve
from harness_trainer.cli.traces import export_traces
from harness_trainer.config import CollectConfig
from harness_trainer.display import cell

if TYPE_CHECKING:
    from harness_trainer.rollouts.scores import Score

SUFFIX = {"atif": ".atif.jsonl", "jsonl": ".rows.jsonl", "parquet": ".parquet"}  # of what `--export` writes


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="harness-trainer rollout", usage="harness-trainer rollout [options]")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/rollout"), help="folder of the run; finished if it exists"
    )
    parser.add_argument("--config", type=Path, help="YAML file with any of the settings below")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--plain", action="store_true", help="plain progress lines, also on a terminal")
    parser.add_argument(
        "--export", choices=sorted(SUFFIX), help="write what was captured into the run folder, as `traces export` does"
    )
    add_flags(parser, CollectConfig, {})
    options = parser.parse_args(argv)
    config = config_of(options)
    if options.dry_run:
        import yaml

        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
        return 0

    from harness_trainer.collect import collect
    from harness_trainer.display import Display

    with Display(plain=True if options.plain else None) as display:
        found = collect(config, options.run_dir, display)
    print_scores(found, config.samples)
    print(f"\nRun folder: {options.run_dir} (scores.json, artifacts/)")
    if options.export is not None:
        _export(options.run_dir, options.export)
    return 0


def config_of(options: argparse.Namespace, say: Callable[[str], None] = note) -> CollectConfig:
    """The config in force. A file may be one that `train` reads too: what only training needs is passed over."""
    passed_over: list[str] = []

    def trim(file: dict[str, Any]) -> None:
        passed_over.extend(name for name in ("learner", "keep_weights") if file.pop(name, None) is not None)
        rollouts = file.get("rollouts")
        if isinstance(rollouts, dict) and rollouts.pop("evaluation", None) is not None:
            passed_over.append("rollouts.evaluation")

    config = resolve(CollectConfig, options, {}, options.config, trim=trim, say=say)
    passed_over += config.left_out
    if passed_over:
        say(f"nothing is trained here: {', '.join(passed_over)} {'is' if len(passed_over) == 1 else 'are'} passed over")
    return config


def print_scores(found: Sequence[Score], k: int) -> None:
    """The table of all agents and tasks, on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Rollouts", title_justify="left")
    for title in ("agent", "task"):
        table.add_column(title, no_wrap=True)
    titles = ["pass@1", "95 %", *([f"pass@{k}"] if k > 1 else []), "reward", "95 %", "scored", "unscored", "outcomes"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for score in found:
        numbers = [cell(score.pass_at_1), _interval(score.pass_at_1_ci)]
        numbers += [cell(score.pass_at_k)] if k > 1 else []
        numbers += [cell(score.reward_mean), _interval(score.reward_ci), str(score.num_scored), str(score.num_unscored)]
        table.add_row(score.harness, score.task or f"{score.source} all tasks".strip(), *numbers, cell(score.outcomes))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=200)
    console.print(table)


def _interval(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"


def _export(run_dir: Path, form: str) -> None:
    from harness_trainer.rollouts.store import RolloutStore
    from harness_trainer.rundir import RunDir

    path = RunDir(run_dir).store
    store = RolloutStore(path)
    try:
        export_traces(store, path, form, run_dir / f"rollouts{SUFFIX[form]}")
    finally:
        store.close()

"""`harness-trainer doctor`: what this machine, or one run, has and lacks, each with the command that mends it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness_trainer.config import RunConfig
    from harness_trainer.doctor import Check

FAILED = 3  # something required is missing, as for `SetupError`


def run(argv: Sequence[str]) -> int:
    from harness_trainer.doctor import check_machine, check_run

    options, run_arguments = _parser().parse_known_args(argv)
    if options.before_run or options.what is not None:
        config, run_dir, engine_url = _of_run(options.what or "train", run_arguments, quiet=options.before_run)
        checks = check_run(config, run_dir, os.environ, engine_url=engine_url)
    else:
        if run_arguments:
            _parser().error(f"unrecognized arguments: {' '.join(run_arguments)} (for one run: doctor train ...)")
        checks = check_machine()
    failed = [check for check in checks if check.required and not check.ok]
    if options.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, indent=1))
    elif options.before_run:
        _tell(checks, failed)
    else:
        _show(checks)
    return FAILED if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harness-trainer doctor",
        description="Check this machine, or with `train` and its options whether that run can begin. "
        "Exit code 0: everything required is here; 3: something is not.",
    )
    parser.add_argument(
        "what", nargs="?", choices=["train", "rollout"], help="check for this command, with its options"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--before-run", action="store_true", help="say little unless something is wrong")
    return parser


def _of_run(command: str, argv: Sequence[str], *, quiet: bool) -> tuple[RunConfig, Path, str | None]:
    """The config that the command would have, its run folder, and an engine that serves already. Raises ConfigError.

    `quiet`: the command itself comes next, and has the notes on its settings.
    """
    from harness_trainer.cli.flags import add_flags, note, resolve
    from harness_trainer.cli.rollout import config_of
    from harness_trainer.config import CollectConfig, RunConfig

    model: type[RunConfig] | type[CollectConfig] = RunConfig if command == "train" else CollectConfig
    parser = argparse.ArgumentParser(prog=f"harness-trainer doctor {command}")
    parser.add_argument("--run-dir", type=Path, default=Path(f"runs/{command}"))
    parser.add_argument("--config", type=Path)
    for own in ("--dry-run", "--plain"):  # of the command, and nothing to a check
        parser.add_argument(own, action="store_true", help=argparse.SUPPRESS)
    if command == "rollout":
        parser.add_argument("--export", help=argparse.SUPPRESS)
    add_flags(parser, model, {})
    options = parser.parse_args(argv)
    say: Callable[[str], None] = (lambda text: None) if quiet else note
    if command == "rollout":
        wanted = config_of(options, say)
        return wanted.as_run(), options.run_dir, wanted.engine_url
    return resolve(RunConfig, options, {}, options.config, say=say), options.run_dir, None


def _show(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for title in ("", "what", "found", "what to do"):
        table.add_column(title)
    for check in checks:
        mark = "ok" if check.ok else ("MISSING" if check.required else "none")
        table.add_row(mark, *(_cell(text) for text in (check.name, check.found, "" if check.ok else check.fix)))
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def _tell(checks: Sequence[Check], failed: Sequence[Check]) -> None:
    for check in failed:
        print(f"harness-trainer: {check.name}: {check.found}; {check.fix}", file=sys.stderr)
    for check in checks:
        if not check.ok and not check.required:
            print(f"harness-trainer: note: {check.name}: {check.found}; {check.fix}", file=sys.stderr)
    if not failed:
        print(f"harness-trainer: {len(checks)} checks of this machine passed", file=sys.stderr)


def _cell(text: str) -> str:
    from rich.markup import escape

    return escape(text)

"""`harness-trainer audit`: does a run's own record account for everything that it did? Exit code 1 = it does not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness_trainer.audit import Audit

_STATES = {
    "live": "it runs: what is under way is no violation",
    "finished": "all that it was to do is done",
    "interrupted": "it was stopped or killed before its end; the command that started it continues it",
}


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="harness-trainer audit",
        description="Read a run folder and account for every attempt, group, step and trained token in it.",
        epilog="Exit code 0: everything is accounted for; 1: the rules named were broken.",
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run, also of one that goes on")
    parser.add_argument("--json", action="store_true", help="the whole account as JSON")
    parser.add_argument("--rules", action="store_true", help="also print what each rule asks")
    options = parser.parse_args(argv)
    from harness_trainer.audit import RULES, audit

    result = audit(options.run_dir)
    if options.json:
        print(json.dumps({"run_dir": str(options.run_dir), **asdict(result)}, indent=1))
    else:
        print_audit(result)
        for name, about in RULES.items() if options.rules else ():
            print(f"rule {name}: {about}")
    return 1 if result.violations else 0


def print_audit(result: Audit) -> None:
    from rich.console import Console
    from rich.table import Table

    from harness_trainer.display import cell

    print(f"the run is {result.state}: {_STATES[result.state]}")
    _print_counts("attempts", result.attempts)
    _print_counts("infra failures by stage", result.failed_stages)
    _print_counts("groups", result.groups)
    _print_counts("dropped groups", result.dropped)
    _print_counts("restarts", result.restarts)
    print(f"quarantined tasks: {', '.join(result.quarantined) or 'none'}; evaluations: {result.evaluations}")
    print(f"sessions left open by attempts without a score: {result.open_sessions}")
    print(f"turns captured: {result.num_turns}; tokens trained: {result.num_trained_tokens}")
    _print_sources(result)
    table = Table(box=None)
    for title in ("step", "policy", "groups", "rollouts", "trained", "stale"):
        table.add_column(title, justify="right")
    for step in result.steps:
        groups = " ".join(map(str, step.groups))
        values = (step.step, step.policy_version, groups, step.num_rollouts, step.trained_tokens, step.staleness_max)
        table.add_row(*map(cell, values))
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)
    for observation in result.observations:
        print(f"NOTE {observation}")
    for violation in result.violations:
        print(f"VIOLATION {violation.rule}: {violation.what}: {violation.detail}")
    print(f"{len(result.violations)} violations" if result.violations else "everything is accounted for")


def _print_sources(result: Audit) -> None:
    for source in result.sources:
        reward = "unknown" if source.reward is None else f"{source.reward:.3f}"
        share = "" if source.share is None else f", {source.share:.0%} of the trained groups"
        _print_counts(f"source {source.source}: attempts", source.attempts)
        _print_counts(f"source {source.source}: groups", source.groups)
        print(f"source {source.source}: {source.num_trained} rollouts trained, mean reward {reward}{share}")


def _print_counts(title: str, counts: Mapping[str, object]) -> None:
    print(f"{title}: {', '.join(f'{count} {name}' for name, count in counts.items()) or 'none'}")

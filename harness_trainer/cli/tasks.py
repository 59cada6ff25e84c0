"""`harness-trainer tasks ls|check`: what tasks there are, and whether they can be built, solved and scored."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from harness_trainer.cli.flags import add_flags, resolve
from harness_trainer.config import as_sandbox
from harness_trainer.errors import ConfigError, SetupError
from sandboxes import SandboxConfig
from sandboxes.local import LocalConfig

if TYPE_CHECKING:
    from harness_trainer.rewards.oracle import TaskReport
    from harness_trainer.tasks import Found

_SPEC_HELP = "task folder, folder of them, JSONL file, `examples`, or a dataset: hf:owner/name[@revision][/folder]"


class CheckConfig(BaseModel):
    """What of a run's config a check needs; the rest of a run's YAML file is passed over."""

    model_config = ConfigDict(extra="ignore")

    sandbox: SandboxConfig = Field(default_factory=LocalConfig, description="where tasks are built and solved")

    @field_validator("sandbox", mode="before")
    @classmethod
    def _sandbox_by_name(cls, value: Any) -> Any:
        return as_sandbox(value)


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="harness-trainer tasks")
    actions = parser.add_subparsers(dest="action", required=True)
    ls = actions.add_parser("ls", help="one line per task", description="List tasks; broken ones with their problem.")
    check = actions.add_parser(
        "check",
        help="build, solve and score every task",
        description="Build each task, run its reference solution (must score the top of its reward range) and an agent"
        " that does nothing (must not). Exit code 1 if a task fails.",
    )
    for action in (ls, check):
        action.add_argument("spec", metavar="SPEC", help=_SPEC_HELP)
        action.add_argument("--json", action="store_true", help="print JSON instead of a table")
    check.add_argument("--config", type=Path, help="YAML file of a run; its `sandbox` settings are used")
    check.add_argument("--network", metavar="MODE", help="none, proxy-only or public, for every task")
    check.add_argument(
        "--verify", default="auto", help="where tests run: auto, same or fresh", choices=("auto", "same", "fresh")
    )
    check.add_argument("--jobs", type=int, default=2, help="tasks at a time (default: 2)")
    check.add_argument("--logs", type=Path, help="folder for the logs (default: runs/tasks-check-<time>)")
    add_flags(check, CheckConfig, {})
    options = parser.parse_args(argv)

    from harness_trainer.tasks import find_tasks

    if options.action == "ls":
        return _ls(find_tasks(options.spec), as_json=options.json)
    if options.jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more, not {options.jobs}")
    config = _sandbox_config(options)
    return _check(find_tasks(options.spec), config, options)


# --- ls ----------------------------------------------------------------------------------------------------------


def _ls(entries: list[Found], *, as_json: bool) -> int:
    rows = [_row(found) for found in entries]
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        titles = ("task", "agent s", "tests s", "image", "network", "reward", "about")
        _print_table(titles, [[str(row[name]) for name in titles] for row in rows])
    return 1 if any(found.problem for found in entries) else 0


def _row(found: Found) -> dict[str, Any]:
    task = found.task
    if task is None:
        nothing = dict.fromkeys(("agent s", "tests s", "image", "network", "reward"), "-")
        return {"task": found.name, **nothing, "about": f"cannot be used: {found.problem}"}
    low, high = task.reward_range
    built = "Dockerfile" if task.box.build_dir is not None else "default"
    about = str(task.metadata.get("description") or task.instruction).splitlines()[0]
    return {
        "task": task.name,
        "agent s": round(task.agent_timeout_s),
        "tests s": round(task.verifier_timeout_s),
        "image": task.box.image or built,
        "network": task.box.network.mode.value,
        "reward": f"{low:g} to {high:g}",
        "about": about if len(about) <= 60 else about[:57] + "...",
    }


# --- check -------------------------------------------------------------------------------------------------------


def _sandbox_config(options: argparse.Namespace) -> SandboxConfig:
    config = resolve(CheckConfig, options, {}, options.config).sandbox
    if options.network is None:
        return config
    if "network" not in type(config).model_fields:
        raise ConfigError(f"--network: the {config.type} sandbox has no network setting; leave it out")
    try:
        return type(config).model_validate({**config.model_dump(), "network": options.network})
    except ValidationError as error:
        raise ConfigError(f"--network: {error.errors()[0]['msg']}, got {options.network!r}") from error


def _check(entries: list[Found], config: SandboxConfig, options: argparse.Namespace) -> int:
    from harness_trainer.display import Display

    logs: Path = options.logs or Path("runs") / time.strftime("tasks-check-%Y%m%d-%H%M%S")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--logs {logs}: {error.strerror}") from error
    with Display() as display:
        reports = asyncio.run(_check_all(entries, config, logs, options, display.phase))
    if options.json:
        print(json.dumps([report.as_json() for report in reports], indent=1))
    else:
        _print_reports(reports)
    failed = sum(not report.ok for report in reports)
    print(f"{len(reports) - failed} of {len(reports)} tasks are good; logs: {logs}", file=sys.stderr)
    return 1 if failed else 0


async def _check_all(
    entries: list[Found], config: SandboxConfig, logs: Path, options: argparse.Namespace, say: Callable[[str], None]
) -> list[TaskReport]:
    from harness_trainer.rewards.oracle import check_tasks
    from harness_trainer.rewards.verifier import VerifyMode
    from sandboxes import open_backend
    from sandboxes.base import Access, SandboxError
    from sandboxes.lifecycle import default_registry, reap

    def on_report(report: TaskReport) -> None:
        say(f"{report.name}: {'good' if report.ok else '; '.join(report.problems)} ({report.seconds:.1f} s)")

    # A polite end (a CI's SIGTERM) leaves no more behind than Ctrl-C does.
    me = asyncio.current_task()
    if me is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    registry = default_registry()
    for left in await asyncio.to_thread(reap, registry):
        say(f"cleaned up what a dead run left: {left.kind} {left.problem}")
    try:
        async with open_backend(config, run_id=logs.name, registry=registry, access=Access()) as backend:
            mode = VerifyMode(options.verify)
            return await check_tasks(entries, backend, logs, jobs=options.jobs, on_report=on_report, mode=mode)
    except SandboxError as error:
        raise SetupError(str(error)) from error
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _print_reports(reports: list[TaskReport]) -> None:
    from harness_trainer.display import cell

    titles = ("task", "valid", "built", "oracle reward", "empty reward", "seconds", "problem")
    rows = []
    for r in reports:
        marks = [{True: "yes", False: "no", None: "-"}[value] for value in (r.valid, r.built)]
        said = "; ".join(r.problems) or "; ".join(f"note: {note}" for note in r.notes)
        rows.append([r.name, *marks, cell(r.oracle), cell(r.empty), f"{r.seconds:.1f}", said])
    _print_table(titles, rows)


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for title in titles:
        table.add_column(title, no_wrap=title not in ("problem", "about"))
    for row in rows:
        table.add_row(*(text.replace("[", r"\[") for text in row))
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)

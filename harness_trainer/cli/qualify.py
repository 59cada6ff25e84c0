"""`harness-trainer qualify`: runs the real agents on scripted tasks and shows which can be trained, and why not."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, field_validator

from harness_trainer.cli.flags import add_flags, resolve
from harness_trainer.config import as_sandbox
from harness_trainer.errors import ConfigError
from sandboxes import SandboxConfig
from sandboxes.local import LocalConfig

if TYPE_CHECKING:
    from harness_trainer.qualify.bench import Setting
    from harness_trainer.qualify.check import Report

TIMEOUT_S = 180.0


class QualifyConfig(BaseModel):
    """What of a run's config a qualification needs; the rest of a run's YAML file is passed over."""

    model_config = ConfigDict(extra="ignore")

    sandbox: SandboxConfig = Field(default_factory=LocalConfig, description="where agents run")

    @field_validator("sandbox", mode="before")
    @classmethod
    def _sandbox_by_name(cls, value: object) -> object:
        return as_sandbox(value)


def run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.timeout <= 0:
        raise ConfigError(f"--timeout must be above 0, not {options.timeout:g}")
    if options.engine == "vllm" and options.scenario:
        raise ConfigError("--scenario is for the scripted engine: a real model does what it likes; leave one out")
    sandbox = resolve(QualifyConfig, options, {}, options.config).sandbox

    from harness_trainer.display import Display
    from harness_trainer.qualify.check import harness_names, scenarios_of

    names, scenarios_of_run = harness_names(options.harness), scenarios_of(options.scenario)
    logs: Path = options.logs or Path("runs") / time.strftime("qualify-%Y%m%d-%H%M%S")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--logs {logs}: {error.strerror}") from error

    async def qualify_all() -> list[Report]:
        from harness_trainer.cache import cache_dir
        from harness_trainer.qualify.check import qualify

        reports: list[Report] = []
        async with _setting(options, sandbox, logs, display.phase) as setting:
            for name in names:
                reports.append(await qualify(name, scenarios_of_run, setting, cache_dir(), display.phase))
                _keep(reports, options, sandbox.type, logs)  # what is known stays, whatever comes next
        return reports

    with Display() as display:
        reports = asyncio.run(_interruptible(qualify_all))
    _show(reports, options)
    bad = [report.harness for report in reports if not report.good]
    said = f"; not qualified: {', '.join(bad)}" if bad else ""
    print(f"{len(reports) - len(bad)} of {len(reports)} agents qualify{said}; logs: {logs}", file=sys.stderr)
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harness-trainer qualify",
        description="Run each real agent on scripted tasks through gateway, sandbox and adapter, and show what was "
        "captured. Exit code 1 if an agent fails something that it has the tools for, or passes nothing.",
    )
    add = parser.add_argument
    add("--harness", default="all", help="all, or names or YAML files with commas between them (default: all)")
    add("--engine", choices=("scripted", "vllm"), default="scripted", help="who plays the model (default: scripted)")
    add("--model", default="smollm2", help="for --engine vllm: smollm2, a Hugging Face id, or a model folder")
    add("--scenario", action="append", default=[], metavar="NAME", help="one scenario; may be given again")
    add("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="of an agent in one scenario (default: 180)")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--out", type=Path, metavar="FILE", help="write the page for the docs there, and its figures beside it as JSON")
    add("--logs", type=Path, help="folder for the agents' logs (default: runs/qualify-<time>)")
    add("--config", type=Path, help="YAML file of a run; its `sandbox` settings are used")
    add_flags(parser, QualifyConfig, {})
    return parser


async def _interruptible(work: Callable[[], object]) -> list[Report]:
    me = asyncio.current_task()
    if me is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    try:
        return await work()  # type: ignore[misc, no-any-return]
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@asynccontextmanager
async def _setting(
    options: argparse.Namespace, sandbox: SandboxConfig, logs: Path, say: Callable[[str], None]
) -> AsyncIterator[Setting]:
    from harness_trainer.qualify.bench import Setting
    from sandboxes.lifecycle import default_registry, reap

    registry = default_registry()
    for left in await asyncio.to_thread(reap, registry):
        say(f"cleaned up what a dead run left: {left.kind} {left.problem}")
    setting = Setting(sandbox, options.timeout, logs, registry, logs.name)
    if options.engine == "scripted":
        yield setting
        return
    from harness_trainer.qualify.real_engine import playing

    async with playing(setting, options.model, say) as real:
        yield real


def _keep(reports: Sequence[Report], options: argparse.Namespace, sandbox: str, logs: Path) -> None:
    text = json.dumps([report.as_json() for report in reports], indent=1)
    (logs / "qualify.json").write_text(text + "\n", encoding="utf-8")
    if options.out is None:
        return
    from importlib.metadata import version

    from harness_trainer.qualify.page import page

    engine = "scripted" if options.engine == "scripted" else f"vLLM, {options.model}"
    about = {
        "run on": time.strftime("%Y-%m-%d"),
        "harness-trainer": version("harness-trainer"),
        "engine": engine,
        "sandbox": sandbox,
    }
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page(reports, about), encoding="utf-8")
        options.out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {options.out}: {error.strerror}") from error


def _show(reports: Sequence[Report], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps([report.as_json() for report in reports], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    from harness_trainer.qualify.page import TITLES, summary

    table = Table(box=None)
    for title in TITLES:
        table.add_column(title, overflow="fold")
    for report in reports:
        table.add_row(*(summary(report)[title].replace("[", r"\[") for title in TITLES))
    Console(width=None if sys.stdout.isatty() else 240, highlight=False).print(table)

"""Qualifies harnesses one after the other. Owns which are meant by a name, and what a harness that cannot be had gets.

Called by `cli.qualify` and tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_trainer import harnesses
from harness_trainer.errors import ConfigError, HarnessTrainerError
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.qualify.bench import Setting, play
from harness_trainer.qualify.scenarios import FREE, SCENARIOS, Scenario
from harness_trainer.qualify.verdict import Line, Verdict, line_of
from sandboxes.base import SandboxError


@dataclass(frozen=True, slots=True)
class Report:
    """One harness. `problem` = why nothing was run; "" = it was."""

    harness: str
    version: str  # what is installed; "" = nothing has to be
    problem: str
    lines: list[Line]
    splits_rows: str = ""  # the adapter's word on why a conversation of it is more than one row; "" = it is one

    @property
    def good(self) -> bool:
        """It failed nothing, and passed something: an agent that has no tool for any scenario shows nothing."""
        verdicts = {line.verdict for line in self.lines}
        return not self.problem and Verdict.PASSED in verdicts and Verdict.FAILED not in verdicts

    def as_json(self) -> dict[str, Any]:
        lines = [line.as_json() for line in self.lines]
        return {
            "harness": self.harness,
            "version": self.version,
            "good": self.good,
            "problem": self.problem,
            "splits_rows": self.splits_rows,
            "scenarios": lines,
        }


def harness_names(wanted: str) -> list[str]:
    """`all` = one adapter per agent; names and files with commas between them; or one `cmd:...`.

    Raises ConfigError for one that does not exist.
    """
    is_command = wanted.startswith("cmd:")
    names = [wanted] if is_command else [name.strip() for name in wanted.split(",") if name.strip()]
    if names == ["all"]:
        return harnesses.one_per_agent()
    if not names:
        raise ConfigError("--harness names no agent: give `all`, or names with commas between them")
    for name in names:
        harnesses.load_harness(name)
    return names


def scenarios_of(wanted: Sequence[str]) -> list[Scenario]:
    """By name; none = all. Raises ConfigError for one that does not exist."""
    known = {scenario.name: scenario for scenario in SCENARIOS}
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--scenario {name}: known are {', '.join(known)}")
    return [known[name] for name in wanted] if wanted else list(SCENARIOS)


async def qualify(
    name: str, scenarios: Sequence[Scenario], setting: Setting, cache: Path, say: Callable[[str], None]
) -> Report:
    """Raises nothing of one agent's making: what cannot be read, installed or started is a report too."""
    try:
        harness = harnesses.load_harness(name)
    except ConfigError as error:
        return Report(name, "", str(error), [])
    try:
        programs = await asyncio.to_thread(ensure_installed, harness, cache, lambda text: say(f"{name}: {text}"))
    except HarnessTrainerError as error:
        return Report(harness.name, version_of(harness), str(error), [])
    lines = []
    for scenario in [FREE] if setting.engine is not None else scenarios:
        line = await _line(harness, programs, scenario, setting)
        say(f"{harness.name}: {scenario.name} {line.verdict}{f' -- {line.why}' if line.why else ''}")
        lines.append(line)
    return Report(harness.name, version_of(harness), "", lines, harness.splits_rows)


async def _line(harness: Harness, programs: Path, scenario: Scenario, setting: Setting) -> Line:
    try:
        return line_of(harness, scenario, await play(harness, programs, scenario, setting))
    except (HarnessTrainerError, SandboxError) as error:
        if scenario.sealed:  # not every machine and sandbox can watch an agent's ways out
            return Line(harness.name, scenario.name, Verdict.NOT_OFFERED, f"cannot be watched here: {error}")
        return Line(harness.name, scenario.name, Verdict.FAILED, str(error))


def version_of(harness: Harness) -> str:
    return " ".join(harness.install.packages) if harness.install is not None else ""

"""What a person watches: phases while things start, a live line while agents work, a table of steps.

Owns looks only. On a terminal it repaints one status line below the log; elsewhere it prints plain lines, each once.
Logs and progress go to stderr, results (the final table) to stdout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

PLAIN_EVERY_S = 20.0  # without a terminal, how often an unchanged status is worth a line


class Display:
    """Progress of one run. `phase` and `step` print a line; `status` repaints one (or prints it now and then)."""

    def __init__(self, *, plain: bool | None = None) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._plain = not self._console.is_terminal if plain is None else plain
        self._live: Live | None = None
        self._started = time.monotonic()
        self._last_status = ""
        self._last_status_at = 0.0

    def __enter__(self) -> Display:
        if not self._plain:
            self._live = Live(Text(""), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        # Plain lines are for files and pipes: one event, one line, however long.
        self._console.print(f"{self._clock()} {text}", markup=False, soft_wrap=self._plain)

    def status(self, text: str) -> None:
        """The current state in one line. Cheap enough to call several times a second."""
        if self._live is not None:
            self._live.update(Text(f"{self._clock()} {text}", overflow="ellipsis", no_wrap=True))
            return
        now = time.monotonic()
        if text != self._last_status and now - self._last_status_at >= PLAIN_EVERY_S:
            self._last_status, self._last_status_at = text, now
            self._console.print(f"{self._clock()} {text}", markup=False, soft_wrap=True)

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes:02d}:{seconds:02d}"


COLUMNS: Sequence[tuple[str, str]] = (
    ("step", "step"),
    ("policy", "policy_version"),
    ("reward", "reward_mean"),
    ("± sd", "reward_std"),
    ("rollouts", "outcomes"),
    ("turns", "num_turns"),
    ("rows/rollout", "rows_per_rollout"),
    ("trained", "trained_tokens"),
    ("forwarded", "forwarded_tokens"),
    ("ratio", "ratio_mean"),
    ("KL", "kl"),
    ("stale", "staleness_mean"),
    ("sync s", "sync_s"),
    ("step s", "step_s"),
)


def cell(value: Any) -> str:
    """A value for people; None is a dash, never a zero."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return " ".join(f"{count} {name}" for name, count in value.items()) or "-"
    if isinstance(value, float):
        return f"{value:.1e}" if value and abs(value) < 1e-3 else f"{value:.3f}"
    return str(value)


def step_line(report: dict[str, Any]) -> str:
    """One step in one line of text."""
    line = ", ".join(f"{title} {cell(report.get(key))}" for title, key in COLUMNS)
    return f"{line} · {_by_agent(report)}" if len(_agents(report)) > 1 else line


def _agents(report: dict[str, Any]) -> set[str]:
    return set(report.get("harnesses") or {})


def _by_agent(report: dict[str, Any]) -> str:
    """What each agent of a step came to. Example: "opencode 0.500 (8), pi 0.250 (4)"."""
    harnesses = report.get("harnesses") or {}
    return ", ".join(f"{name} {cell(of['reward_mean'])} ({of['num_rollouts']})" for name, of in harnesses.items())


def print_step_table(reports: Sequence[dict[str, Any]]) -> None:
    """The table of all steps, on stdout."""
    table = Table(title="Training steps", title_justify="left")
    for title, _ in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    mixed = len({agent for report in reports for agent in _agents(report)}) > 1
    if mixed:
        table.add_column("reward by agent (rollouts)", justify="left", no_wrap=True)
    for report in reports:
        table.add_row(*(cell(report.get(key)) for _, key in COLUMNS), *([_by_agent(report)] if mixed else []))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=280 if mixed else 200)
    console.print(table)

"""What a run has come to so far, for the person and the programs that watch it: steps, the runner's notes, a status.

Owns reading that from the run folder and telling each thing once. How it looks is `display`'s. Called by `run` and
`collect` several times a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness_trainer.display import Display, step_line
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rundir import RunDir

NOTES_SHOWN = "notes_shown"  # run-state key: the newest note of the runner's that a person has seen


class Progress:
    """Of one run, as one supervisor shows it."""

    def __init__(self, run: RunDir, display: Display) -> None:
        self.reports: list[dict[str, Any]] = []  # of every step, as of the last look
        self._run = run
        self._display = display
        self._metrics_size = 0  # bytes of metrics.jsonl at the last look

    def show_notes(self, store: RolloutStore) -> None:
        """What the runner has to say, each once, also over restarts."""
        for note in store.notes(after=int(store.state(NOTES_SHOWN) or 0)):
            self._display.phase(note.detail["line"])
            self._run.event(note.kind, **{key: value for key, value in note.detail.items() if key != "line"})
            store.set_state(NOTES_SHOWN, str(note.seq))

    def show_new_steps(self) -> None:
        """A step that is taken again, after the learner was started again, is shown again."""
        size = self._run.metrics.stat().st_size if self._run.metrics.exists() else 0
        if size == self._metrics_size:  # asked several times a second, over a file that grows with every step
            return
        self._metrics_size = size
        known, self.reports = self.reports, read_metrics(self._run.metrics)
        for report in self.reports[len(known) :]:
            self._display.phase(step_line(report))
            self._run.event("step", step=report["step"], policy_version=report["policy_version"])

    def show_status(self, store: RolloutStore) -> None:
        outcomes = " ".join(f"{count} {name}" for name, count in sorted(store.outcome_counts().items()))
        groups = " ".join(f"{count} {name}" for name, count in sorted(store.group_counts().items()))
        head = f"step {len(self.reports)} · policy v{store.policy_version()}"
        self._display.status(f"{head} · rollouts: {outcomes or 'none yet'} · groups: {groups or 'none yet'}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a run so far; a line that is still being written is left for the next look."""
    if not path.exists():
        return []
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines()]

"""What a person should know of a run's rollouts when it is over: evaluations, quarantine, what was not trained.

Owns the words; reads the store. The command line prints them below the table of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness_trainer.rollouts.policy_records import Note
from harness_trainer.rollouts.store import RolloutStore


def summary_lines(store: RolloutStore) -> list[str]:
    """Example: ["evaluation after step 0: pass@1 0.250 ...", "12 groups were dropped and replaced: no_spread 12"]."""
    lines = [note.detail["line"] for note in _current(store.notes(after=0), store.evaluations())]
    for task, reason in store.quarantined().items():
        lines.append(f"task {task} is quarantined, because nothing could be set up for it: {reason}")
    dropped = store.drop_counts()
    if dropped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
        lines.append(f"{sum(dropped.values())} groups were dropped and replaced: {reasons}")
    outcomes = store.outcome_counts()
    lines.append("rollouts: " + (", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())) or "none"))
    return lines


def _current(notes: list[Note], evaluations: Sequence[Mapping[str, Any]]) -> list[Note]:
    """The notes of evaluations that still stand: steps taken again were evaluated again."""
    standing = {(report["step"], report["policy_version"]) for report in evaluations}
    of_evaluations = (note for note in notes if note.kind == "evaluation")
    return [note for note in of_evaluations if (note.detail["step"], note.detail["policy_version"]) in standing]

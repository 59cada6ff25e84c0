"""What is odd about a run's record and breaks no rule: the audit tells it, and finds the run in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from made_run import MadeRun

from harness_trainer.audit import audit
from harness_trainer.cli import main


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run").make()


@pytest.mark.parametrize(
    ("told", "spoil"),
    [
        (
            "attempt g4-1-a: it ended .* before it began",
            "UPDATE rollouts SET finished_at = started_at - 1 WHERE rollout_id = 'g4-1-a'",
        ),
        (
            "attempt g3-1-a: it began .* before its group 3 was opened",
            "UPDATE rollout_groups SET created_at = created_at + 60 WHERE group_id = 3",
        ),
        (
            "attempt g0-0-b: it began .* before the try before it, g0-0-a, had ended",
            "UPDATE rollouts SET finished_at = finished_at + 60 WHERE rollout_id = 'g0-0-a'",
        ),
        (
            "attempt g0-0-b: it began .* before the try before it, g0-0-a, had ended",
            "UPDATE rollouts SET started_at = started_at + 60, finished_at = finished_at + 60"
            " WHERE rollout_id = 'g0-0-a'",
        ),
    ],
)
def test_a_clock_that_was_set_back_is_told_and_breaks_no_rule(made: MadeRun, told: str, spoil: str) -> None:
    made.sql(spoil)
    result = audit(made.run.path)
    assert result.violations == []
    assert any(re.match(told, line) for line in result.observations), result.observations


def test_a_line_of_events_that_a_full_disk_cut_is_told_and_the_rest_is_read(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with made.run.events.open("a") as file:
        file.write('{"time": 1.0, "kind": "st')
    made.run.event("started", part="learner", pid=2)
    with made.run.events.open("a") as file:
        file.write('[1]\n{"time": 2.0, "ki')  # the last one may still be written
    result = audit(made.run.path)
    assert (result.restarts, result.violations) == ({"engine": 0, "learner": 2}, [])
    assert [line for line in result.observations if line.startswith("events.jsonl: 2 lines are no events")]
    assert main(["audit", str(made.run.path)]) == 0
    assert "NOTE events.jsonl: 2 lines" in capsys.readouterr().out

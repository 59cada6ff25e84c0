"""A learner that is killed while the engine works on its update: nothing is sampled under a name that is not its own.

The engine kills it, so the moment is the middle of each call. What outlives it is an engine that is frozen, may hold
the new weights, and still calls them by the old name.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from stub_engine import serving
from test_killed_learner import Learner, RecordingEngine, check
from test_killed_learner import forks as forks

CALLS = ("pause", "start_weight_update", "update_weights", "finish_weight_update", "resume")


@dataclass
class KillingEngine(RecordingEngine):
    """Kills whoever makes call `kill_at` the second time: the update after the first step."""

    kill_at: str = ""
    parent: int = 0  # of the learner
    num_made: int = 0
    wrong: list[str] = field(default_factory=list)  # names under which other weights could be sampled with

    def _behave(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        answer = super()._behave(path, body)
        if path == "resume" and self.published.get(self.version, {self.digest()}) != {self.digest()}:
            self.wrong.append(self.version)
        if path == self.kill_at:
            self.num_made += 1
            if self.num_made == 2:
                (child,) = Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text().split()
                os.kill(int(child), signal.SIGKILL)
        return answer


@pytest.mark.parametrize("kill_at", CALLS)
def test_killed_in_the_middle_of_an_update(tmp_path: Path, tiny_model: Path, forks: Any, kill_at: str) -> None:
    with serving(KillingEngine(kill_at=kill_at, parent=forks.pid)) as engine:
        learner = Learner(tmp_path / "run", tiny_model, engine, forks)
        try:
            code, _ = learner.run()
            assert (code, engine.num_made) == (-9, 2)
            code, _ = learner.run()
            assert code == 0
            check(learner, engine, f"killed in {kill_at}")
            assert engine.wrong == []
            assert list((tmp_path / "run" / "transfer").iterdir()) == []
        finally:
            learner.store.close()

"""Gathers what a step's metrics are made of: from the run's store, the calls that were recorded, the weight update.

Owns the reading, and the time window over which the engine's idleness is judged; `metrics` does the arithmetic. The
learner process makes one `Meter` for a run; `train` calls it once per step, after the weight update.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from capture_proxy.call_times import CallTime, call_times, last_seq
from harness_trainer.learner.metrics import StepFacts, busy_seconds, step_metrics
from harness_trainer.learner.step_batch import StepBatch
from harness_trainer.rollouts.store import RolloutStore

if TYPE_CHECKING:
    from harness_trainer.learner.train import StepReport

log = logging.getLogger(__name__)


class EngineWatch:
    """How much of a step's time the engine had no call to answer.

    A call is on record only when it is over, so a window is judged one step late: by then the calls that its end cut
    have ended too, or are longer than a step.
    """

    def __init__(self, store: Path, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._calls: list[CallTime] = []
        self._seq = last_seq(store)  # a continued run's earlier calls are of no window
        self._window: tuple[float, float] | None = None  # of the step before

    def idle_share(self, step_s: float) -> float | None:
        """Of the step before the one that is over now and took `step_s`; None = there was none, or nothing is known."""
        try:
            found = call_times(self._store, self._seq)
        except sqlite3.Error as error:  # a number for a chart is no reason to end a run
            log.warning("the engine's idle time is not known for this step: %s", error)
            return None
        if found is None:
            return None
        self._calls += found
        self._seq = found[-1].seq if found else self._seq
        judged, now = self._window, self._clock()
        self._window = (now - step_s if judged is None else judged[1], now)
        if judged is None or judged[1] <= judged[0]:
            return None
        busy_s = busy_seconds(((call.started_at, call.finished_at) for call in self._calls), *judged)
        self._calls = [call for call in self._calls if call.finished_at > judged[1]]
        return 1.0 - busy_s / (judged[1] - judged[0])


class Meter:
    """`phases_s` gives the seconds of the phases of the latest weight update, by name."""

    def __init__(
        self,
        store: RolloutStore,
        engine: EngineWatch,
        *,
        max_staleness: int,
        phases_s: Callable[[], Mapping[str, float]],
    ) -> None:
        self._store = store
        self._engine = engine
        self._max_staleness = max_staleness
        self._phases_s = phases_s

    def __call__(self, report: StepReport, batch: StepBatch) -> dict[str, float]:
        """The metrics of a step that is over, as in `metrics.step_metrics`."""
        store = self._store
        facts = StepFacts(
            batch=batch,
            max_staleness=self._max_staleness,
            forwarded_tokens=report.forwarded_tokens,
            step_s=report.step_s,
            outcomes=store.outcome_counts(report.step),
            num_running=store.outcome_counts().get("running", 0),
            group_counts=store.group_counts(),
            ready_at=store.ready_times(report.step),
            sync_phases_s=dict(self._phases_s()),
            engine_idle=None if report.step_s is None else self._engine.idle_share(report.step_s),
            evaluation=next((e for e in store.evaluations() if e["step"] == report.step - 1), None),
        )
        return step_metrics(facts)

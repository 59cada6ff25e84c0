"""Groups for the learner out of the run's store. Owns the adapter between `rollouts.store` and `GroupSource`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.rows import rows_from_trace
from harness_trainer.rollouts.lineage import Lineage
from harness_trainer.rollouts.store import RolloutStore

POLL_S = 0.1


class StoreGroupSource:
    """Implements `GroupSource` over the store that the rollout runner fills.

    `starved_after_s` bounds how long the learner may wait while no rollout starts or ends; `alive` says whether groups
    can still come (None = yes, else one line that says what died). While an evaluation is due or under way, every
    `evaluate_every` steps (None = never), no group is handed out: a step would change the policy that is evaluated.
    That holds while the engine is away, too: a learner that waits sends the same weights to the next one.
    `engine_number` says which engine has the policies that `policy_changed` tells of (None = there is only one; of
    several replicas, by replica, those that were sent it).
    """

    def __init__(
        self,
        path: Path,
        *,
        alive: Callable[[], str | None],
        starved_after_s: float,
        evaluate_every: int | None = None,
        engine_number: Callable[[], int | Mapping[int, int] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = RolloutStore(path)
        self._alive = alive
        self._starved_after_s = starved_after_s
        self._evaluate_every = evaluate_every
        self._engine_number = engine_number
        self._clock = clock
        self._handed_out: set[int] = set()
        self._last_progress = clock()
        self._last_counts: dict[str, int] = {}

    def start(self) -> None:
        self._progress()

    def stop(self) -> None:
        self._store.close()

    def next_group(self, timeout_s: float) -> TrainGroup | None:
        give_up = time.monotonic() + timeout_s
        while True:
            group = None if self._is_evaluated() else self._store.take_ready(self._handed_out)
            if group is not None:
                self._handed_out.add(group.group_id)
                self._progress()
                rows = [rows_from_trace(r.trace).rows if r.trace else [] for r in group.results]
                return TrainGroup(group.group_id, group.task, group.results, rows)
            if time.monotonic() >= give_up:
                return None
            time.sleep(POLL_S)

    def _is_evaluated(self) -> bool:
        every = self._evaluate_every
        return every is not None and self._store.due_evaluation(every, may_be_away=True) is not None

    def on_trained(self, group_ids: Sequence[int], step: int) -> None:
        self._store.mark_trained(list(group_ids), step)
        self._progress()  # a step may have taken longer than the bound, with the runner rightly idle all the while

    def on_dropped(self, group_id: int, reason: str) -> None:
        self._store.mark_dropped(group_id, reason)

    def policy_changed(self, version: int) -> None:
        self._store.publish(version, engine=self._engine_number())

    def lineage(self) -> Lineage:
        return self._store.lineage()

    def position(self) -> tuple[int, dict[str, int]]:
        return self._store.next_group_id(), self._store.group_counts()

    def check_health(self) -> None:
        """Raises TrainingFailed when the runner has failed, or nothing has started or ended for too long."""
        dead = self._alive()
        if dead is not None:
            raise TrainingFailed(dead)
        counts = self._store.outcome_counts()
        if counts != self._last_counts or self._is_engine_away():
            self._last_counts = counts
            self._progress()
        waited = self._clock() - self._last_progress
        if waited > self._starved_after_s:
            raise TrainingFailed(
                f"no rollout started or finished for {waited:.0f} s: see logs/runner.log and logs/gateway.log"
            )

    def _is_engine_away(self) -> bool:
        """While it is started again nothing can start; whoever starts it bounds that."""
        return self._engine_number() is not None and self._store.versions().engine == 0

    def _progress(self) -> None:
        self._last_progress = self._clock()

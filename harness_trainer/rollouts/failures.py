"""What is done about failures of the machinery: how long to wait before a retry, and when the whole run must stop.

Owns three small rules and their state in memory: after a restart, by a person who mended something, all begin anew.
Used by `slots`.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from capture_proxy.types import GATEWAY_RESTARTED
from harness_trainer.errors import TrainingFailed
from harness_trainer.rollouts.types import NODE, Outcome, RolloutResult

_NAMED_REASONS = 3
_REASON_CHARS = 200
OUTAGE_S = 300.0  # a run outlives so much of an outage of what its reward function asks, a judge say


class Backoff:
    """Waits that double from `first_s` up to `most_s`, each shortened by a random part.

    Without that part the rollouts that one fault failed together would all come back together.
    """

    def __init__(self, first_s: float, most_s: float, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng or random.Random()

    def wait_s(self, attempt: int) -> float:
        """Seconds after the failure of try `attempt` (from 0): between half of the doubled wait and all of it."""
        longest = min(self._most_s, self._first_s * 2.0 ** min(attempt, 60))
        return longest * self._rng.uniform(0.5, 1.0)


class Breaker:
    """Raises TrainingFailed once `share` of the last `window` tries of a source, in all groups, were infra failures.

    One for each source: a dead server's tries fail at once, and would fill a window that all share in no time.
    `source`: its name; "" = the run has one, which needs none.
    """

    def __init__(self, window: int, share: float, source: str = "") -> None:
        self._share = share
        self._whose = f" of source {source}" if source else ""
        self._failures: deque[str | None] = deque(maxlen=window)  # reason of each try; None = it was none

    def note(self, result: RolloutResult) -> None:
        infra = result.outcome is Outcome.INFRA_FAILED
        if infra and (GATEWAY_RESTARTED in result.detail or result.failed_stage == NODE):
            return  # it fails all rollouts of a moment at once; how often it may happen is others' to judge
        self._failures.append(f"{result.failed_stage}: {result.detail}".removeprefix(": ") if infra else None)
        reasons = [reason for reason in self._failures if reason is not None]
        window = self._failures.maxlen or 0
        if infra and len(self._failures) == window and len(reasons) >= self._share * window:
            raise TrainingFailed(
                f"{len(reasons)} of the last {window} rollouts{self._whose} failed for infra reasons:"
                f" {_most_frequent(reasons)}."
                " Mend that (logs/runner.log, logs/gateway.log, artifacts/) and run the same command again."
                " rollouts.infra_window and rollouts.infra_share say how much is borne"
            )


class ScoringBreaker:
    """Raises TrainingFailed once at least `window` calls in a row of a source's reward function failed, over OUTAGE_S.

    A call scores one rollout, or a whole group whose rewards compare siblings: it counts once, whatever it leaves
    unscored. One that works ends the row, so a function that fails on some rollouts only is left to the groups that
    are dropped for it. Number and time are both asked for: many calls under way meet the same short outage, and few
    slow ones are bad luck. From the second in a row on nothing of the source begins for a while after one (`slots`),
    longer each time.
    """

    def __init__(self, window: int, source: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._whose = f" of source {source}" if source else ""
        self._clock = clock
        self._reasons: deque[str] = deque(maxlen=window)  # of the newest failures in a row
        self._num_failed = 0  # in a row
        self._since = 0.0  # when the first of them was noted
        self.num_rests = 0  # that were taken in this row

    def note(self, scored: Sequence[RolloutResult]) -> bool:
        """What one call was to score, afterwards; gives whether it failed, as did the one before."""
        failures = [result.scoring_failure for result in scored]
        if not all(failures):
            self._reasons.clear()
            self._num_failed = self.num_rests = 0
            return False
        if not self._num_failed:
            self._since = self._clock()
        self._num_failed += 1
        self._reasons.append(failures[0])
        lasts_s = self._clock() - self._since
        if self._num_failed >= self._window and lasts_s >= OUTAGE_S:
            raise TrainingFailed(
                f"the reward function{self._whose} failed {self._num_failed} times in a row,"
                f" for {lasts_s / 60:.0f} min: {_most_frequent(self._reasons)}."
                " Mend it, or what it asks, and run the same command again."
                " rollouts.infra_window says how many failures in a row are borne"
            )
        return self._num_failed > 1


def _most_frequent(reasons: Iterable[str]) -> str:
    """Example: "9 x agent: model side: no route; 2 x create: create took more than 300 s". Numbers may differ."""
    examples: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    for reason in reasons:
        kind = re.sub(r"[0-9a-f]{6,}|\d+", "#", reason)
        examples.setdefault(kind, " ".join(reason.split())[:_REASON_CHARS])
        kinds[kind] += 1
    return "; ".join(f"{count} x {examples[kind]}" for kind, count in kinds.most_common(_NAMED_REASONS))

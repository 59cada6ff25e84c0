"""What is done about failures of the machinery: how long to wait before a retry, and when the whole run must stop.

Owns two small rules and their state in memory: after a restart, by a person who mended something, both begin anew. Used
by `slots`.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque

from capture_proxy.types import GATEWAY_RESTARTED
from harness_trainer.errors import TrainingFailed
from harness_trainer.rollouts.types import NODE, Outcome, RolloutResult

_NAMED_REASONS = 3
_REASON_CHARS = 200


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
    """Raises TrainingFailed once `share` of the last `window` tries of a source, in all groups, were of no use.

    That is, infra failures, or rollouts that their reward function failed on (`RolloutResult.scoring_failure`).

    One for each source: a dead server's tries fail at once, and would fill a window that all share in no time.
    `source`: its name; "" = the run has one, which needs none.
    """

    def __init__(self, window: int, share: float, source: str = "") -> None:
        self._share = share
        self._whose = f" of source {source}" if source else ""
        self._failures: deque[str | None] = deque(maxlen=window)  # reason of each try; None = of use

    def note(self, result: RolloutResult) -> None:
        infra = result.outcome is Outcome.INFRA_FAILED
        if infra and (GATEWAY_RESTARTED in result.detail or result.failed_stage == NODE):
            return  # it fails all rollouts of a moment at once; how often it may happen is others' to judge
        self._add(f"{result.failed_stage}: {result.detail}".removeprefix(": ") if infra else result.scoring_failure)

    def note_unscored(self, result: RolloutResult) -> None:
        """What was noted as of use, and then could not be scored with its siblings."""
        if result.scoring_failure and None in self._failures:
            self._failures.remove(None)
            self._add(result.scoring_failure)

    def _add(self, failure: str) -> None:
        self._failures.append(failure or None)
        reasons = [reason for reason in self._failures if reason is not None]
        window = self._failures.maxlen or 0
        if failure and len(self._failures) == window and len(reasons) >= self._share * window:
            raise TrainingFailed(
                f"{len(reasons)} of the last {window} rollouts{self._whose} failed for infra reasons,"
                f" or their reward function did: {_most_frequent(reasons)}."
                " Mend that (logs/runner.log, logs/gateway.log, artifacts/) and run the same command again."
                " rollouts.infra_window and rollouts.infra_share say how much is borne"
            )


def _most_frequent(reasons: list[str]) -> str:
    """Example: "9 x agent: model side: no route; 2 x create: create took more than 300 s". Numbers may differ."""
    examples: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    for reason in reasons:
        kind = re.sub(r"[0-9a-f]{6,}|\d+", "#", reason)
        examples.setdefault(kind, " ".join(reason.split())[:_REASON_CHARS])
        kinds[kind] += 1
    return "; ".join(f"{count} x {examples[kind]}" for kind, count in kinds.most_common(_NAMED_REASONS))

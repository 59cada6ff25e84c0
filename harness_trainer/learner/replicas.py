"""The engine's replicas as the learner sees them: who is there, who has the newest weights, who has come back without.

Owns that account, and doing something to several engines at a time. A version counts as published when every replica
that is alive has it. One that dies under an update, or between two, is left to the supervisor while the others go on;
once its successor serves it gets the same weights by the same name, alone, when the learner waits for groups or at its
next update. What is done to an engine is `replicated`'s. Only a run with `engine.replicas` above 1 has one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from harness_trainer.errors import HarnessTrainerError, TrainingFailed
from harness_trainer.learner.engine_calls import EngineGone
from harness_trainer.learner.engine_presence import EnginePresence

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_TOGETHER_S = 1.0  # within which the supervisor announces all that it has started


class AllAway(EngineGone):
    """No replica serves, and the supervisor has seen it: the next one is worth waiting for."""


class Replicas:
    """Implements `engine_presence.Presence` over the presence of each replica; `away_s` bounds the wait for any."""

    def __init__(self, members: Sequence[EnginePresence], *, away_s: float) -> None:
        self.while_waiting: Callable[[], None] = lambda: None
        self._members = list(members)
        self._away_s = away_s
        self._urls: dict[int, str] = {}  # of each replica that was ever there; it keeps its address
        self._holds: dict[int, tuple[int, int]] = {}  # replica -> version that it was sent last, number of the engine
        self._newest = 0  # version that any was sent last

    @property
    def numbers(self) -> Mapping[int, int]:
        return {replica: number for replica, (version, number) in self._holds.items() if version == self._newest}

    @property
    def is_lost(self) -> bool:
        """Whether a replica that died serves again, without weights. One that is still away holds up nobody."""
        return any(member.is_back or self._lacks_newest(replica) for replica, member in enumerate(self._members))

    def _lacks_newest(self, replica: int) -> bool:
        """Of one that came back while another was sent weights: it was reached by then, and no longer `is_back`."""
        member = self._members[replica]
        return self._newest > 0 and not member.is_lost and self._holds.get(replica) != (self._newest, member.number)

    def url(self, replica: int) -> str:
        return self._urls[replica]

    def number(self, replica: int) -> int:
        """Of its engine that was reached last."""
        return self._members[replica].number

    def present(self) -> list[int]:
        """The replicas whose engine serves as far as is known, those that have come back included."""
        for replica, member in enumerate(self._members):
            if member.is_back:
                try:
                    self._urls[replica] = member.reach(0.0)
                except TrainingFailed as error:  # it died again a moment ago
                    logger.warning("replica %d of the engine is away again: %s", replica, error)
        return [replica for replica, member in enumerate(self._members) if not member.is_lost]

    def reach(self, limit_s: float | None = None) -> str:
        """Wait for one that serves, and a moment for the others; an address. Raises TrainingFailed after `limit_s`."""
        there = self._any(limit_s)
        until = time.monotonic() + _TOGETHER_S
        while len(there) < len(self._members) and time.monotonic() < until:
            time.sleep(_POLL_S)
            there = self.present()
        return self._urls[there[0]] if there else self.reach(limit_s)

    def _any(self, limit_s: float | None) -> list[int]:
        began = time.monotonic()
        while not (there := self.present()):
            self._members[0].require_supervisor()
            if limit_s is not None and time.monotonic() - began > limit_s:
                raise TrainingFailed(f"no replica of the engine came back within {limit_s:.0f} s: see logs/engine*.log")
            self.while_waiting()
            time.sleep(_POLL_S)
        return there

    def lacking(self, version: int) -> list[int]:
        """Whom to send `version`. Raises AllAway when there is no engine at all."""
        there = self.present()
        if not there:
            raise AllAway("no replica of the engine serves: all are being started again")
        return [replica for replica in there if self._holds.get(replica) != (version, self._members[replica].number)]

    def each(self, replicas: Sequence[int], work: Callable[[int], None]) -> list[int]:
        """Do `work` to all of them at the same time; those for which it was done.

        One whose engine has died meanwhile is left out. Raises what the first of the others raises, and AllAway when
        no engine is left, of those that had no need of `work` neither.
        """
        errors: dict[int, BaseException | None] = {}

        def target(replica: int) -> None:
            try:
                work(replica)
                errors[replica] = None
            except BaseException as error:
                errors[replica] = error

        # Daemons: a learner that is told to end must not wait for an engine.
        threads = [threading.Thread(target=target, args=(one,), daemon=True) for one in replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for replica in replicas:
            error = errors[replica]
            if error is not None and not self._is_death(replica, error):
                raise error
        done = [replica for replica in replicas if errors[replica] is None]
        others = [member for replica, member in enumerate(self._members) if replica not in replicas]
        if replicas and not done and all(member.is_lost for member in others):
            raise AllAway("every replica of the engine died while it was sent weights")
        return done

    def has(self, version: int, replicas: Sequence[int]) -> None:
        """They were sent it, and sample with it."""
        self._newest = version
        self._holds |= {replica: (version, self._members[replica].number) for replica in replicas}

    def send(self, send: Callable[[], None], reach: Callable[[], None]) -> None:
        """See `Sending`: `send` is called again only when every engine has died under it."""
        while True:
            self._any(self._away_s)
            try:
                reach()
                send()
                return
            except AllAway as error:
                logger.warning("waiting for the engine: %s", error)

    def is_gone(self, error: BaseException) -> bool:
        """Whether an error of the learner's means no more than that the engines have died."""
        return isinstance(error, EngineGone) or all(member.is_gone(error) for member in self._members)

    def require(self) -> None:
        """Raises EngineGone when no engine is left that has weights: a learner in several processes goes back then."""
        if all(member.is_lost for member in self._members):
            raise EngineGone("all replicas of the engine were started again: the learner goes on from its checkpoint")

    def _is_death(self, replica: int, error: BaseException) -> bool:
        member = self._members[replica]
        if not isinstance(error, HarnessTrainerError) or not member.is_gone(error) or not member.is_noticed():
            return False
        logger.warning("replica %d of the engine died while weights were sent to it: %s", replica, error)
        return True

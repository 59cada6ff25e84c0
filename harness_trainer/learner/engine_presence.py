"""Which engine of the run the learner's weights went to, and what to do when that one has died.

An engine that the supervisor has started again is another one: it has base weights and another number in the store
(`forget_engine`), at the same address. Owns noticing that, while weights are sent and while groups are waited for, and
waiting for the next engine. The trainer sends; the learner process makes the one `EnginePresence` that there is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from harness_trainer.errors import HarnessTrainerError, TrainingFailed
from harness_trainer.learner.engine_calls import EngineGone, answers
from harness_trainer.rollouts.store import RolloutStore

logger = logging.getLogger(__name__)

NOTICED_S = 60.0  # from an engine's death until the supervisor has seen it, at most
_POLL_S = 0.1


class Sending(Protocol):
    """What the trainer sends its weights through."""

    @property
    def is_lost(self) -> bool:
        """Whether the engine that has the newest weights has died."""
        ...

    def send(self, send: Callable[[], None], reach: Callable[[], None]) -> None:
        """Call `send`; where the engine dies under it, `reach` the next one and call it again."""
        ...


class Presence(Sending, Protocol):
    """What the learner knows of the run's engine, or of its replicas (`replicas`)."""

    while_waiting: Callable[[], None]

    @property
    def numbers(self) -> Mapping[int, int]:
        """By replica, the number of the engine that was sent the newest weights."""
        ...

    def is_gone(self, error: BaseException) -> bool: ...

    def require(self) -> None: ...


class OneEngine:
    """For a learner whose engine is nobody's to start again: what fails has failed."""

    is_lost = False

    def send(self, send: Callable[[], None], reach: Callable[[], None]) -> None:
        send()


class EnginePresence:
    """`url_file` is there while an engine serves and holds its address; `away_s` bounds the wait for the next one.

    `replica` says which of the run's engines it is.
    """

    def __init__(
        self, store: RolloutStore, url_file: Path, *, away_s: float, noticed_s: float = NOTICED_S, replica: int = 0
    ) -> None:
        self.number = 0  # of the engine that was reached last; 0 = none was
        self.while_waiting: Callable[[], None] = lambda: None  # called between two looks for an engine
        self._store = store
        self._url_file = url_file
        self._away_s = away_s
        self._noticed_s = noticed_s
        self._replica = replica
        self._url = ""

    @property
    def numbers(self) -> Mapping[int, int]:
        return {self._replica: self.number}

    @property
    def is_lost(self) -> bool:
        """Whether the supervisor has seen the death of the engine that was reached last."""
        return self.number != self._store.engine_number(self._replica)

    @property
    def is_back(self) -> bool:
        """Whether the one that was reached last is lost, and the next one serves."""
        return self.is_lost and self._url_file.exists()

    def reach(self, limit_s: float | None = None) -> str:
        """Wait for an engine that serves; its address. Raises TrainingFailed after `limit_s` (None = no limit)."""
        began = time.monotonic()
        while True:
            # The number first: of an engine that dies in between it is the older one, and its death shows later.
            number = self._store.engine_number(self._replica)
            try:
                self._url = self._url_file.read_text(encoding="utf-8").strip()
            except FileNotFoundError:
                self._url = ""
            if self._url:
                self.number = number
                return self._url
            self.require_supervisor()
            if limit_s is not None and time.monotonic() - began > limit_s:
                raise TrainingFailed(f"no engine came back within {limit_s:.0f} s: see logs/engine.log")
            self.while_waiting()
            time.sleep(_POLL_S)

    @staticmethod
    def require_supervisor() -> None:
        """Raises TrainingFailed when nobody is left who would start an engine."""
        if os.getppid() == 1:
            raise TrainingFailed("the supervisor died before the engine was ready")

    def send(self, send: Callable[[], None], reach: Callable[[], None]) -> None:
        """See `Sending`. Raises what `send` raises while its engine lives, else TrainingFailed."""
        while True:
            is_another = self.is_lost  # it died while something else was done, or under the last try
            if is_another:
                self.reach(self._away_s)
            try:
                if is_another:
                    reach()
                send()
                return
            except HarnessTrainerError as error:
                if not self.is_gone(error) or not self.is_noticed():
                    raise
                logger.warning("the engine died while weights were sent to it; waiting for the next: %s", error)

    def is_gone(self, error: BaseException) -> bool:
        """Whether an error of the learner's means no more than that the engine has died."""
        return isinstance(error, EngineGone) or bool(self.number and (self.is_lost or not answers(self._url)))

    def require(self) -> None:
        """Raises EngineGone when the engine has died: for a learner that cannot send its weights again alone."""
        if self.is_lost:
            raise EngineGone("the engine was started again: the learner goes on from its last checkpoint")

    def is_noticed(self) -> bool:
        """Wait until the supervisor has seen it; False = it does not: nothing will be started again."""
        until = time.monotonic() + self._noticed_s
        while not self.is_lost:
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True

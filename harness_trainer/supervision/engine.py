"""The engine as a part of a run: started again on the same port, where nothing may be sampled before it has a policy.

Owns its address, the file that tells the learner of it, and what is to be done when it has died. vLLM itself is
`engine.launch`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from harness_trainer.engine.config import EngineConfig
from harness_trainer.errors import EngineFailed
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rundir import write_atomically
from harness_trainer.supervision.process import PartProcess


class Startable(Protocol):
    """What is started: `engine.launch.Engine` on this machine, `remote_engine.RemoteEngine` in another container."""

    @property
    def process(self) -> PartProcess: ...

    def start(self, progress: Callable[[str], None]) -> str: ...

    def stop(self) -> None: ...


MakeEngine = Callable[[EngineConfig], Startable]


class EnginePart:
    """`make` builds an engine that was not started; `hold` keeps every call away from whatever listens on its port.

    `url` is there after the first launch, and stays. `replica` says which of the run's engines it is.
    """

    def __init__(
        self,
        config: EngineConfig,
        make: MakeEngine,
        store: RolloutStore,
        url_file: Path,
        *,
        status: Callable[[str], None],
        replica: int = 0,
    ) -> None:
        self.url = ""
        self.url_file = url_file
        self.replica = replica
        self.hold: Callable[[], None] = lambda: None  # there is no gateway yet when the engine is started first
        self._config = config
        self._make = make
        self._store = store
        self._status = status
        self._engine: Startable | None = None
        self._given_up = False

    def launch(self) -> PartProcess:
        """Blocking, until it answers. Raises SetupError, EngineFailed."""
        again = bool(self.url)
        self.stop()  # what is left of an earlier one
        self._engine = self._make(self._config)
        if self._given_up:  # while the earlier one ended, which is what `give_up` found
            raise EngineFailed("the run ended before the engine was started")
        # When it is started again a status line would fight with that of the run, which goes on.
        self.url = self._engine.start(lambda text: None if again else self._status(f"engine: {text}"))
        self._config = self._config.model_copy(update={"port": urlsplit(self.url).port})
        if again:
            self.announce()
        return self._engine.process

    def announce(self) -> None:
        """Tell the learner where it is: from now on it may be sent weights. A later launch does so itself."""
        write_atomically(self.url_file, self.url)

    def lost(self) -> None:
        """It has died, and with it what it had of the run. Nothing reaches the next one before it has a policy."""
        self.hold()
        self.url_file.unlink(missing_ok=True)
        self._store.forget_engine(self.replica)

    def give_up(self) -> None:
        """End a launch that is under way in another thread."""
        self._given_up = True
        self.stop()

    def stop(self) -> None:
        """End it, also one that is only being started. Idempotent; blocking."""
        if self._engine is not None:
            self._engine.stop()

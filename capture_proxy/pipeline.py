"""What a model call passes through, whoever makes it: engine, renderer, sessions, turns and store as one opened whole.

Owns how the rooms are put together and the order in which they are opened and closed. `gateway` puts HTTP before it for
agents; white-box loops call it in their own process (`Pipeline.turns`), beside a gateway on the same store. Two
processes may each have one on one store: a session is made, called and sealed by one of them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from capture_proxy.engines.base import Engine
from capture_proxy.gate import Gate
from capture_proxy.metrics import Metrics
from capture_proxy.rendering import Bridger, Bridging
from capture_proxy.session import Sessions
from capture_proxy.store import Store
from capture_proxy.turn import Turns


@dataclass
class Pipeline:
    """`hang_up_grace_s` is how long a call goes on that nobody waits for any more, so that a retry finds it;
    `bridging` says how prompts are continued; `gate` when the engine may be asked; `restarted` whether the store's open
    sessions are those of this pipeline's predecessor, which may have lost their calls; `name` tells the pipelines of
    several gateways on one store apart; `clock` gives Unix seconds.
    """

    engine: Engine
    store: Store
    hang_up_grace_s: float = 1.0
    bridging: Bridging = field(default_factory=Bridging)
    gate: Gate = field(default_factory=Gate)
    restarted: bool = True
    name: str = ""
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        self.bridger = Bridger(self.engine, self.bridging, self.gate)
        self.sessions = Sessions(self.store, self.clock, keep_history=self.bridger.may_continue, name=self.name)
        self.turns = Turns(
            self.engine,
            self.sessions,
            self.clock,
            grace_s=self.hang_up_grace_s,
            metrics=self.metrics,
            bridger=self.bridger,
            gate=self.gate,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Holds the engine's connections and the store; both are closed on leaving."""
        try:
            if self.restarted:
                await self.sessions.note_restart()
            async with self.engine.running(), self.bridger.running():
                try:
                    yield
                finally:
                    await self.sessions.abort_calls()
        finally:
            await self.store.close()

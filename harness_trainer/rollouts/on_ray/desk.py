"""What an attempt on a node asks the runner for: its session's token, the end of the session, its capture, the policy.

Owns the two ends of that on the node: a line per attempt, whose events the runner reads as they come, and a desk that
looks like the gateway's admin client (`means.Sessions`). So the admin port stays on the runner's host, and its key with
the runner.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

from capture_proxy.types import Capture, Session, SessionPolicy
from harness_trainer.rollouts.on_ray.messages import Event, Kind


class Line:
    """Of one attempt."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)

    def tell(self, kind: Kind) -> None:
        self._events.put_nowait(Event(kind))

    async def ask(self, kind: Kind, *payload: Any) -> Any:
        """The runner's answer; raises what it raised there."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._events.put_nowait(Event(kind, number, payload))
        try:
            return await answer
        finally:
            del self._asked[number]

    def answer(self, number: int, value: Any, error: BaseException | None) -> None:
        """Nobody may be waiting any more."""
        asked = self._asked.get(number)
        if asked is None or asked.done():
            return
        if error is None:
            asked.set_result(value)
        else:
            asked.set_exception(error)

    def close(self) -> None:
        """No event comes after those that are there."""
        self._events.put_nowait(None)

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self._events.get()) is not None:
            yield event


class Desk:
    """See `means.Sessions`. A session has its attempt's id, which says whose line to ask on."""

    def __init__(self, lines: Mapping[str, Line]) -> None:
        self._lines = lines

    async def mint(self, session_id: str, policy: SessionPolicy, labels: dict[str, str]) -> Session:
        session: Session = await self._lines[session_id].ask("mint", session_id, policy, labels)
        return session

    async def seal(self, session_id: str) -> Session:
        session: Session = await self._lines[session_id].ask("seal", session_id)
        return session

    async def capture(self, session_id: str) -> Capture:
        capture: Capture = await self._lines[session_id].ask("capture", session_id)
        return capture

"""A call in progress: one log of events that any number of agent connections follow, each from the start.

Owns replay, wake-ups and the grace after the last listener left. It does not produce events (`turn`) nor write them to
a connection (`gateway`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from capture_proxy.errors import CaptureError
from capture_proxy.ledger import Attempt
from capture_proxy.types import Turn


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has accepted the prompt; a stream's head may go out."""

    num_prompt_tokens: int | None  # None = the engine did not say


@dataclass(frozen=True, slots=True)
class Text:
    """Text that was just settled and may go to the agent."""

    content: str
    reasoning: str


# What a call yields in order: Started once, Text any number of times, then a committed Turn or one error.
CallEvent: TypeAlias = Started | Text | Turn | CaptureError


class RunningCall:
    """The log of one call. `drive` gives it the task that fills it; a log that is given whole needs none."""

    def __init__(self, turn_id: str, grace_s: float = 0.0, events: Sequence[CallEvent] = ()) -> None:
        self.turn_id = turn_id
        self.abort_reason: CaptureError | None = None  # what the agent is told of an abort; None = nobody listens
        self.aborting = False  # nothing more will come of it
        self._grace_s = grace_s
        self._events: list[CallEvent] = list(events)
        self._listeners: list[Listener] = []
        self._task: asyncio.Task[None] | None = None
        self._settled = False
        self._grace: asyncio.TimerHandle | None = None

    def drive(self, work: Coroutine[Any, Any, None], ended: Callable[[asyncio.Task[None]], None]) -> None:
        """Have a task fill the log; `ended` is called when it is done, also when it never began."""
        self._task = asyncio.create_task(work, name=f"call-{self.turn_id}")
        self._task.add_done_callback(ended)

    @property
    def has_begun(self) -> bool:
        """A stream's head may be out."""
        return bool(self._events)

    @property
    def has_text(self) -> bool:
        """A streaming agent may have been sent some of the reply."""
        return any(isinstance(event, Text) for event in self._events)

    def settle(self) -> None:
        """From here on the call is only being recorded, which no abort may cut short."""
        self._settled = True

    def put(self, event: CallEvent) -> None:
        self._events.append(event)
        last = isinstance(event, Turn | CaptureError)
        for listener in self._listeners:
            if last or not listener.wants_last:
                listener.wake()

    def listen(self, attempt: Attempt) -> Listener:
        """A connection that follows from the first event on. It must `leave`."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        listener = Listener(self, self._events, attempt)
        self._listeners.append(listener)
        return listener

    def abort(self, reason: CaptureError | None = None) -> asyncio.Task[None]:
        """Abort in the engine and record the turn as ABORTED; no effect on a call that is being recorded.

        Gives the task, which ends soon.
        """
        assert self._task is not None
        if not self._settled and not self._task.done():
            self.abort_reason, self.aborting = reason, True
            self._task.cancel()
        return self._task

    def _left(self, listener: Listener) -> None:
        self._listeners.remove(listener)
        if not self._listeners and self._task is not None and not self._task.done():
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self.abort)


class Listener:
    """One agent connection that waits for a call's reply."""

    def __init__(self, call: RunningCall, events: list[CallEvent], attempt: Attempt) -> None:
        self.turn_id = call.turn_id
        self.gone = False  # the agent's connection is closed
        self.wants_last = False  # only the end is of interest
        self._call, self._attempt = call, attempt
        self._events, self._at = events, 0
        self._waiter: asyncio.Future[None] | None = None
        attempt.listeners += 1

    async def next(self, timeout: float | None) -> CallEvent | None:
        """The next event; None when there was none for `timeout` seconds, or the connection is gone."""
        if self.gone:
            return None
        if self._at == len(self._events):
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, self.wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return None if self.gone else self.ready()

    async def last(self) -> Turn | CaptureError | None:
        """The last event; None when the connection is gone."""
        self.wants_last = True
        while not self.gone:
            event = await self.next(None)
            if isinstance(event, Turn | CaptureError):
                return event
        return None

    def ready(self) -> CallEvent | None:
        """An event that is here already, without waiting. Text that piled up comes as one."""
        if self._at == len(self._events):
            return None
        event = self._events[self._at]
        self._at += 1
        if not isinstance(event, Text):
            return event
        content, reasoning = [event.content], [event.reasoning]
        while self._at < len(self._events) and isinstance(more := self._events[self._at], Text):
            if more.reasoning and any(content):  # joined they would change places
                break
            content.append(more.content)
            reasoning.append(more.reasoning)
            self._at += 1
        return Text("".join(content), "".join(reasoning)) if len(content) > 1 else event

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def hang_up(self) -> None:
        """The agent's connection is closed."""
        self.gone = True
        self.wake()

    def acknowledge(self) -> None:
        """The last byte of a reply has been sent, and the connection is open."""
        self._attempt.acknowledged = True

    def leave(self) -> None:
        """Stop following. A call that nobody follows any more is aborted after its grace."""
        self._attempt.listeners -= 1
        self._call._left(self)

"""One model call, from admission to a committed turn. Dialect-free and HTTP-free.

Owns the order of things: join an earlier attempt or be admitted, prepare the request, ask the engine, pass text on as
it is sampled, commit, and only then let the finish (and any tool call, which an agent may act on at once) out. Looking
changes nothing: only a reply that was obtained, or the record that it was not, is written. Called by `gateway`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from capture_proxy.calls import Listener, RunningCall, Started, Text
from capture_proxy.dialects.base import Call
from capture_proxy.engines.base import ChatRequest, DeltaEvent, Engine, FinishEvent, PromptEvent
from capture_proxy.errors import CaptureError, EngineError, EngineUnreachable, SessionClosed, StoreError
from capture_proxy.gate import Gate, Patience
from capture_proxy.ids import TokenIds
from capture_proxy.ledger import Attempt
from capture_proxy.metrics import Metrics
from capture_proxy.rendering import Bridger
from capture_proxy.session import Admission, Live, Sessions, closed
from capture_proxy.turn_record import (
    Blank,
    check_tokens,
    closing_turn,
    open_turn,
    sent_message,
    take_finish,
    take_prompt,
)
from capture_proxy.types import Turn, TurnRole, TurnStatus

_log = logging.getLogger(__name__)
# How long a hang-up may take to be noticed: a request that repeats one whose connection seems open waits this long
# (seconds) before it is taken for a sibling.
_HANG_UP_LAG_S = 0.02


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a call arrived: the body as sent, its hash, and whether the client says that it is a retry."""

    raw: bytes | None = None
    body_hash: bytes = b""  # BLAKE2b-128; b"" = unknown, equal to no other
    retry: bool = False


class Turns:
    """Makes calls on one engine for the sessions of one store.

    `grace_s` is how long a call goes on that no agent waits for any more, so that a retry finds it; `bridger` None =
    the engine renders every prompt; `gate` None = the engine may always be asked, and a call waits for none.
    """

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        clock: Callable[[], float] = time.time,
        *,
        grace_s: float = 1.0,
        metrics: Metrics | None = None,
        bridger: Bridger | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._engine = engine
        self._gate = gate or Gate()
        self._models: list[dict[str, Any]] = []  # as the engine listed them last
        self._bridger = bridger
        self._sessions = sessions
        self._clock = clock
        self._grace_s = grace_s
        self._running: dict[str, RunningCall] = {}  # by turn id, until the turn is committed
        self.metrics = metrics or Metrics()

    async def start(self, live: Live, call: Call, dialect: str, arrival: Arrival | None = None) -> Listener:
        """Join the attempt that this call repeats, or admit it and set it going.

        Raises BadRequest, SessionClosed, StoreError. The listener must `leave`.
        """
        arrival = arrival or Arrival()
        arrived = self._clock()
        if not arrival.retry and live.ledger.attempts.being_answered(arrival.body_hash):
            await asyncio.sleep(_HANG_UP_LAG_S)
        attempt = self._sessions.attempt(live, call, dialect, arrival.body_hash, says_retry=arrival.retry)
        if attempt is not None and (joined := await self._join(live, attempt)) is not None:
            return joined
        try:
            self._sessions.check_open(live)
            call = await self._sessions.continued(live, call)
            admission = await self._sessions.admit(live, call, dialect, arrival.body_hash)
        except SessionClosed as error:
            if live.session.policy.at_limit != "reply":
                raise
            return _told(closing_turn(live, call, dialect, error))
        turn = open_turn(admission, call, dialect, arrived)
        turn.raw, turn.body_hash = arrival.raw, arrival.body_hash
        running = RunningCall(admission.turn_id, self._grace_s)
        self._running[admission.turn_id] = running
        live.running.add(running)
        running.drive(self._drive(admission, turn, running), lambda task: self._ended(task, admission, running))
        return running.listen(admission.attempt)

    async def count(self, live: Live, call: Call) -> int:
        """The length in tokens of the prompt that this call would have. Makes no turn and spends no budget."""
        self._sessions.check_open(live)
        call = await self._sessions.continued(live, call)

        async def count() -> int:
            request = await self._prepared(live, self._sessions.request(live, call), None)
            return len(request.prompt_ids_P or await self._engine.render(request))

        return await self._gate.patiently(count)

    async def models(self) -> list[dict[str, Any]]:
        """The models that the engine lists, or listed before it went away. Raises EngineError, EngineUnreachable."""
        try:
            self._models = await self._engine.models()
        except EngineUnreachable:
            if not self._models:
                self._models = await self._gate.patiently(self._engine.models)
        return self._models

    def _ended(self, task: asyncio.Task[None], admission: Admission, running: RunningCall) -> None:
        admission.live.running.discard(running)
        if task.cancelled():  # before its first step, so nothing was asked and nothing is recorded
            self._running.pop(admission.turn_id, None)
            self._sessions.release(admission, lost=True)
            running.put(running.abort_reason or EngineUnreachable("the call was aborted before it began"))

    async def _join(self, live: Live, attempt: Attempt) -> Listener | None:
        """The reply of an attempt, running or recorded; None when there is none to be had after all."""
        if (running := self._running.get(attempt.turn_id)) is not None:
            if running.aborting:
                return None
            self.metrics.retries.add("joined")
            return running.listen(attempt)
        attempt.listeners += 1  # taken, while the store is asked
        try:
            turn = await self._sessions.turn(live, attempt.turn_id)
        finally:
            attempt.listeners -= 1
        if turn is None or turn.status is not TurnStatus.OK:
            return None
        self.metrics.retries.add("replayed")
        return _replay(turn, attempt)

    async def _prepared(self, live: Live, request: ChatRequest, turn: Turn | None) -> ChatRequest:
        """The request as the engine is asked: the one place where a prompt's own ids can take the messages' place.

        `turn` None = the prompt is only counted.
        """
        if self._bridger is None:
            return request
        self._sessions.take_in(live)  # the turn that this goes on from may have ended a moment ago
        prepared = await self._bridger.prepare(live.history, request)
        if turn is not None:
            turn.bridged_from, turn.bridge_refusal = prepared.bridged_from, prepared.refusal
            turn.findings += prepared.findings
        return prepared.request

    async def _drive(self, admission: Admission, turn: Turn, running: RunningCall) -> None:
        error: CaptureError | None = None
        deadline = self._watch_deadline(admission.live, running)
        try:
            await self._sample(admission, turn, running)
            turn.status = TurnStatus.OK
        except asyncio.CancelledError:
            turn.status, error = TurnStatus.ABORTED, running.abort_reason
        except CaptureError as failure:
            turn.status, error = TurnStatus.FAILED, failure
        except Exception as failure:
            # A bug of ours must reach the log whole and the agent as an error, never as a hung connection.
            _log.exception("turn %s failed in an unforeseen way", turn.turn_id)
            turn.status = TurnStatus.FAILED
            error = EngineError(f"the capture proxy failed: {type(failure).__name__}: {failure}")
        running.settle()
        if deadline is not None:
            deadline.cancel()
        if turn.status is TurnStatus.FAILED:
            turn.error = f"{type(error).__name__}: {error}"
        turn.finished_at = self._clock()
        if turn.status is TurnStatus.OK or turn.completion_ids_T:
            turn.findings += check_tokens(turn)
        lost = await self._commit(admission, turn, error)
        self._running.pop(turn.turn_id, None)
        if lost is None and turn.status is TurnStatus.OK:
            self._sessions.remember(admission.live, turn)
            # A turn of the loop after whoever waits is woken: the reply is on its way while this is worked out.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._sessions.take_in, admission.live)
        running.put(_outcome(admission, turn, lost or error))

    def _watch_deadline(self, live: Live, running: RunningCall) -> asyncio.TimerHandle | None:
        if live.ends_at is None:
            return None
        reason = closed(live, "the deadline of this session has passed", "deadline")
        loop = asyncio.get_running_loop()
        return loop.call_later(max(0.0, live.ends_at - time.monotonic()), running.abort, reason)

    async def _sample(self, admission: Admission, turn: Turn, running: RunningCall) -> None:
        blank, patience = Blank.of(turn), self._gate.patience()
        while True:
            try:
                async with self._gate.attempt():
                    await self._attempt(admission, turn, running)
                return
            except EngineError as error:
                told = admission.request.stream and running.has_text
                if told or not await self._is_away(error) or not await _waited(patience, running, error):
                    raise
                blank.restore(turn, error)

    async def _is_away(self, error: EngineError) -> bool:
        """Whether the engine, and not the call, is the trouble. A dying engine may still answer, with an error."""
        if isinstance(error, EngineUnreachable):
            return True
        return self._gate.patience_s > 0 and not await self._engine.healthy()

    async def _attempt(self, admission: Admission, turn: Turn, running: RunningCall) -> None:
        content: list[str] = []
        reasoning: list[str] = []
        finish: FinishEvent | None = None
        request = await self._prepared(admission.live, admission.request, turn)
        try:
            async with contextlib.aclosing(self._engine.sample(request)) as events:
                async for event in events:
                    if isinstance(event, DeltaEvent):
                        if event.ids and turn.first_token_at is None:
                            turn.first_token_at = self._clock()
                        turn.completion_ids_T += event.ids
                        turn.logprobs_T += event.logprobs
                        if event.content or event.reasoning:
                            content.append(event.content)
                            reasoning.append(event.reasoning)
                            running.put(Text(event.content, event.reasoning))
                    elif isinstance(event, PromptEvent):
                        take_prompt(turn, event)
                        if not running.has_begun:
                            running.put(Started(len(event.prompt_ids_P) or None))
                    else:
                        finish = event
        finally:
            turn.message = sent_message("".join(content), "".join(reasoning))
        try:
            turn.prompt_ids_P = TokenIds.of(turn.prompt_ids_P)  # looked at and packed once, for store and history alike
        except ValueError as error:
            turn.prompt_ids_P = []
            raise EngineError(f"the engine sent a prompt that is no token ids: {error}") from None
        if finish is None:
            raise EngineError("the engine's reply ended without a finish")
        take_finish(turn, finish, admission)

    async def _commit(self, admission: Admission, turn: Turn, error: CaptureError | None) -> StoreError | None:
        metrics = self.metrics
        started = time.perf_counter()
        try:
            await self._sessions.commit(admission, turn, error)
        except StoreError as failure:
            _log.error("turn %s could not be kept: %s", turn.turn_id, failure)
            return failure
        except Exception as failure:
            _log.exception("turn %s could not be kept", turn.turn_id)
            return StoreError(f"the turn could not be kept: {type(failure).__name__}: {failure}")
        metrics.commit.observe(time.perf_counter() - started)
        metrics.turns.add(turn.status.value, turn.dialect)
        metrics.prompt_tokens.add(amount=len(turn.prompt_ids_P))
        metrics.completion_tokens.add(amount=len(turn.completion_ids_T))
        metrics.duration.observe(turn.finished_at - turn.started_at)
        if turn.first_token_at is not None:
            metrics.first_token.observe(turn.first_token_at - turn.started_at)
        return None


def _told(turn: Turn) -> Listener:
    return _replay(turn, Attempt(turn.turn_id, turn.dialect, ""))


def _replay(turn: Turn, attempt: Attempt) -> Listener:
    started = Started(len(turn.prompt_ids_P) or None)
    return RunningCall(turn.turn_id, events=[started, turn]).listen(attempt)


def _outcome(admission: Admission, turn: Turn, error: CaptureError | None) -> Turn | CaptureError:
    """The last event of a call: the committed turn, or why there is none."""
    live = admission.live
    if error is None and turn.status is TurnStatus.ABORTED:  # only read if it was not the agent that hung up
        sealed = live.session.sealed
        error = closed(live, "this session is sealed", "sealed") if sealed else EngineUnreachable("the gateway stops")
    if error is None:
        return turn
    if isinstance(error, SessionClosed) and live.session.policy.at_limit == "reply":
        text = f"{turn.message.get('content') or ''}\n\n{error}.".lstrip()
        message = {**turn.message, "role": "assistant", "content": text}
        return replace(turn, message=message, finish_reason="stop", status=TurnStatus.OK, role=TurnRole.SIDE)
    return error


async def _waited(patience: Patience, running: RunningCall, error: EngineError) -> bool:
    """Whether the call may be made again now. A deadline that passes meanwhile is the engine's fault, no limit hit."""
    try:
        return await patience.wait()
    except asyncio.CancelledError:
        if not isinstance(running.abort_reason, SessionClosed):  # the agent hung up, or the gateway stops
            raise
        raise EngineUnreachable(f"{running.abort_reason} while its call waited for the engine: {error}") from None

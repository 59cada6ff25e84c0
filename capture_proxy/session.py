"""Sessions: who may call the model, how it samples for them, and when they are done.

Owns minting, tokens, budgets, sealing, retries, and what a session remembers of its faults. It keeps the live sessions
in memory and everything in the store, so a restart carries on. It does not talk to the engine (`turn`) nor know HTTP
(`gateway`).

**Retries.** Agents re-send a request whose reply they did not get, and the engine must not sample it twice. A request
gets the reply of an earlier attempt of its session when the body is byte for byte the same and either

- that attempt was never acknowledged: every connection that waited for it went away before the last byte had been
  sent. It is joined while it runs (its events are replayed from the start) and read from the store once it is kept; or
- the client says that it retries (`x-stainless-retry-count` above 0): then the latest attempt, unless that one failed.

Everything else is a call of its own: a changed body always, an equal body whose first connection is open or was
answered (a sibling), an equal body whose attempt failed or was aborted. A call that nobody waits for any more goes on
for a short grace, so that a retry finds it, and is then aborted in the engine. After a restart, a reply after which
nothing was asked counts as never acknowledged. A joined call spends no budget and is answered in a spent session too.

**Restarts.** A gateway that is killed leaves no trace of the calls that were in flight, and an agent may give up when
its connection breaks. So an open session whose last recorded reply leads to another call (it has tool calls, or is no
reply) stands as faulty from the next start of a gateway on, until its agent has made that call.

**Several gateways.** Gateways of different names may share a store, each before an engine of its own. A session is
pinned to the gateway that minted it; to every other one its token is unknown and its name is not found.

**Limits.** Calls of the agent, tokens sampled, a deadline, and the model's window: `MAX_CRAMPED` replies in a row that
the window cut to next to nothing, or prompts that do not fit, end the session. What the agent is then told is the
policy's choice (`at_limit`); `limit_hit` is the one that came first. A window or a fault that the agent got past is
forgotten. The deadline is Unix seconds, because it outlives the gateway, and is read once, when the session is minted
or loaded: a clock that is set afterwards takes no time from any agent.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from capture_proxy.calls import RunningCall
from capture_proxy.dialects.base import Call
from capture_proxy.dialects.body import settle_system
from capture_proxy.engines.base import ChatRequest
from capture_proxy.errors import (
    BadRequest,
    NotFound,
    PreviousResponseNotFound,
    PromptTooLong,
    SessionClosed,
    UnknownSession,
)
from capture_proxy.graph import Facts
from capture_proxy.history import History
from capture_proxy.ledger import MAX_CRAMPED, Attempt, Ledger, cut_by_window
from capture_proxy.sampling import pin, shaping_findings
from capture_proxy.store import Store
from capture_proxy.types import GATEWAY_RESTARTED, Capture, Finding, Session, SessionPolicy, Turn, TurnStatus

_MAX_ID = 200
_RECENT = 4  # turns kept in memory beside the store, for requests that go on from one


@dataclass(slots=True)
class Live:
    """A session as the running gateway knows it."""

    session: Session
    next_index: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    in_flight: dict[int, Facts] = field(default_factory=dict)  # turn index -> facts
    running: set[RunningCall] = field(default_factory=set)
    recent: dict[str, Turn] = field(default_factory=dict)  # the last finished turns by id, oldest first
    history: History = field(default_factory=History)  # what its messages said, to go on from token by token
    unread: list[Turn] = field(default_factory=list)  # finished turns that `history` has not taken in yet
    ends_at: float | None = None  # its deadline by the monotonic clock, which nobody sets; None = it has none


@dataclass(frozen=True, slots=True)
class Admission:
    """The right to make one engine call, and the request as the policy lets it be made."""

    live: Live
    index: int
    turn_id: str
    request: ChatRequest
    findings: tuple[Finding, ...]
    facts: Facts
    attempt: Attempt


class Sessions:
    """The sessions of one store that are pinned to the gateway called `name`.

    `clock` gives Unix seconds, `keep_history` whether a prompt may ever be continued.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.time,
        *,
        keep_history: Callable[[], bool] = lambda: True,
        name: str = "",
    ) -> None:
        self._name = name
        self._keep_history = keep_history
        self._store = store
        self._clock = clock
        self._by_token: dict[str, Live] = {}
        self._by_id: dict[str, Live] = {}
        self._loading = asyncio.Lock()

    @property
    def num_in_flight(self) -> int:
        return sum(len(live.in_flight) for live in self._by_token.values())

    @property
    def num_live(self) -> int:
        return len(self._by_token)

    async def mint(self, session_id: str, policy: SessionPolicy, labels: dict[str, str]) -> Session:
        """A new session; the same call again returns the same session, so a lost answer can be asked for again.

        Raises BadRequest when the id is unusable or taken by a session with another policy, StoreError.
        """
        if not session_id or len(session_id) > _MAX_ID or not session_id.isprintable() or "/" in session_id:
            raise BadRequest(f"session_id must be 1 to {_MAX_ID} printable characters without '/'")
        async with self._loading:
            known = await self._store.session(session_id)
            if known is not None:
                if (known.policy, known.labels, known.sealed, known.gateway) == (policy, labels, False, self._name):
                    return known
                raise BadRequest(f"session {session_id!r} exists already: choose another session_id")
            session = Session(
                session_id,
                f"sk-{secrets.token_urlsafe(32)}",
                policy,
                dict(labels),
                created_at=self._clock(),
                gateway=self._name,
            )
            await self._store.put_session(session)
            self._remember(Live(session))
        return session

    async def resolve(self, token: str | None) -> Live:
        """The session of a token, sealed or not. Raises UnknownSession, StoreError."""
        live = self._by_token.get(token) if token else None
        if live is None and token:
            session = await self._store.session_by_token(token)
            live = await self._load(session) if session is not None and self._is_ours(session) else None
        if live is None:
            raise UnknownSession("no session has this API key: use the token that was minted for this rollout")
        return live

    def check_open(self, live: Live) -> None:
        """Raises SessionClosed for a sealed session."""
        if live.session.sealed:
            raise closed(live, "this session is sealed: the rollout is over", "sealed")

    async def get(self, session_id: str) -> Session:
        """Raises NotFound, StoreError."""
        live = self._by_id.get(session_id)
        session = live.session if live else await self._store.session(session_id)
        if session is None:
            raise NotFound(f"no session is called {session_id!r}")
        return self._ours(session)

    async def id_of(self, token: str) -> str:
        """The session of a token. Raises NotFound, StoreError."""
        live = self._by_token.get(token)
        session = live.session if live else await self._store.session_by_token(token)
        if session is None:
            raise NotFound("no session has this token")
        return self._ours(session).session_id

    def _is_ours(self, session: Session) -> bool:
        return session.gateway == self._name

    def _ours(self, session: Session) -> Session:
        if not self._is_ours(session):
            whose = f"gateway {session.gateway!r}" if session.gateway else "the gateway without a name"
            raise NotFound(f"session {session.session_id!r} is pinned to {whose}: ask that one")
        return session

    async def all(self) -> list[Session]:
        """Every session of the store, oldest first."""
        return await self._store.sessions()

    async def seal(self, session_id: str) -> Session:
        """End the session: no new call is admitted, calls in flight are aborted and recorded. Idempotent."""
        session = await self.get(session_id)
        live = self._by_id.get(session_id)
        if live is None:
            live = await self._load(session)
        live.session.sealed = True  # from here on nothing is admitted, also while the tasks below end
        await _abort(live.running)
        await self._store.put_session(live.session)
        self._by_token.pop(live.session.token, None)
        self._by_id.pop(session_id, None)
        return live.session

    async def note_restart(self) -> None:
        """At the start of a gateway: sessions of an earlier one may have lost a call with it."""
        for session in filter(self._is_ours, await self._store.open_sessions()):
            last = await self._store.last_turn(session.session_id)
            if last is None or session.last_fault is not None or session.limit_hit is not None:
                continue  # an agent without any call is judged by that
            if last.status is not TurnStatus.OK or last.message.get("tool_calls"):
                session.last_fault = f"{GATEWAY_RESTARTED}: it was started again, and the agent has made no call since"
                await self._store.put_session(session)

    async def abort_calls(self) -> None:
        """Abort and record every call in flight, for shutdown; the sessions stay open."""
        await _abort({call for live in self._by_id.values() for call in live.running})

    async def capture(self, session_id: str) -> Capture:
        """All that is recorded of the session. Roles are as stored; `trace` decides them over the whole session."""
        return Capture(await self.get(session_id), await self._store.turns(session_id))

    def attempt(self, live: Live, call: Call, dialect: str, body_hash: bytes, *, says_retry: bool) -> Attempt | None:
        """The earlier attempt whose reply this request gets, by the rule above; None = it is a call of its own."""
        if live.session.sealed:
            return None
        return live.ledger.attempts.find(body_hash, dialect, call.model, says_retry=says_retry)

    async def turn(self, live: Live, turn_id: str) -> Turn | None:
        """A recorded turn of this session; None = it has none of this id. Raises StoreError."""
        if (recent := live.recent.get(turn_id)) is not None:
            return recent
        return await self._store.turn(live.session.session_id, turn_id)

    async def continued(self, live: Live, call: Call) -> Call:
        """The call with its whole history: that of the turn it goes on from, that turn's reply, then what is new.

        System text of an earlier request is not inherited. Raises PreviousResponseNotFound, StoreError.
        """
        if call.continues is None:
            return call
        turn = await self.turn(live, call.continues)
        if turn is None or turn.status is not TurnStatus.OK or turn.request.get("store") is False:
            raise PreviousResponseNotFound(f"Previous response with id {call.continues!r} not found.")
        own, new = call.messages[: int(call.instructions)], call.messages[int(call.instructions) :]
        past = turn.request["messages"][int(bool(turn.request.get("instructions"))) :]
        messages, findings = settle_system([*own, *past, turn.message, *new])
        return replace(call, messages=messages, findings=(*call.findings, *findings), continues=None)

    async def admit(self, live: Live, call: Call, dialect: str, body_hash: bytes) -> Admission:
        """Take a call into the session's budget. Raises SessionClosed when the session or a limit of it is spent."""
        facts = Facts.asked(call.tools, call.tool_choice, call.model, call.max_tokens)
        self.check_open(live)
        if (spent := self._spent(live, facts)) is not None:
            await self._limit(live, spent.limit)
            raise spent
        index = live.next_index
        live.next_index += 1
        live.in_flight[index] = facts
        live.ledger.spent.add(facts)
        turn_id = f"{live.session.session_id}-{index:04d}"
        attempt = live.ledger.attempts.add(body_hash, Attempt(turn_id, dialect, call.model))
        request = self.request(live, call, turn_id)
        findings = tuple(shaping_findings(request.sampling, request.tool_choice))
        return Admission(live, index, turn_id, request, findings, facts, attempt)

    def request(self, live: Live, call: Call, turn_id: str = "") -> ChatRequest:
        """What the engine is asked for this call, under the session's policy. Admits nothing."""
        policy = live.session.policy
        left = None if policy.max_total_tokens is None else max(1, policy.max_total_tokens - live.ledger.spent.tokens)
        caps = [cap for cap in (call.max_tokens, policy.max_tokens, left) if cap is not None]
        return ChatRequest(
            model=call.model,
            messages=call.messages,
            tools=call.tools,
            tool_choice=call.tool_choice,
            sampling=pin(call, policy),
            max_tokens=min(caps, default=None),
            chat_template_kwargs={**call.chat_template_kwargs, **policy.chat_template_kwargs},
            request_id=turn_id,
            parallel_tool_calls=call.parallel_tool_calls,
            stream=call.stream,
        )

    async def commit(self, admission: Admission, turn: Turn, error: Exception | None = None) -> None:
        """Make the turn and what it means for the session durable, then free its place in the budget.

        Raises StoreError; the turn then never happened, as far as anyone will be told.
        """
        live = admission.live
        # In memory at once: of two calls that end together, neither may put back what the other found.
        _judge(live.session, live.ledger, turn, error)
        try:
            await self._store.put_turn(turn, live.session)
        except BaseException as failure:
            # The rollout has lost a turn through no fault of its own, and nobody may find the attempt any more.
            live.session.last_fault = f"{type(failure).__name__}: {failure}"
            self.release(admission, lost=True)
            raise
        self.release(admission, lost=turn.status is not TurnStatus.OK)
        live.ledger.spent.tokens += len(turn.completion_ids_T)

    def remember(self, live: Live, turn: Turn) -> None:
        """Have a finished turn at hand for the requests that go on from it."""
        if self._keep_history():
            live.unread.append(turn)
        live.recent[turn.turn_id] = turn
        if len(live.recent) > _RECENT:
            del live.recent[next(iter(live.recent))]

    def take_in(self, live: Live) -> None:
        """Read what has finished into the session's history: when there is time, at the latest before it is asked."""
        while live.unread:
            live.history.keep(live.unread.pop(0))

    def release(self, admission: Admission, *, lost: bool) -> None:
        """Free the call's place; a lost one spends no budget and can be joined no more."""
        admission.live.in_flight.pop(admission.index, None)
        admission.attempt.lost = lost
        if lost:
            admission.live.ledger.spent.add(admission.facts, -1)
            admission.live.history.forget(admission.turn_id)

    def _spent(self, live: Live, facts: Facts) -> SessionClosed | None:
        policy, ledger = live.session.policy, live.ledger
        if live.ends_at is not None and time.monotonic() >= live.ends_at:
            return closed(live, "the deadline of this session has passed", "deadline")
        if policy.max_turns is not None:
            count = ledger.spent.with_one_more(facts)
            # A side call does not raise the count, so titles and probes pass while the agent has calls left.
            if count > policy.max_turns and count > ledger.spent.agent_calls:
                return closed(live, f"this session has used its {policy.max_turns} calls", "max_turns")
        if policy.max_total_tokens is not None and ledger.spent.tokens >= policy.max_total_tokens:
            return closed(live, f"this session has sampled its {policy.max_total_tokens} tokens", "max_total_tokens")
        if ledger.cramped >= MAX_CRAMPED:
            return closed(live, "the conversation fills the model's context length", "context_length")
        return None

    async def _limit(self, live: Live, limit: str) -> None:
        if live.ledger.hit(live.session, limit):
            await self._store.put_session(live.session)

    async def _load(self, session: Session) -> Live:
        async with self._loading:
            if (known := self._by_id.get(session.session_id)) is not None:
                return known
            if session.sealed:
                return Live(session)
            turns = await self._store.turns(session.session_id)
            next_index = max((t.index for t in turns), default=-1) + 1
            live = Live(session, next_index, Ledger.of(turns, session.policy))
            if self._keep_history():
                live.history = await asyncio.to_thread(History.of, turns, session.policy.chat_template_kwargs)
            self._remember(live)
            return live

    def _remember(self, live: Live) -> None:
        if (deadline := live.session.policy.deadline) is not None:
            live.ends_at = time.monotonic() + deadline - self._clock()
        self._by_token[live.session.token] = live
        self._by_id[live.session.session_id] = live


def closed(live: Live, message: str, limit: str) -> SessionClosed:
    """The error that ends this session's agent, with the status its policy wants."""
    return SessionClosed(message, limit, live.session.policy.closed_status)


def _judge(session: Session, ledger: Ledger, turn: Turn, error: Exception | None) -> None:
    """What a call that ended means for its session: a fault or a limit that stands, or one that is overcome."""
    too_long, done = isinstance(error, PromptTooLong), turn.status is TurnStatus.OK
    if done and ledger.recovers(turn):
        session.last_fault = None
        ledger.overcome_window(session)
    ledger.count_cramped(turn, session.policy, too_long=too_long)
    total = session.policy.max_total_tokens
    if isinstance(error, SessionClosed) and error.limit != "sealed":
        ledger.hit(session, error.limit)
    elif too_long or (done and cut_by_window(turn, session.policy)):
        ledger.hit(session, "context_length")
        ledger.trouble(turn)
    elif total is not None and turn.finish_reason == "length":
        if ledger.spent.tokens + len(turn.completion_ids_T) >= total:
            ledger.hit(session, "max_total_tokens")
    elif turn.status is TurnStatus.FAILED and not isinstance(error, BadRequest):
        session.last_fault = turn.error
        ledger.trouble(turn)


async def _abort(calls: set[RunningCall]) -> None:
    waiting = [call.abort() for call in calls]
    if waiting:
        await asyncio.wait(waiting, timeout=5)

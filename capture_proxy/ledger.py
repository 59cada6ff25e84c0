"""What a live session knows of its calls: attempts that a retry may join, the budget spent, the fault that stands.

Owns the bookkeeping behind the rules that `session` states, in constant time per call however long the session is, and
the same bookkeeping read back from recorded turns after a restart. It decides nothing about HTTP and does no I/O.
Called by `session` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from capture_proxy.graph import Facts
from capture_proxy.types import Session, SessionPolicy, Turn, TurnStatus

CRAMPED_TOKENS = 16  # a reply that the window cuts below this length says nothing
MAX_CRAMPED = 3  # so many in a row (or prompts that do not fit at all), and the session is over


@dataclass(slots=True)
class Attempt:
    """One engine call, as far as a repeated request is concerned.

    `listeners` counts agent connections that wait for it; `acknowledged` means that the last byte of a reply left on
    a connection that was still open.
    """

    turn_id: str
    dialect: str
    model: str
    listeners: int = 0
    acknowledged: bool = False
    lost: bool = False  # failed or aborted: there is nothing to hand out

    @property
    def orphaned(self) -> bool:
        return not self.listeners and not self.acknowledged and not self.lost


class Attempts:
    """The attempts of a session by what was asked. Per body only those are kept that can still be handed out."""

    def __init__(self) -> None:
        self._by_body: dict[bytes, list[Attempt]] = {}

    def add(self, body_hash: bytes, attempt: Attempt) -> Attempt:
        if body_hash:  # an unknown body equals no other
            known = self._by_body.setdefault(body_hash, [])
            known[:] = [other for other in known if other.listeners or other.orphaned]
            known.append(attempt)
        return attempt

    def find(self, body_hash: bytes, dialect: str, model: str, *, says_retry: bool) -> Attempt | None:
        """The attempt that a request with this body gets the reply of; None = it is a call of its own."""
        known = [a for a in self._by_body.get(body_hash, ()) if (a.dialect, a.model) == (dialect, model)]
        for attempt in known:
            if attempt.orphaned:
                return attempt
        if says_retry and known and not known[-1].lost:
            return known[-1]
        return None

    def being_answered(self, body_hash: bytes) -> bool:
        """Whether an agent waits on an open connection for a reply to this very body."""
        return any(attempt.listeners for attempt in self._by_body.get(body_hash, ()))


@dataclass(slots=True)
class Spent:
    """What counts against the budget; the running sums of `graph.count_agent_calls`, and the tokens."""

    with_tools: int = 0  # calls that offered tools and are no probe
    plain: int = 0  # calls that offered none and are no probe
    offering: int = 0  # calls that offered tools, probes included
    tokens: int = 0  # sampled

    def add(self, facts: Facts, sign: int = 1) -> None:
        self.offering += sign * facts.offers_tools
        if facts.max_tokens != 1:
            self.with_tools += sign * facts.offers_tools
            self.plain += sign * (not facts.offers_tools)

    @property
    def agent_calls(self) -> int:
        return self.with_tools if self.offering else self.with_tools + self.plain

    def with_one_more(self, facts: Facts) -> int:
        """The agent's calls if this one were admitted."""
        after = Spent(self.with_tools, self.plain, self.offering)
        after.add(facts)
        return after.agent_calls


@dataclass(slots=True)
class Ledger:
    """All of it, for one session."""

    attempts: Attempts = field(default_factory=Attempts)
    spent: Spent = field(default_factory=Spent)
    cramped: int = 0  # replies in a row that the window cut to (almost) nothing
    # The limit hit while the window's stood. Not stored: after a restart no call is in flight that could overcome it.
    _next_limit: str | None = None
    _trouble: tuple[int, bool] | None = None  # (turn index, offered tools) of the call behind the standing fault

    @classmethod
    def of(cls, turns: Sequence[Turn], policy: SessionPolicy) -> Ledger:
        """The ledger of a session that was recorded before. Replies after which nothing was asked may never have
        arrived: they are open to be asked for again."""
        ledger = cls()
        last_start = max((turn.started_at for turn in turns), default=0.0)
        for turn in sorted(turns, key=lambda t: t.index):
            ledger.spent.tokens += len(turn.completion_ids_T)
            model = turn.request.get("model")
            attempt = Attempt(turn.turn_id, turn.dialect, model if isinstance(model, str) else "")
            attempt.lost = turn.status is not TurnStatus.OK
            attempt.acknowledged = turn.finished_at < last_start
            ledger.attempts.add(turn.body_hash, attempt)
            if turn.status is TurnStatus.OK:
                ledger.spent.add(Facts.of(turn))
            failed = turn.status is TurnStatus.FAILED and not (turn.error or "").startswith("BadRequest")
            if failed or cut_by_window(turn, policy):
                ledger.trouble(turn)
            ledger.count_cramped(turn, policy, too_long=failed and (turn.error or "").startswith("PromptTooLong"))
        return ledger

    def count_cramped(self, turn: Turn, policy: SessionPolicy, *, too_long: bool) -> None:
        if too_long:
            self.cramped += 1
        elif turn.status is TurnStatus.OK:
            tiny = len(turn.completion_ids_T) < CRAMPED_TOKENS
            self.cramped = self.cramped + 1 if tiny and cut_by_window(turn, policy) else 0

    def hit(self, session: Session, limit: str) -> bool:
        """The session ran into a limit. The first one stays its reason to end; True = this is the first."""
        if session.limit_hit is None:
            session.limit_hit = limit
            return True
        if session.limit_hit == "context_length" != limit and self._next_limit is None:
            self._next_limit = limit
        return False

    def overcome_window(self, session: Session) -> None:
        """The agent got past the window: no limit stands, or the one that was hit after it."""
        if session.limit_hit == "context_length":
            session.limit_hit, self._next_limit = self._next_limit, None

    def trouble(self, turn: Turn) -> None:
        """A fault of the model side, or a limit, that stands from this turn on."""
        self._trouble = turn.index, bool(turn.request.get("tools"))

    def recovers(self, turn: Turn) -> bool:
        """Whether this finished turn shows that the agent got past what the session remembers.

        Only a later call does, and of the same kind: a title that was already under way, or that is asked for while
        the agent's own call failed, proves nothing.
        """
        if self._trouble is None:
            return True
        index, offered_tools = self._trouble
        return turn.index > index and (bool(turn.request.get("tools")) or not offered_tools)


def cut_by_window(turn: Turn, policy: SessionPolicy) -> bool:
    """Whether the reply was cut by the model's window and not by a cap that someone asked for."""
    if turn.finish_reason != "length":
        return False
    if any(finding.code == "clamped" for finding in turn.findings):
        return True
    asked = (turn.requested_sampling.get("max_tokens"), policy.max_tokens, policy.max_total_tokens)
    return all(cap is None for cap in asked)

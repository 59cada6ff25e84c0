"""Rules on what was captured and trained: every trained token is in its session's capture, as the engine sampled it.

Owns those rules, and reading captures and traces one session at a time. A rule gets the `Evidence` of one attempt, or
of what belongs to a step or to no attempt at all, and yields what breaks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from capture_proxy.errors import StoreError
from capture_proxy.graph import assign_roles
from capture_proxy.store import load_capture
from capture_proxy.trace import trained_turns
from capture_proxy.types import Capture, Turn, TurnRole, TurnStatus
from harness_trainer.audit.records import Found, Records
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.rows import Row, rows_from_trace
from harness_trainer.learner.step_batch import trained_rows
from harness_trainer.rollouts.lineage import Lineage
from harness_trainer.rollouts.stored import StoredAttempt, read_trace
from harness_trainer.rollouts.types import Outcome, RolloutResult


@dataclass(frozen=True, slots=True)
class OfAttempt:
    """One attempt with its capture (None = it never had a session) and the rows of its trace ([] = it has none)."""

    attempt: StoredAttempt
    capture: Capture | None
    rows: list[Row]
    unreadable: str = ""  # why its capture cannot be read; "" = it can, or there is none

    @property
    def what(self) -> str:
        return f"attempt {self.attempt.rollout_id}"

    @property
    def turns(self) -> dict[str, Turn]:
        return {} if self.capture is None else {turn.turn_id: turn for turn in self.capture.turns}


@dataclass(frozen=True, slots=True)
class OfStep:
    """A line of metrics.jsonl, and the rows of its groups that the learner trained."""

    line: dict[str, Any]
    rows: list[Row]
    current: int  # the policy that the engine sampled with when the step was taken
    max_staleness: int
    published: frozenset[int] | None  # every version of the run; None = they were not kept
    used_up: int
    lineage: Lineage

    @property
    def what(self) -> str:
        return f"step {self.line['step']}"

    @property
    def versions(self) -> Counter[int]:
        """How many trained tokens each policy sampled."""
        return Counter(v for row in self.rows for v, trained in zip(row.versions_N, row.mask_N, strict=True) if trained)


@dataclass(frozen=True, slots=True)
class OfSession:
    """A session that the gateway opened and no attempt has."""

    session_id: str


Evidence: TypeAlias = OfAttempt | OfStep | OfSession


def gather(records: Records) -> Iterator[Evidence]:
    """Everything, one capture at a time in memory. Raises RunDirError for a store that cannot be read at all."""
    known = {attempt.rollout_id for attempt in records.stored.attempts}
    yield from (OfSession(session_id) for session_id in records.sessions if session_id not in known)
    for attempt in records.stored.attempts:
        yield _of_attempt(records, attempt)
    if records.learner is not None:
        for line in records.steps:
            if "step" in line and "policy_version" in line:
                yield _of_step(records, records.learner, line)


def num_turns(evidence: Evidence) -> int:
    """Captured model calls, each counted with its attempt."""
    return len(evidence.turns) if isinstance(evidence, OfAttempt) else 0


def num_trained(evidence: Evidence) -> int:
    """Trained tokens, each counted with its step."""
    return sum(evidence.versions.values()) if isinstance(evidence, OfStep) else 0


def _of_attempt(records: Records, attempt: StoredAttempt) -> OfAttempt:
    capture, unreadable = None, ""
    try:
        capture = load_capture(records.run.store, attempt.rollout_id) if attempt.has_ended else None
    except StoreError as error:
        unreadable = str(error)
    if capture is not None:
        assign_roles(capture.turns)
    return OfAttempt(attempt, capture, _rows(records, attempt), unreadable)


def _of_step(records: Records, learner: LearnerConfig, line: dict[str, Any]) -> OfStep:
    rows: list[Row] = []
    for group_id in records.groups_of_step(line["step"]):
        final = [attempt for tries in records.slots(group_id).values() for attempt in tries if attempt.final]
        results = [_result(attempt) for attempt in final]
        group = TrainGroup(group_id, "", results, [_rows(records, attempt) for attempt in final])
        rows += [row for of_rollout in trained_rows(group, learner.objective) for row in of_rollout]
    versions = records.stored.versions
    return OfStep(
        line,
        rows,
        current=records.version_before(line),
        max_staleness=learner.max_staleness,
        published=frozenset(versions) if versions else None,
        used_up=records.stored.used_up,
        lineage=Lineage(versions.values()),
    )


def _rows(records: Records, attempt: StoredAttempt) -> list[Row]:
    trace = read_trace(records.run.store, attempt.rollout_id) if attempt.has_trace else None
    return rows_from_trace(trace).rows if trace else []


def _result(attempt: StoredAttempt) -> RolloutResult:
    """As far as it decides what is trained. An outcome that nobody knows is `attempts.one_end`'s business."""
    known = {outcome.value: outcome for outcome in Outcome}
    outcome = known.get(attempt.outcome or "", Outcome.INFRA_FAILED)
    return RolloutResult(attempt.rollout_id, attempt.group_id, "", "", attempt.attempt, outcome, attempt.reward)


# -- sessions and attempts -------------------------------------------------------------------------------------------


def session_of_attempt(evidence: Evidence) -> Iterator[Found]:
    """Every session is an attempt's, and every attempt with a trace has its session, whole."""
    if isinstance(evidence, OfSession):
        yield f"session {evidence.session_id}", "no attempt has this id"
    elif isinstance(evidence, OfAttempt) and evidence.unreadable:
        yield evidence.what, f"what the gateway captured of it is damaged: {evidence.unreadable}"
    elif isinstance(evidence, OfAttempt) and evidence.attempt.has_trace and evidence.capture is None:
        yield evidence.what, "it has a trace, and the gateway has no session of it"


def sealed(evidence: Evidence) -> Iterator[Found]:
    """The session of a scored attempt is sealed: nothing can be added to what was judged."""
    if not isinstance(evidence, OfAttempt) or evidence.capture is None or evidence.attempt.reward is None:
        return
    if not evidence.capture.session.sealed:
        yield evidence.what, "it has a reward, and its session is still open"


def turns_counted(evidence: Evidence) -> Iterator[Found]:
    """The turns that a result counts, and those that its trace trains, are those that were captured."""
    if not isinstance(evidence, OfAttempt) or evidence.attempt.result is None:
        return
    result = evidence.attempt.result
    if result.get("num_trainable_turns") and not evidence.attempt.has_trace:
        yield evidence.what, f"its result counts {result['num_trainable_turns']} turns to train, and its trace is gone"
    if evidence.capture is None or not evidence.attempt.has_trace:
        return
    captured = evidence.capture.turns
    counted = result.get("num_turns", 0) + result.get("num_side_turns", 0)
    if counted != len(captured):
        yield evidence.what, f"its result counts {counted} turns, {len(captured)} were captured"
    kept = {turn_id for row in evidence.rows for turn_id in row.turn_ids}
    sound = set(trained_turns(evidence.capture))
    for turn_id in sorted(sound - kept):
        yield evidence.what, f"turn {turn_id} was captured and may be trained, and its trace lacks it"
    for turn_id in sorted(kept - set(evidence.turns)):
        yield evidence.what, f"its trace trains the turn {turn_id}, which was never captured"


def agent_turns_only(evidence: Evidence) -> Iterator[Found]:
    """Only finished turns of the agent's own work are trained: no side call, none that failed or was aborted."""
    if isinstance(evidence, OfAttempt):
        for turn in _trained(evidence):
            if turn.role is not TurnRole.AGENT:
                yield evidence.what, f"turn {turn.turn_id} is a side call ({turn.side_reason}), and it is trained"
            elif turn.status is not TurnStatus.OK:
                yield evidence.what, f"turn {turn.turn_id} is {turn.status}, and it is trained"


def tokens_as_sampled(evidence: Evidence) -> Iterator[Found]:
    """Every trained token, its context, log-probability and policy are what the gateway got from the engine."""
    if isinstance(evidence, OfAttempt):
        turns = evidence.turns
        for row in evidence.rows:
            covered = 0
            for turn_id, (start, end) in zip(row.turn_ids, row.turn_spans, strict=True):
                covered += sum(row.mask_N[start:end])
                if turn_id in turns and (problem := _differs(row, turns[turn_id], start, end)):
                    yield evidence.what, f"turn {turn_id}: {problem}"
            if covered != row.num_trained:
                yield evidence.what, f"a row trains {row.num_trained} tokens, of which its turns have {covered}"


def _trained(evidence: OfAttempt) -> Iterator[Turn]:
    turns = evidence.turns
    for row in evidence.rows:
        yield from (turns[turn_id] for turn_id in row.turn_ids if turn_id in turns)


def _differs(row: Row, turn: Turn, start: int, end: int) -> str:
    """How a trained stretch differs from what was captured; "" = in nothing."""
    if row.ids_N[start:end] != list(turn.completion_ids_T):
        return "its trained tokens are not those that the engine sampled"
    if row.ids_N[:start] != list(turn.prompt_ids_P):
        return "the tokens before it are not the prompt that the engine had"
    trained = [n for n in range(start, end) if row.mask_N[n]]
    sampled = [min(value, 0.0) if value is not None else None for value in turn.logprobs_T]
    if any(row.logprobs_N[n] != sampled[n - start] for n in trained):
        return "its log-probabilities are not those of the engine"
    versions = [span.version for span in turn.version_spans for _ in range(span.end - span.start)]
    if any(f"v{row.versions_N[n]}" != versions[n - start] for n in trained):
        return "its policy versions are not those of the engine"
    return ""


# -- steps -----------------------------------------------------------------------------------------------------------


def tokens_of_step(evidence: Evidence) -> Iterator[Found]:
    """A step trained the rows and tokens of its groups: as many as metrics.jsonl says."""
    if isinstance(evidence, OfStep):
        # A row's first token has nothing to be predicted from.
        found = {"num_rows": len(evidence.rows), "trained_tokens": sum(sum(row.mask_N[1:]) for row in evidence.rows)}
        for name, count in found.items():
            if evidence.line.get(name) != count:
                yield evidence.what, f"metrics.jsonl says {name} {evidence.line.get(name)}, its groups have {count}"


def published_versions(evidence: Evidence) -> Iterator[Found]:
    """Every trained token was sampled by a policy that this run had published."""
    if isinstance(evidence, OfStep):
        for version, count in sorted(evidence.versions.items()):
            known = version in evidence.published if evidence.published is not None else version <= evidence.used_up
            if version < 1 or not known:
                yield evidence.what, f"{count} tokens are of policy v{version}, which was never published"


def fresh_enough(evidence: Evidence) -> Iterator[Found]:
    """No trained token was older than `max_staleness` when its step was taken, and the line says how old they were."""
    if not isinstance(evidence, OfStep) or not evidence.rows:
        return
    ages = {version: evidence.lineage.distance(version, evidence.current) for version in evidence.versions}
    for version, age in sorted(ages.items()):
        if age > evidence.max_staleness:
            detail = (
                f"tokens of v{version} are {age} steps from v{evidence.current}, {evidence.max_staleness} are allowed"
            )
            yield evidence.what, detail
    told, oldest = evidence.line.get("staleness_max"), max(ages.values(), default=None)
    if told != oldest:
        yield evidence.what, f"metrics.jsonl says staleness_max {told}, its tokens are up to {oldest} steps old"


RULES = (
    session_of_attempt,
    sealed,
    turns_counted,
    agent_turns_only,
    tokens_as_sampled,
    tokens_of_step,
    published_versions,
    fresh_enough,
)

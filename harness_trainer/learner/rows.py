"""From what was captured of a rollout to training rows: which ids go into which row, and which of them are trained.

Owns the mask, and is the last gate before the learner: a turn whose ids, log-probabilities or policy versions are not
beyond doubt is left out whole, with a finding. It does not decide which turns are the agent's work (the capture proxy
does, `Turn.trainable`), and it never tokenises. The learner calls it for every rollout of a group it takes.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from capture_proxy.graph import Node
from capture_proxy.graph import build as build_graph
from capture_proxy.ids import TokenIds, packed
from capture_proxy.trace import LINEAGE, is_logprob
from capture_proxy.types import (
    SHAPED,
    Capture,
    Finding,
    Session,
    SessionPolicy,
    Severity,
    Turn,
    TurnRole,
    TurnStatus,
    VersionSpan,
)

_VERSION = re.compile(r"v(\d+)")


@dataclass(frozen=True, slots=True)
class Row:
    """One training row: exactly the ids of real requests and replies, never re-tokenised.

    Example: ids=[1, 5, 9, 7, 2], mask=[0, 0, 0, 1, 1], logprobs=[0, 0, 0, -0.1, -0.9], versions=[-1, -1, -1, 3, 3].
    """

    ids_N: list[int]
    mask_N: list[int]  # 1 = sampled by the engine in this rollout and trained in this row
    logprobs_N: list[float]  # log-probability (nats) under the sampling policy where mask is 1, 0.0 elsewhere
    versions_N: list[int]  # policy version that sampled the token where mask is 1, -1 elsewhere
    turn_ids: list[str]  # the turns whose completions are trained in this row
    # [start, end) of each of those completions in the row, in the same order; [] = not known, one reward for the whole.
    turn_spans: list[tuple[int, int]] = field(default_factory=list)
    is_shaped: bool = False  # some of it was sampled from less than the whole softmax (top_p, a format, a forced tool)

    @property
    def num_trained(self) -> int:
        return sum(self.mask_N)


@dataclass(slots=True)
class BuiltRows:
    """The rows of one rollout and what a person should know about them (`detail` names turn and position)."""

    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A turn that passed every check: its sampled tokens with one log-probability and one version each."""

    turn: Turn  # its prompt ids packed, so that turns of a lineage share them
    logprobs_T: list[float]  # finite, <= 0
    versions_T: list[int]
    mask_T: list[int]  # 1 = may be trained


def build_rows(capture: Capture, masks: Mapping[str, list[int]] | None = None) -> BuiltRows:
    """Build one row per lineage leaf: prompt + completion of its deepest turn, exactly as the engine saw them.

    A turn descends from another when its prompt begins with all of the other's ids. The mask is 1 on the completion
    of every sound turn along the path from root to leaf, but for turns that an earlier row already trains; so each
    sampled id is trained once. Rows come in the order in which their leaf arrived. Nothing is raised: what cannot be
    trained is a finding (FATAL: a turn left out; INFO: the context was rewritten, so the rollout has another row).
    `masks` narrows what of a turn's completion is trained (turn id -> 0/1 per sampled token); absent = all of it.
    """
    built = BuiltRows()
    masks = masks or {}
    sound: dict[str, _Sampled] = {}
    for turn in sorted(capture.turns, key=lambda turn: turn.index):
        if not turn.trainable:
            continue
        try:
            if turn.turn_id in sound:
                raise _Untrainable("recorded_twice", "the capture holds this turn twice; the first is kept")
            sound[turn.turn_id] = _check(turn, masks.get(turn.turn_id))
        except _Untrainable as reason:
            built.findings.append(Finding(Severity.FATAL, reason.code, f"turn {turn.turn_id}: {reason}"))
    graph = build_graph([sampled.turn for sampled in sound.values()])
    trained: set[str] = set()
    for path in graph.lineages:
        built.rows.append(_row(sound[path[-1]], [sound[turn_id] for turn_id in path if turn_id not in trained]))
        trained.update(path)
    built.findings.extend(_rewritten(node) for node in graph.nodes.values() if node.fork is not None)
    return built


def rows_from_trace(trace: Mapping[str, Any]) -> BuiltRows:
    """The training rows of an OpenEnv `TrainingTrace` (JSON data of `capture_proxy.trace`), checked as in `build_rows`.

    Either form: a turn per call, or a turn per lineage, whose rows are those of its capture. Exactly the sampled tokens
    whose loss mask is 1 are trained. Raises KeyError or TypeError for data of another shape.
    """
    turns: list[Turn] = []
    masks: dict[str, list[int]] = {}
    for index, turn in enumerate(trace["turns"]):
        ids, logps, mask = turn["completion_token_ids"], turn["per_token_logps"], turn["loss_mask"]
        if turn["metadata"].get("form") == LINEAGE:
            turns.extend(_stretches(turn))
        elif any(mask):
            masks[turn["node_id"]] = mask[len(turn["prompt_token_ids"]) :]
            spans = turn["metadata"]["policy_versions"]
            shaped = any(finding["code"] == SHAPED for finding in turn["metadata"].get("findings", []))
            turns.append(_turn(turn["node_id"], index, turn["prompt_token_ids"], ids, logps, spans, shaped=shaped))
    return build_rows(Capture(Session("", "", SessionPolicy(), {}), turns), masks)


def _stretches(row: Mapping[str, Any]) -> Iterator[Turn]:
    """The turns whose sampled ids a lineage trains, as slices of it."""
    start_of_completion = len(row["prompt_token_ids"])
    ids: Sequence[int] = [*row["prompt_token_ids"], *row["completion_token_ids"]]
    try:
        buffer = array("i", ids)
    except (TypeError, OverflowError):
        buffer = None  # the check of each turn says which id is none
    for stretch in row["metadata"]["turns"]:
        start, end = stretch["start"], stretch["end"]
        prompt = list(ids[:start]) if buffer is None else TokenIds(buffer, start)
        logps = row["per_token_logps"][start - start_of_completion : end - start_of_completion]
        said = (prompt, list(ids[start:end]), logps, stretch["policy_versions"])
        yield _turn(stretch["turn_id"], stretch["index"], *said, shaped=stretch.get("shaped", False))


def _turn(
    turn_id: str,
    index: int,
    prompt_ids_P: list[int] | TokenIds,
    completion_ids_T: list[int],
    logprobs_T: list[float | None],
    spans: Sequence[Mapping[str, Any]],
    *,
    shaped: bool,
) -> Turn:
    return Turn(
        turn_id=turn_id,
        session_id="",
        index=index,
        dialect="",
        request={},
        requested_sampling={},
        sampling={},
        prompt_ids_P=prompt_ids_P,
        completion_ids_T=completion_ids_T,
        logprobs_T=logprobs_T,
        version_spans=[VersionSpan(s["version"], s["start"], s["end"]) for s in spans],
        message={},
        finish_reason=None,
        status=TurnStatus.OK,
        role=TurnRole.AGENT,
        findings=[Finding(Severity.WARN, SHAPED, "")] if shaped else [],
    )


class _Untrainable(Exception):
    """Why a turn's sampled tokens must not be trained on."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def _check(turn: Turn, mask_T: list[int] | None) -> _Sampled:
    if not turn.prompt_ids_P:
        raise _Untrainable("no_prompt_ids", "the engine did not report the prompt's token ids")
    try:
        prompt = TokenIds.of(turn.prompt_ids_P)
        packed(turn.completion_ids_T)
        if bool in set(map(type, turn.completion_ids_T)):
            raise ValueError("a list of numbers takes True for 1")
    except ValueError:
        raise _bad_id([*turn.prompt_ids_P, *turn.completion_ids_T]) from None
    if len(turn.logprobs_T) != len(turn.completion_ids_T):
        raise _Untrainable(
            "misaligned", f"{len(turn.completion_ids_T)} sampled ids, {len(turn.logprobs_T)} log-probabilities"
        )
    logprobs_T = [_logprob(value, i) for i, value in enumerate(turn.logprobs_T)]
    mask_T = [1] * len(logprobs_T) if mask_T is None else mask_T
    if len(mask_T) != len(logprobs_T):
        raise _Untrainable("misaligned", f"{len(logprobs_T)} sampled ids, a loss mask of {len(mask_T)}")
    return _Sampled(replace(turn, prompt_ids_P=prompt), logprobs_T, _versions(turn), mask_T)


def _bad_id(ids: Sequence[Any]) -> _Untrainable:
    bad = [(i, token) for i, token in enumerate(ids) if type(token) is not int or not 0 <= token < 2**31]
    position, token = bad[0]
    return _Untrainable("bad_token_id", f"{token!r} at position {position} is no token id")


def _logprob(value: float | None, position: int) -> float:
    if value is None or not is_logprob(value):
        above = isinstance(value, float) and value > 0
        problem = "is above 0" if above else "is not a finite value"
        raise _Untrainable("bad_logprob", f"log-probability {value} of sampled token {position} {problem}")
    return min(float(value), 0.0)


def _versions(turn: Turn) -> list[int]:
    """Policy version of each sampled token; raises unless the spans cover all of them once, in order."""
    versions_T: list[int] = []
    for span in turn.version_spans:
        match = _VERSION.fullmatch(span.version)
        if match is None:
            raise _Untrainable("unknown_version", f"policy version {span.version!r} is not of the form v<number>")
        if span.start != len(versions_T) or span.end < span.start:
            raise _Untrainable(
                "bad_version_spans",
                f"the span [{span.start}, {span.end}) of {span.version} does not start at {len(versions_T)}",
            )
        versions_T.extend([int(match[1])] * (span.end - span.start))
    if len(versions_T) != len(turn.completion_ids_T):
        raise _Untrainable(
            "bad_version_spans",
            f"policy versions are known for {len(versions_T)} of {len(turn.completion_ids_T)} sampled tokens",
        )
    return versions_T


def _row(leaf: _Sampled, trained: list[_Sampled]) -> Row:
    ids_N = [*leaf.turn.prompt_ids_P, *leaf.turn.completion_ids_T]
    num = len(ids_N)
    row = Row(
        ids_N=ids_N,
        mask_N=[0] * num,
        logprobs_N=[0.0] * num,
        versions_N=[-1] * num,
        turn_ids=[sampled.turn.turn_id for sampled in trained],
        is_shaped=any(sampled.turn.is_shaped for sampled in trained),
    )
    for sampled in trained:
        start = len(sampled.turn.prompt_ids_P)
        end = start + len(sampled.turn.completion_ids_T)
        row.mask_N[start:end] = sampled.mask_T
        row.logprobs_N[start:end] = [lp if m else 0.0 for lp, m in zip(sampled.logprobs_T, sampled.mask_T, strict=True)]
        row.turn_spans.append((start, end))
        row.versions_N[start:end] = [v if m else -1 for v, m in zip(sampled.versions_T, sampled.mask_T, strict=True)]
    return row


def _rewritten(node: Node) -> Finding:
    assert node.fork is not None
    return Finding(
        Severity.INFO,
        "context_rewritten",
        f"turn {node.turn_id} has a row of its own: it differs from turn {node.fork.turn_id} from position"
        f" {node.fork.position} on ({node.fork.reason})",
    )

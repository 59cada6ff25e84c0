"""A rollout's model calls in a few words each: who made them, how they hang together, what they came to.

Owns the summary that the list of calls shows; `messages` has what was said, `traces` the tokens. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from capture_proxy.trace import is_trained
from capture_proxy.types import Turn, TurnRole
from harness_trainer.view.captures import Calls
from harness_trainer.view.messages import REPLY, message

_BEGINNING = 160  # characters of a reply
_NUM_LINEAGES = 8  # that are named; a first call may be on hundreds


def summaries(calls: Calls) -> list[dict[str, Any]]:
    """In order of arrival. None = not known."""
    places = {turn.turn_id: turn.index for turn in calls.turns}
    lineages = _lineages(calls)
    return [{**_shape(turn, calls, places, lineages), **_course(turn, calls)} for turn in calls.turns]


def _lineages(calls: Calls) -> dict[str, list[int]]:
    """The numbers of the lineages that each turn is on: a path from a first call to a last one, told by token ids."""
    found: dict[str, list[int]] = {}
    for number, path in enumerate(calls.graph.lineages):
        for turn_id in path:
            found.setdefault(turn_id, []).append(number)
    return found


def _shape(turn: Turn, calls: Calls, places: dict[str, int], lineages: dict[str, list[int]]) -> dict[str, Any]:
    """Where it stands among the others."""
    node = calls.graph.nodes[turn.turn_id]
    fork = node.fork
    return {
        "index": turn.index,
        "turn_id": turn.turn_id,
        "is_side": turn.role is TurnRole.SIDE,
        "side_reason": turn.side_reason,
        "parent": None if node.parent is None else places[node.parent],
        "fork": fork and {"position": fork.position, "index": places[fork.turn_id], "reason": fork.reason},
        "lineages": lineages.get(turn.turn_id, [])[:_NUM_LINEAGES],
        "prompt_by": "continued by ids" if turn.bridged_from else "rendered",
        "bridge_refusal": turn.bridge_refusal,
    }


def _course(turn: Turn, calls: Calls) -> dict[str, Any]:
    """What happened in it."""
    reply = message(turn, REPLY, calls.mask)
    started = turn.started_at or None
    first = turn.first_token_at
    model = turn.request.get("model")
    return {
        "status": turn.status.value,
        "error": None if turn.error is None else calls.mask(turn.error),
        "finish_reason": turn.finish_reason,
        "num_prompt_tokens": len(turn.prompt_ids_P) or None,
        "num_sampled_tokens": len(turn.completion_ids_T) if turn.capture_level == "tokens" else None,
        "trainable": is_trained(turn),
        "mean_logprob": _mean(turn.logprobs_T),
        "policy_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in turn.version_spans],
        "started_at": started,
        "seconds": turn.finished_at - started if started and turn.finished_at else None,
        "first_token_s": max(0.0, first - started) if started and first is not None else None,
        "dialect": turn.dialect,
        "model": model if isinstance(model, str) else None,
        "calls": [name for name, _ in reply.calls],
        "begins": reply.text[:_BEGINNING],
        "findings": [f"{one.severity.value} {one.code}: {one.detail}" for one in turn.findings],
    }


def _mean(logprobs: Sequence[float | None]) -> float | None:
    """None = there are none, or not all are known."""
    known = [value for value in logprobs if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known and len(known) == len(logprobs) else None


def version_of_each(turn: Turn) -> list[str | None]:
    """The policy that sampled each token; None = not known."""
    versions: list[str | None] = [None] * len(turn.completion_ids_T)
    for span in turn.version_spans:
        for place in range(max(0, span.start), min(span.end, len(versions))):
            versions[place] = span.version
    return versions

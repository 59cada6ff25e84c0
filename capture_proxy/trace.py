"""A capture as training data: OpenEnv's `TrainingTrace`, and the JSON that the admin port serves.

Owns which tokens of a capture may be trained (the loss mask) and how that is said to OpenEnv, call by call or row by
row. Roles come from `graph`, findings on the whole from `report`, the JSON form from `codec`. OpenEnv is imported only
when a trace is asked for: it takes seconds. Called by `gateway`, `admin_client`, `export` and the trainer.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from capture_proxy import codec, openenv_types
from capture_proxy.graph import Graph, assign_roles, build
from capture_proxy.ids import TokenIds, packed
from capture_proxy.report import Report, report
from capture_proxy.types import Capture, Turn, TurnRole

if TYPE_CHECKING:
    from openenv.core.harness.training import TrainingTrace, TrainingTurn

# vLLM clamps -inf to -9999 before JSON; no sampled token is really that improbable.
SENTINEL_LOGPROB = -9000.0
# Processed log-probabilities of a near-certain token may round to just above 0; more than this is a fault.
MAX_ROUNDING_LOGPROB = 1e-3
# `metadata["form"]` of a turn that stands for a whole lineage.
LINEAGE = "lineage"


def to_training_trace(capture: Capture) -> TrainingTrace:
    """The capture as OpenEnv's validated trace, one turn per call, in order of arrival. Quadratic in a session.

    Only trainable turns get mask 1, and on every sampled id. A turn whose log-probabilities are not all known carries
    0.0 in their place (the validator wants finite numbers) with mask 0 and the finding in its metadata. Turns that
    have no prompt ids cannot be expressed and are left out; the capture keeps them.
    """
    types = openenv_types.training()
    graph = assign_roles(capture.turns)
    turns = [
        types.TrainingTurn(
            node_id=turn.turn_id,
            prompt_token_ids=list(turn.prompt_ids_P),
            completion_token_ids=turn.completion_ids_T,
            per_token_logps=_finite(turn),
            loss_mask=loss_mask(turn),
            request=turn.request,
            response=_response(turn),
            metadata=_metadata(turn, graph, capture.session.session_id),
        )
        for turn in sorted(capture.turns, key=lambda t: t.index)
        if turn.prompt_ids_P
    ]
    if turns:
        turns[0].metadata["rollout"] = _report_to_dict(_report(capture, graph))
    return cast("TrainingTrace", types.TrainingTrace(turns=turns))


def to_row_trace(capture: Capture) -> TrainingTrace:
    """The trained part of a capture as OpenEnv's validated trace, one turn per lineage: linear in a session.

    The prompt of such a turn is that of the lineage's first call, its completion everything that the engine saw and
    sampled after it. The mask is 1 on the ids that were sampled by a trainable turn and are in no earlier row;
    elsewhere it is 0 and the log-probability 0.0. `metadata["turns"]` says which turn each trained stretch is of, as
    positions in prompt + completion, and who sampled it; request and response are those of the last call.
    """
    types = openenv_types.training()
    graph = assign_roles(capture.turns)
    sound = trained_turns(capture)
    lineages = build(list(sound.values())).lineages
    rows, done = [], set[str]()
    for path in lineages:
        trained = [sound[turn_id] for turn_id in path if turn_id not in done]
        rows.append(_lineage(sound[path[0]], sound[path[-1]], trained, capture.session.session_id))
        done.update(path)
    if rows:
        summed_up = report(capture.turns, graph, lineages)
        rows[0].metadata["rollout"] = _report_to_dict(summed_up)
    return cast("TrainingTrace", types.TrainingTrace(turns=rows))


def trained_turns(capture: Capture) -> dict[str, Turn]:
    """The turns whose sampled ids may be trained, by id, in order of arrival; roles must be decided.

    Of a turn that is held twice the first counts.
    """
    sound: dict[str, Turn] = {}
    for turn in sorted(capture.turns, key=lambda t: t.index):
        if turn.turn_id not in sound and is_trained(turn):
            sound[turn.turn_id] = turn
    return sound


def is_trained(turn: Turn) -> bool:
    """Whether the turn is trainable and its numbers are beyond doubt: real ids, one real log-probability for each."""
    if not turn.trainable or not turn.prompt_ids_P or len(turn.logprobs_T) != len(turn.completion_ids_T):
        return False
    try:
        TokenIds.of(turn.prompt_ids_P)
        packed(turn.completion_ids_T)
    except ValueError:
        return False
    # A list of numbers takes True for 1.
    return bool not in set(map(type, turn.completion_ids_T)) and all(map(is_logprob, turn.logprobs_T))


def is_logprob(value: Any) -> bool:
    """Whether this can be the log-probability of a sampled token; just above 0 is rounding."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and SENTINEL_LOGPROB < value <= MAX_ROUNDING_LOGPROB
    )


def loss_mask(turn: Turn) -> list[int]:
    """0/1 over prompt plus completion (length P + T); 1 on each sampled id of a turn that is trained."""
    return [0] * len(turn.prompt_ids_P) + [int(is_trained(turn))] * len(turn.completion_ids_T)


def capture_to_json(capture: Capture) -> dict[str, Any]:
    """The capture as JSON values, roles decided over the whole session; the session's token stays out.

    Each turn is told in terms of an earlier one (`base`, its place in the list), so the size is linear in a session.
    """
    graph = assign_roles(capture.turns)
    encoder = codec.Encoder()
    turns = []
    for place, turn in enumerate(sorted(capture.turns, key=lambda t: t.index)):
        encoded = encoder.encode(turn)
        encoder.remember(turn, place)
        turns.append(
            {
                "base": encoded.base,
                "num_shared_ids": encoded.num_shared,
                "prompt_ids": encoded.new_ids.tolist(),
                "completion_ids": turn.completion_ids_T,
                "logprobs": turn.logprobs_T,
                "turn": encoded.body,
            }
        )
    session = codec.session_to_dict(capture.session)
    return {
        "version": 2,
        "session": {**session, "token": ""},
        "turns": turns,
        "rollout": _report_to_dict(_report(capture, graph)),
    }


def capture_from_json(data: dict[str, Any]) -> Capture:
    """Reads versions 1 and 2. Raises KeyError, TypeError or ValueError for what `capture_to_json` did not make."""
    session = codec.session_from_dict(data["session"]) if data.get("version") in (1, 2) else None
    if session is None:
        raise ValueError(f"capture version {data.get('version')!r} is not 1 or 2")
    if data["version"] == 1:
        return Capture(session, [codec.turn_from_dict(t) for t in data["turns"]])
    decoder = codec.Decoder()
    turns = [
        decoder.decode(
            place,
            turn["base"],
            turn["num_shared_ids"],
            array("i", turn["prompt_ids"]),
            turn["turn"],
            turn["completion_ids"],
            turn["logprobs"],
        )
        for place, turn in enumerate(data["turns"])
    ]
    return Capture(session, turns)


def summary(capture: Capture) -> dict[str, int]:
    """How many turns there are of each kind, e.g. {"agent": 5, "side": 1, "trainable": 5}."""
    assign_roles(capture.turns)
    agent = [turn for turn in capture.turns if turn.role is TurnRole.AGENT]
    return {
        "agent": len(agent),
        "side": len(capture.turns) - len(agent),
        "trainable": sum(turn.trainable for turn in agent),
    }


def rollout_report(capture: Capture) -> Report:
    """Findings on the rollout as a whole, and what it amounts to."""
    return _report(capture, assign_roles(capture.turns))


def _report(capture: Capture, graph: Graph) -> Report:
    return report(capture.turns, graph, build(list(trained_turns(capture).values())).lineages)


def _report_to_dict(summed_up: Report) -> dict[str, Any]:
    return {
        "capture_level": summed_up.capture_level,
        "turns": summed_up.num_turns,
        "side_turns": summed_up.num_side_turns,
        "trained_turns": summed_up.num_trained_turns,
        "rows": summed_up.num_rows,
        "rows_per_turn": summed_up.rows_per_turn,
        "findings": [{"severity": f.severity.value, "code": f.code, "detail": f.detail} for f in summed_up.findings],
    }


def _lineage(root: Turn, leaf: Turn, trained: Sequence[Turn], session_id: str) -> TrainingTurn:
    ids = [*leaf.prompt_ids_P, *leaf.completion_ids_T]
    start = len(root.prompt_ids_P)
    mask, logps = [0] * len(ids), [0.0] * len(ids)
    for turn in trained:
        first, end = _span(turn)
        mask[first:end] = [1] * (end - first)
        logps[first:end] = _finite(turn)
    row: TrainingTurn = openenv_types.training().TrainingTurn(
        node_id=leaf.turn_id,
        prompt_token_ids=ids[:start],
        completion_token_ids=ids[start:],
        per_token_logps=logps[start:],
        loss_mask=mask,
        request=leaf.request,
        response=_response(leaf),
        metadata={"form": LINEAGE, "session_id": session_id, "turns": [_stretch(turn) for turn in trained]},
    )
    return row


def _span(turn: Turn) -> tuple[int, int]:
    """Where the sampled ids are in prompt + completion."""
    return len(turn.prompt_ids_P), len(turn.prompt_ids_P) + len(turn.completion_ids_T)


def _stretch(turn: Turn) -> dict[str, Any]:
    start, end = _span(turn)
    return {
        "turn_id": turn.turn_id,
        "index": turn.index,
        "start": start,
        "end": end,
        "finish_reason": turn.finish_reason,
        "policy_versions": _versions(turn),
        **({"shaped": True} if turn.is_shaped else {}),  # not of the plain softmax
    }


def _versions(turn: Turn) -> list[dict[str, Any]]:
    return [{"version": s.version, "start": s.start, "end": s.end} for s in turn.version_spans]


def _response(turn: Turn) -> dict[str, Any]:
    return {"choices": [{"message": turn.message, "finish_reason": turn.finish_reason}]}


def _finite(turn: Turn) -> list[float]:
    """One number per sampled id, as the validator wants it: 0.0 for what is unknown."""
    if len(turn.logprobs_T) != len(turn.completion_ids_T):
        return [0.0] * len(turn.completion_ids_T)
    return [min(float(x), 0.0) if x is not None and math.isfinite(x) else 0.0 for x in turn.logprobs_T]


def _metadata(turn: Turn, graph: Graph, session_id: str) -> dict[str, Any]:
    node = graph.nodes[turn.turn_id]
    fork = node.fork
    return {
        "session_id": session_id,
        "index": turn.index,
        "dialect": turn.dialect,
        "role": turn.role.value,
        "side_reason": turn.side_reason,
        "status": turn.status.value,
        "error": turn.error,
        "parent": node.parent,
        "fork": fork and {"position": fork.position, "turn_id": fork.turn_id, "reason": fork.reason},
        "bridged_from": turn.bridged_from,
        "bridge_refusal": turn.bridge_refusal,
        "capture_level": turn.capture_level,
        "policy_versions": _versions(turn),
        "sampling": turn.sampling,
        "requested_sampling": turn.requested_sampling,
        "findings": [{"severity": f.severity.value, "code": f.code, "detail": f.detail} for f in turn.findings],
    }

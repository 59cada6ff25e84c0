"""Captures in the forms that other programs read: ATIF trajectories and training rows in parquet or `datasets`.

Owns how a capture is said in each form. OpenEnv's own form is `trace`'s. What it says is what was recorded; nothing is
tokenised or decoded. `pyarrow` and `datasets` are imported only where a file is written. Called by the command line.

ATIF is Harbor's Agent Trajectory Interchange Format (its RFC 0001), version 1.7: the one that names a trajectory apart
from its session, and counts a step's model calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from capture_proxy.graph import assign_roles, build
from capture_proxy.trace import is_trained
from capture_proxy.types import Capture, Turn, TurnRole, TurnStatus

ATIF_VERSION = "ATIF-v1.7"


def to_atif(
    capture: Capture, *, agent: str = "unknown", version: str = "unknown", **about: Any
) -> list[dict[str, Any]]:
    """One trajectory per lineage of the agent's finished turns, the one with most turns first; `about` goes in `extra`.

    A step's metrics hold the exact ids of its prompt, so a trajectory is quadratic in its turns. Steps that an earlier
    trajectory holds too are marked as copied context. Side calls and abandoned attempts are left out.
    """
    assign_roles(capture.turns)
    turns = {t.turn_id: t for t in capture.turns if t.role is TurnRole.AGENT and t.status is TurnStatus.OK}
    paths = sorted(build(list(turns.values())).lineages, key=len, reverse=True)
    told: set[str] = set()
    trajectories = []
    for number, path in enumerate(paths):
        trajectory = _trajectory([turns[t] for t in path], told, (agent, version))
        name = capture.session.session_id
        trajectory |= {"session_id": name, "trajectory_id": f"{name}-{number}"}
        trajectory["extra"] = {"labels": capture.session.labels, **about}
        trajectories.append(trajectory)
        told.update(path)
    return trajectories


def training_rows(trace: Mapping[str, Any], **about: Any) -> list[dict[str, Any]]:
    """The rows of an OpenEnv `TrainingTrace` (JSON data of `trace`), one dict per turn of it, `about` on each.

    For SFT: `messages` (chat messages, the reply last) and `tools` (JSON). For offline RL: `input_ids`, `loss_mask`,
    `logprobs` (nats, 0.0 where the mask is 0), `version_spans` in positions of the row, and what `about` says: reward,
    task, outcome. Rows without a trained id are left out.
    """
    rows = []
    for number, turn in enumerate(trace["turns"]):
        if not any(turn["loss_mask"]):
            continue
        num_prompt = len(turn["prompt_token_ids"])
        logprobs = [0.0] * num_prompt + list(turn["per_token_logps"])
        request, choices = turn.get("request") or {}, (turn.get("response") or {}).get("choices") or []
        messages = [*(request.get("messages") or []), *(choice["message"] for choice in choices[:1])]
        rows.append(
            {
                **about,
                "row": number,
                "node_id": turn["node_id"],
                "input_ids": [*turn["prompt_token_ids"], *turn["completion_token_ids"]],
                "loss_mask": list(turn["loss_mask"]),
                "logprobs": [p if m else 0.0 for p, m in zip(logprobs, turn["loss_mask"], strict=True)],
                "version_spans": _version_spans(turn, num_prompt),
                "messages": [_flat(m) for m in messages if isinstance(m, dict)],
                "tools": orjson.dumps(request.get("tools") or []).decode(),
            }
        )
    return rows


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """One JSON object a line; returns how many. Raises OSError."""
    count = 0
    with path.open("wb") as file:
        for row in rows:
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count


def write_parquet(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """A parquet file of `training_rows`, a few rows in memory at a time; returns how many. Raises OSError."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    schema, count = _schema(), 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in _batches(rows):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def write_dataset(rows: Iterable[dict[str, Any]], folder: Path) -> int:
    """A `datasets` folder (`load_from_disk` reads it) of `training_rows`; returns how many.

    Raises OSError, and ValueError when there is no row: `datasets` cannot load an empty folder.
    """
    import datasets
    import pyarrow as pa

    tables = [pa.Table.from_pylist(batch, schema=_schema()) for batch in _batches(rows)]
    if not tables:
        raise ValueError("there is no row to write: nothing that was captured may be trained")
    table = pa.concat_tables(tables)
    datasets.Dataset(table).save_to_disk(folder)
    return int(table.num_rows)


def _batches(rows: Iterable[dict[str, Any]], size: int = 64) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _schema() -> Any:
    """Fixed, so that files of different runs can be joined and a column of nulls keeps its type."""
    import pyarrow as pa

    text, whole = pa.string(), pa.int32()
    span = pa.struct([("version", text), ("start", whole), ("end", whole)])
    function = pa.struct([("name", text), ("arguments", text)])
    call = pa.struct([("id", text), ("type", text), ("function", function)])
    names = ("role", "content", "reasoning_content", "tool_call_id", "name")
    message = pa.struct([*((name, text) for name in names), ("tool_calls", pa.list_(call))])
    return pa.schema(
        [
            *((name, text) for name in ("rollout_id", "task", "harness", "outcome")),
            ("group_id", pa.int64()),
            ("reward", pa.float64()),  # null = could not be scored, never 0
            ("row", whole),
            ("node_id", text),
            ("input_ids", pa.list_(whole)),
            ("loss_mask", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float64())),
            ("version_spans", pa.list_(span)),
            ("messages", pa.list_(message)),
            ("tools", text),
        ]
    )


def _version_spans(turn: Mapping[str, Any], num_prompt: int) -> list[dict[str, Any]]:
    metadata = turn.get("metadata") or {}
    stretches = metadata.get("turns") or [
        {"start": num_prompt, "policy_versions": metadata.get("policy_versions") or []}
    ]
    return [
        {"version": span["version"], "start": s["start"] + span["start"], "end": s["start"] + span["end"]}
        for s in stretches
        for span in s["policy_versions"]
    ]


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message in the columns of the schema; content parts become their text."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    calls = [
        {
            "id": call.get("id"),
            "type": call.get("type") or "function",
            "function": {"name": call["function"].get("name"), "arguments": _text(call["function"].get("arguments"))},
        }
        for call in message.get("tool_calls") or []
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]
    return {
        "role": message.get("role"),
        "content": content,
        "reasoning_content": message.get("reasoning_content") or message.get("reasoning"),
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
        "tool_calls": calls,
    }


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


# --- ATIF


def _trajectory(path: Sequence[Turn], told: set[str], agent: tuple[str, str]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    seen = 0  # messages of the conversation that are steps already
    for turn in path:
        messages = [m for m in turn.request.get("messages") or [] if isinstance(m, dict)]
        first = len(steps)
        for message in messages[seen:]:
            _add_message(steps, message, turn)
        steps.append(_agent_step(turn))
        if turn.turn_id in told:
            for step in steps[first:]:
                step["is_copied_context"] = True
        seen = len(messages) + 1  # the reply comes back as the next message
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    models = [turn.request.get("model") for turn in path if turn.request.get("model")]
    return {
        "schema_version": ATIF_VERSION,
        "agent": {"name": agent[0], "version": agent[1], "model_name": models[0] if models else None},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(len(t.prompt_ids_P) for t in path),
            "total_completion_tokens": sum(len(t.completion_ids_T) for t in path),
            "total_steps": len(steps),
        },
    }


def _add_message(steps: list[dict[str, Any]], message: Mapping[str, Any], turn: Turn) -> None:
    """A message of the request: a step of its own, or a result of the step before it."""
    role, text = message.get("role"), _flat(message)["content"] or ""
    if role == "tool" and steps and steps[-1]["source"] == "agent":
        known = {call["tool_call_id"] for call in steps[-1].get("tool_calls") or []}
        call_id = message.get("tool_call_id")
        result = {"source_call_id": call_id if call_id in known else None, "content": text}
        steps[-1].setdefault("observation", {"results": []})["results"].append(result)
        return
    source = {"system": "system", "developer": "system", "assistant": "agent"}.get(str(role), "user")
    step: dict[str, Any] = {"step_id": 0, "timestamp": _time(turn.started_at), "source": source, "message": text}
    if source == "agent":  # few-shot examples, and replies that the agent rewrote
        step |= _said(message) | {"extra": {"sampled": False}}
    steps.append(step)


def _agent_step(turn: Turn) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": len(turn.prompt_ids_P),
        "completion_tokens": len(turn.completion_ids_T),
    }
    if turn.prompt_ids_P and turn.completion_ids_T:
        metrics |= {
            "prompt_token_ids": list(turn.prompt_ids_P),
            "completion_token_ids": list(turn.completion_ids_T),
        }
    if turn.logprobs_T and all(x is not None for x in turn.logprobs_T):
        metrics["logprobs"] = list(turn.logprobs_T)
    extra = {
        "turn_id": turn.turn_id,
        "finish_reason": turn.finish_reason,
        "trained": is_trained(turn),
        "policy_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in turn.version_spans],
    }
    return {
        "step_id": 0,
        "timestamp": _time(turn.finished_at),
        "source": "agent",
        "message": _flat(turn.message)["content"] or "",
        **_said(turn.message),
        "metrics": metrics,
        "llm_call_count": 1,
        "extra": extra,
    }


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    """Reasoning and tool calls of an assistant message, where it has any."""
    said: dict[str, Any] = {}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        said["reasoning_content"] = reasoning
    flat = _flat(message)["tool_calls"]
    if flat:
        said["tool_calls"] = [
            {
                "tool_call_id": call["id"] or f"call_{number}",
                "function_name": call["function"]["name"] or "",
                "arguments": _object(call["function"]["arguments"]),
            }
            for number, call in enumerate(flat)
        ]
    return said


def _object(arguments: str) -> dict[str, Any]:
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"text": arguments}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")

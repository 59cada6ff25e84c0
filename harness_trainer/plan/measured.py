"""What a run that was made says of the next one: its metrics.jsonl and store, read as numbers of a `Workload`.

Owns reading only. The first step is left out where there are others: it waits for the first rollouts and warms up.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capture_proxy.call_times import call_times
from capture_proxy.errors import StoreError
from capture_proxy.store import load_capture, load_sessions
from capture_proxy.types import Turn, TurnRole
from harness_trainer.errors import RunDirError
from harness_trainer.plan.amounts import Number
from harness_trainer.rundir import RunDir

Line = dict[str, Any]
_CAPTURES = 32  # that are read: the newest


def read_run(folder: Path) -> dict[str, Number]:
    """Names as in `Workload`; what the run does not tell is left out. Raises RunDirError where there is no run."""
    run = RunDir(folder)
    lines = read_steps(run.metrics)
    why = f"{folder.name}, {len(lines)} steps"
    found = numbers_of(lines, why)
    num_rollouts, call_s = _calls(run.store)
    if num_rollouts and call_s is not None:
        in_calls = call_s / num_rollouts
        found["engine_s"] = _number(in_calls, f"{why}, {num_rollouts} rollouts")
        place_s = _mean(lines, _place_s)
        if place_s is not None:
            found["agent_s"] = _number(max(0.0, place_s - in_calls), f"{why}: their seconds outside model calls")
    return {**found, **_prompts(run.store)}


def numbers_of(lines: Sequence[Line], why: str) -> dict[str, Number]:
    """What these steps tell of themselves."""
    return {name: _number(value, why) for name, value in _of_steps(lines).items() if value is not None}


def read_steps(path: Path) -> list[Line]:
    """The steps that count. Raises RunDirError."""
    try:
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
        lines: list[Line] = [json.loads(line) for line in whole.splitlines()]
    except (OSError, ValueError) as error:
        raise RunDirError(f"{path} cannot be read ({error}): --from-run takes the folder of a run with steps") from None
    if not lines:
        raise RunDirError(f"{path} has no step yet: --from-run takes the folder of a run with at least two")
    return lines[1:] or lines


def _of_steps(lines: Sequence[Line]) -> dict[str, float | None]:
    rollouts, turns = _sum(lines, "num_rollouts"), _mean(lines, lambda line: line["metrics"].get("rollout/turns_mean"))
    sampled = _mean(lines, lambda line: line["metrics"].get("completions/mean_length"))
    forwarded, computing = _sum(lines, "forwarded_tokens"), _sum(lines, "fwd_bwd_s")
    groups = _sum(lines, "num_groups")
    dropped = sum(sum((line.get("dropped") or {}).values()) for line in lines)
    return {
        "turns": turns,
        "reply_tokens": None if sampled is None or not turns else sampled / turns,
        "forwarded": None if forwarded is None or not rollouts else forwarded / rollouts,
        "learner_tokens_s": None if forwarded is None or not computing else forwarded / computing,
        "step_s": _mean(lines, _rest_s),
        "kept": None if not groups else groups / (groups + dropped),
    }


def _rest_s(line: Line) -> float | None:
    """Of a step, what is neither waiting nor forward and backward."""
    parts = [line.get(name) for name in ("step_s", "wait_s", "fwd_bwd_s")]
    if any(part is None for part in parts):
        return None
    step_s, wait_s, fwd_bwd_s = parts
    return max(0.0, float(step_s) - float(wait_s) - float(fwd_bwd_s))  # type: ignore[arg-type]


def _place_s(line: Line) -> float | None:
    """Seconds that a rollout holds one of the places: all its stages but the wait for the place."""
    duration = line["metrics"].get("rollout/duration_s")
    queued = line["metrics"].get("stage/queue/mean_s")
    return None if duration is None else float(duration) - float(queued or 0.0)


def _calls(store: Path) -> tuple[int, float | None]:
    """Finished rollouts, and the seconds of all model calls that were recorded."""
    try:
        calls = call_times(store, 0)
        if calls is None:
            return 0, None
        db = sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=30)
        try:
            (number,) = db.execute("SELECT COUNT(*) FROM rollouts WHERE outcome IS NOT NULL").fetchone()
        finally:
            db.close()
    except sqlite3.Error as error:
        raise RunDirError(f"the run's store {store} cannot be read ({error}): give the folder of a run") from None
    return int(number), sum(call.finished_at - call.started_at for call in calls)


def _prompts(store: Path) -> dict[str, Number]:
    """Tokens of the first prompt, and of what comes between two calls, in the newest captures."""
    first: list[int] = []
    added: list[float] = []
    try:
        for session in load_sessions(store)[-_CAPTURES:]:
            capture = load_capture(store, session.session_id)
            turns = [] if capture is None else [turn for turn in capture.turns if _is_whole(turn)]
            if not turns:
                continue
            first.append(len(turns[0].prompt_ids_P))
            between = len(turns[-1].prompt_ids_P) - first[-1] - sum(len(t.completion_ids_T) for t in turns[:-1])
            if len(turns) > 1 and between >= 0:  # an agent that shortens its history tells nothing here
                added.append(between / (len(turns) - 1))
    except StoreError as error:
        raise RunDirError(f"{error}; give the folder of a whole run") from None
    found = {}
    if first:
        found["first_prompt"] = _number(statistics.fmean(first), f"{len(first)} captures")
    if added:
        found["new_tokens"] = _number(statistics.fmean(added), f"{len(added)} captures")
    return found


def _is_whole(turn: Turn) -> bool:
    return turn.role is TurnRole.AGENT and turn.capture_level == "tokens"


def _sum(lines: Sequence[Line], name: str) -> float | None:
    values = [line.get(name) for line in lines]
    return None if any(value is None for value in values) else float(sum(values))  # type: ignore[arg-type]


def _mean(lines: Sequence[Line], of: Callable[[Line], Any]) -> float | None:
    values = [value for value in map(of, lines) if value is not None]
    return statistics.fmean(values) if values else None


def _number(value: float, why: str) -> Number:
    return Number(value, "measured", why)

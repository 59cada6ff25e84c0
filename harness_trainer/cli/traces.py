"""`harness-trainer traces ls|show|export`: look at what a run captured, also while it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_trainer.display import cell
from harness_trainer.errors import ConfigError, RunDirError
from harness_trainer.rundir import RunDir

if TYPE_CHECKING:
    from harness_trainer.rollouts.store import RolloutStore
    from harness_trainer.rollouts.types import RolloutResult


FORMATS = {
    "openenv": "OpenEnv TrainingTrace, a turn per model call (JSON lines)",
    "atif": "Harbor's trajectory format, a document per conversation (JSON lines)",
    "jsonl": "training rows for SFT and offline RL (JSON lines)",
    "parquet": "the same rows as a parquet file",
    "hf": "the same rows as a folder for datasets.load_from_disk",
}
_FORMATS_HELP = "; ".join(f"{name}: {about}" for name, about in FORMATS.items())


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="harness-trainer traces")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, about in (
        ("ls", "one line per rollout"),
        ("show", "one rollout, turn by turn"),
        ("export", "what was captured, in a form that other programs read"),
    ):
        action = actions.add_parser(name, help=about, description=about)
        action.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
        if name == "show":
            action.add_argument("rollout", help="rollout id, or the start of one")
            action.add_argument("--ids", action="store_true", help="show token ids and log-probabilities too")
        if name == "export":
            action.add_argument("--format", choices=sorted(FORMATS), default="openenv", help=_FORMATS_HELP)
            action.add_argument("--out", type=Path, help="file (for hf: folder) to write; standard output if left out")
    options = parser.parse_args(argv)
    store = _open(options.run_dir)
    try:
        if options.action == "ls":
            _ls(store)
        elif options.action == "show":
            _show(store, RunDir(options.run_dir).store, options.rollout, ids=options.ids)
        else:
            export_traces(store, RunDir(options.run_dir).store, options.format, options.out)
    finally:
        store.close()
    return 0


def _open(run_dir: Path) -> RolloutStore:
    from harness_trainer.rollouts.store import RolloutStore

    path = RunDir(run_dir).store
    if not path.exists():
        raise RunDirError(
            f"{run_dir} holds no run (no store.sqlite): give --run-dir, or run `harness-trainer demo` first"
        )
    return RolloutStore(path)


def _ls(store: RolloutStore) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for title in ("rollout", "task", "harness", "outcome", "reward", "turns", "side", "tokens", "seconds", "why"):
        table.add_column(title, no_wrap=title != "why")
    for r in store.rollouts():
        values = (r.rollout_id, r.task, r.harness, r.outcome.value, r.reward, r.num_turns, r.num_side_turns)
        seconds = sum(r.stages_s.values())
        table.add_row(*(cell(v) for v in (*values, r.num_completion_tokens, round(seconds, 1))), r.detail)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)


def _one(store: RolloutStore, prefix: str) -> RolloutResult:
    found = store.find_rollout(prefix)
    if not found:
        raise ConfigError(f"no finished rollout starts with {prefix!r}: `harness-trainer traces ls` lists them")
    if len(found) > 1:
        ids = ", ".join(r.rollout_id for r in found[:5])
        raise ConfigError(f"{len(found)} rollouts start with {prefix!r} ({ids}, ...): give more of the id")
    return found[0]


def _show(store: RolloutStore, path: Path, prefix: str, *, ids: bool) -> None:
    result = _one(store, prefix)
    print(f"{result.rollout_id}  task {result.task}  {result.outcome}  reward {cell(result.reward)}  {result.detail}")
    for finding in result.findings:
        print(f"  finding: {finding}")
    for turn in (_calls(path, result) or {}).get("turns", []):
        _show_turn(turn, ids=ids)


def _calls(path: Path, result: RolloutResult) -> dict[str, Any] | None:
    """The rollout's trace with a turn per call, from the capture if the file has it; else the trace as it was kept."""
    from capture_proxy.store import load_capture
    from capture_proxy.trace import to_training_trace

    capture = load_capture(path, result.rollout_id)
    if capture is None or not capture.turns:
        return result.trace
    trace: dict[str, Any] = to_training_trace(capture).model_dump()
    return trace


def _show_turn(turn: dict[str, Any], *, ids: bool) -> None:
    num_prompt, num_sampled = len(turn["prompt_token_ids"]), len(turn["completion_token_ids"])
    trained = sum(turn["loss_mask"])
    print(f"\n-- turn {turn['node_id']}: {num_prompt} prompt tokens, {num_sampled} sampled, {trained} may be trained")
    print(f"   {json.dumps(turn['metadata'], ensure_ascii=False)}")
    messages = turn["request"].get("messages") or []
    for message in messages[-1:]:
        print(f"   {message.get('role')}: {message.get('content')}")
    for choice in turn["response"].get("choices") or []:
        print(f"   assistant: {json.dumps(choice.get('message'), ensure_ascii=False)}")
    if ids:
        print(f"   prompt ids: {turn['prompt_token_ids']}")
        print(f"   sampled ids: {turn['completion_token_ids']}")
        print(f"   log-probabilities: {[round(lp, 4) for lp in turn['per_token_logps']]}")


def export_traces(store: RolloutStore, path: Path, form: str, out: Path | None) -> None:
    """Every rollout that has a trace, one after the other, so that one is in memory at a time."""
    from capture_proxy import export

    if form in ("parquet", "hf"):
        if out is None:
            raise ConfigError(f"--format {form} needs --out: it is no text for standard output")
        write = export.write_parquet if form == "parquet" else export.write_dataset
        count = _written(out, lambda target: write(_rows(store), target))
    else:
        documents = {"openenv": _openenv, "atif": _atif}[form](store, path) if form != "jsonl" else _rows(store)
        if out is None:
            for document in documents:
                print(json.dumps(document, ensure_ascii=False))
            return
        count = _written(out, lambda target: export.write_jsonl(documents, target))
    print(f"{count} {'rows' if form in ('jsonl', 'parquet', 'hf') else 'traces'} written to {out}", file=sys.stderr)


def _written(out: Path, write: Callable[[Path], int]) -> int:
    try:
        return write(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _traced(store: RolloutStore) -> Iterator[RolloutResult]:
    for result in store.rollouts():
        whole = store.rollout(result.rollout_id)
        if whole.trace is not None:
            yield whole


def _about(result: RolloutResult) -> dict[str, Any]:
    about = {"rollout_id": result.rollout_id, "group_id": result.group_id, "task": result.task}
    return about | {"harness": result.harness, "outcome": result.outcome.value, "reward": result.reward}


def _openenv(store: RolloutStore, path: Path) -> Iterator[dict[str, Any]]:
    for result in _traced(store):
        yield {**_about(result), "training_trace": _calls(path, result)}


def _atif(store: RolloutStore, path: Path) -> Iterator[dict[str, Any]]:
    from capture_proxy.export import to_atif
    from capture_proxy.store import load_capture

    for result in _traced(store):
        capture = load_capture(path, result.rollout_id)
        if capture is None:
            print(f"{result.rollout_id} is left out: the file does not hold its model calls", file=sys.stderr)
            continue
        yield from to_atif(capture, agent=result.harness, **_about(result))


def _rows(store: RolloutStore) -> Iterator[dict[str, Any]]:
    from capture_proxy.export import training_rows

    for result in _traced(store):
        yield from training_rows(result.trace or {}, **_about(result))

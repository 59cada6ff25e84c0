"""How long it takes, and how much memory, to turn a long recorded rollout into training data.

A tool conversation of 400 tokens a turn is written to a real store turn by turn and read back: 75, 150 and 300 turns,
the last 120,000 tokens. Three shapes: a history that is only ever added to, one whose reasoning is dropped each turn
(every turn a row of its own), and one whose first line changes each turn. `python -m benchmarks.traces`.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from capture_proxy import trace
from capture_proxy.graph import assign_roles
from capture_proxy.store import Store, load_capture
from capture_proxy.types import Capture, Session, SessionPolicy, Turn, TurnRole, TurnStatus, VersionSpan
from harness_trainer.learner.rows import rows_from_trace

NUM_SAMPLED, NUM_ANSWERED = 100, 300  # tokens of a reply, and of the tool result after it
TOOLS = [{"type": "function", "function": {"name": f"tool{i}", "description": "x" * 400}} for i in range(10)]


def make_turn(index: int, prompt: list[int], messages: list[dict[str, Any]]) -> Turn:
    """One call whose reply is `NUM_SAMPLED` made-up tokens."""
    ids = [(index * 7919 + i) % 150_000 for i in range(NUM_SAMPLED)]
    message = {"role": "assistant", "content": "I will look at it. " * 20, "reasoning_content": "hm " * 40}
    return Turn(
        turn_id=f"r-{index:04d}",
        session_id="r",
        index=index,
        dialect="openai_chat",
        request={"model": "m", "messages": messages, "tools": TOOLS},
        requested_sampling={},
        sampling={"temperature": 1.0},
        prompt_ids_P=prompt,
        completion_ids_T=ids,
        logprobs_T=[-0.5 - i / 1000 for i in range(NUM_SAMPLED)],
        version_spans=[VersionSpan("v1", 0, NUM_SAMPLED)],
        message=message,
        finish_reason="tool_calls",
        status=TurnStatus.OK,
        role=TurnRole.AGENT,
    )


def session(num_turns: int, shape: str) -> list[Turn]:
    """`shape`: "extending", "reasoning dropped" (40 tokens of each reply leave the history) or "first line changes"."""
    turns: list[Turn] = []
    history = list(range(2000, 2000 + NUM_ANSWERED))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s" * 2000}, {"role": "user", "content": "go"}]
    for index in range(num_turns):
        prompt = [index, *history[1:]] if shape == "first line changes" else list(history)
        turn = make_turn(index, prompt, list(messages))
        body = f'{{"line":"{index:032d}","messages":"{"".join(m["content"] for m in messages)}"}}'
        turn.raw = body.encode()
        turn.bridged_from = turns[-1].turn_id if turns and shape == "extending" else None
        turns.append(turn)
        kept = turn.completion_ids_T[40:] if shape == "reasoning dropped" else turn.completion_ids_T
        history = [*history, *kept, *((index * 31 + i) % 150_000 for i in range(NUM_ANSWERED))]
        messages = [*messages, turn.message, {"role": "tool", "tool_call_id": "c", "content": "o" * 900}]
    return turns


async def write(turns: list[Turn], path: Path) -> list[float]:
    """Milliseconds that each turn took to be durable."""
    store, taken = Store.open(path), []
    owner = Session("r", "token", SessionPolicy(), {})
    for turn in turns:
        started = time.perf_counter()
        await store.put_turn(turn, owner)
        taken.append((time.perf_counter() - started) * 1e3)
    await store.close()
    return taken


def read(path: Path) -> Capture:
    capture = load_capture(path, "r")
    assert capture is not None
    return capture


def measured(work: Callable[[], Any], runs: int = 3) -> float:
    """Process seconds of the fastest run: the machine may be busy."""
    best = float("inf")
    for _ in range(runs):
        gc.collect()
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def peak_mib(work: Callable[[], Any]) -> float:
    gc.collect()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def whole(path: Path) -> int:
    """What a rollout goes through after its end: load, roles and graph, trace, rows. Returns the rows."""
    return len(rows_from_trace(trace.to_row_trace(read(path)).model_dump()).rows)


def main() -> None:
    trace.to_row_trace(Capture(Session("", "", SessionPolicy(), {}), []))  # OpenEnv's import is not what is measured
    columns = ("turns", "rows", "MiB on disk", "put ms first/last", "load s", "graph s", "trace s", "all s", "peak MiB")
    print(f"{'shape':<19} " + " ".join(f"{name:>{max(8, len(name))}}" for name in columns))
    for shape, sizes in (
        ("extending", (75, 150, 300)),
        ("reasoning dropped", (75, 150)),  # rows that repeat their context: what is trained is quadratic itself
        ("first line changes", (75, 150)),
    ):
        before = None
        for num_turns in sizes:
            with tempfile.TemporaryDirectory() as folder:
                before = show(shape, num_turns, Path(folder), before)
    print(
        f"peak of the process, libraries included: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
    )


def show(shape: str, num_turns: int, folder: Path, before: float | None) -> float:
    """Print one line; returns the seconds of the whole way, which the next line is compared with."""
    path = folder / "store.sqlite"
    taken = asyncio.run(write(session(num_turns, shape), path))
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    capture = read(path)
    load = measured(lambda: read(path))
    graph = measured(lambda: assign_roles(capture.turns))
    built = measured(lambda: trace.to_row_trace(capture))
    num_rows = whole(path)
    total = measured(lambda: whole(path))
    peak = peak_mib(lambda: whole(path)) if shape == "extending" else float("nan")
    put = f"{sorted(taken[:20])[10]:.2f}/{sorted(taken[-20:])[10]:.2f}"
    ratio = f"  {total / before:.1f} times" if before else ""
    print(
        f"{shape:<19} {num_turns:>8} {num_rows:>8} {size:>11.1f} {put:>17} {load:>8.3f} {graph:>8.3f} {built:>8.3f}"
        f" {total:>8.3f} {peak:>8.1f}{ratio}",
        flush=True,
    )
    return total


if __name__ == "__main__":
    main()

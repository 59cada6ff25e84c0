"""How fast the viewer answers over a large run, and what a run that writes meanwhile feels of it.

`python -m benchmarks.view_pages [--rollouts 10000]`. The run's store is made by the rooms that write one, groups of
8 attempts with a result and a training trace of 2,000 tokens each, 400 steps of metrics. Pages are asked for over HTTP,
one after the other; then a writer finishes rollouts with and without three browsers that follow the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult
from harness_trainer.rundir import RunDir

GROUP_SIZE, NUM_STEPS, NUM_TOKENS = 8, 400, 2_000
PAGES = ("/", "/api/overview", "/api/stamp", "/rollouts", "/rollouts?outcome=truncated&task=7", "/groups", "/api/steps")
OUTCOMES = (Outcome.OK, Outcome.OK, Outcome.OK, Outcome.TRUNCATED, Outcome.AGENT_FAILED, Outcome.INFRA_FAILED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "run")
        make_run(run, options.rollouts)
        print(f"store of {options.rollouts} rollouts: {run.store.stat().st_size / 1e6:.0f} MB")
        with served(run) as url, httpx.Client(base_url=url, timeout=60) as client:
            for page in PAGES:
                print(
                    f"{page:40} {1000 * median_s(client, page):7.0f} ms  {len(client.get(page).content) / 1000:7.0f} kB"
                )
            alone = write_s(run, options.rollouts)
            with followed(url):
                beside = write_s(run, options.rollouts + 200)
        print(
            f"a rollout finished in {1000 * alone:.1f} ms alone, {1000 * beside:.1f} ms beside three who follow the run"
        )


def make_run(run: RunDir, num_rollouts: int) -> None:
    for folder in (run.path, run.internal, run.artifacts, run.logs):
        folder.mkdir(parents=True)
    every: dict[str, Any] = {
        "reward_std": 0.3,
        "num_rollouts": 16,
        "loss": 0.1,
        "ratio_mean": 1.0,
        "kl": 0.001,
        "step_s": 30.0,
    }
    every["metrics"] = {f"m/{k}": 0.5 for k in range(120)}
    lines = [
        {"step": n, "policy_version": n + 1, "reward_mean": n / NUM_STEPS, **every} for n in range(1, NUM_STEPS + 1)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with closing(RolloutStore(run.store)) as store:
        store._db.execute("PRAGMA synchronous=OFF")  # of the making only
        for group_id in range(num_rollouts // GROUP_SIZE):
            store.open_group(group_id, f"task-{group_id % 97}", f"agent-{group_id % 3}")
            for slot in range(GROUP_SIZE):
                store.start_rollout(f"g{group_id:05d}-{slot}", group_id, slot, 0)
            store.finish_together([result(group_id, slot) for slot in range(GROUP_SIZE)])
            store.group_ready(group_id)


def result(group_id: int, slot: int) -> RolloutResult:
    outcome = OUTCOMES[(group_id + slot) % len(OUTCOMES)]
    reward = None if outcome is Outcome.INFRA_FAILED else slot / GROUP_SIZE
    ids = [(7 * n + slot) % 50_000 for n in range(NUM_TOKENS)]
    turn = {"prompt_token_ids": ids[:500], "completion_token_ids": ids[500:], "per_token_logps": [-0.5] * 1500}
    return RolloutResult(
        f"g{group_id:05d}-{slot}", group_id, f"task-{group_id % 97}", f"agent-{group_id % 3}", 0, outcome, reward,
        trace={"turns": [turn]}, detail="" if reward is not None else "the sandbox could not be had", num_turns=12,
        stages_s=dict.fromkeys(("queue", "prepare", "create", "setup", "agent", "capture", "verify", "stop"), 1.0),
        tool_calls={"bash": 11}, rewards={"tests": slot / GROUP_SIZE},
    )  # fmt: skip


@contextmanager
def served(run: RunDir) -> Iterator[str]:
    argv = [sys.executable, "-m", "harness_trainer.cli", "view", str(run.path), "--port", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().rpartition(" at ")[2].strip()
        with open(f"/proc/{process.pid}/status") as status:
            print("viewer:", next(line.split(":")[1].strip() for line in status if line.startswith("VmHWM")), "at most")
    finally:
        process.terminate()
        process.wait()


def median_s(client: httpx.Client, page: str) -> float:
    client.get(page).raise_for_status()
    times = []
    for _ in range(7):
        started = time.perf_counter()
        client.get(page).raise_for_status()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def write_s(run: RunDir, first: int) -> float:
    """Median seconds of one rollout's hand-over."""
    times = []
    with closing(RolloutStore(run.store)) as store:
        group_id = first // GROUP_SIZE + 1000
        store.open_group(group_id, "task", "agent")
        for slot in range(100):
            store.start_rollout(f"w{group_id}-{slot}", group_id, slot, 0)
            done = result(group_id, slot % GROUP_SIZE)
            done.rollout_id = f"w{group_id}-{slot}"
            started = time.perf_counter()
            store.finish_rollout(done, final=True)
            times.append(time.perf_counter() - started)
            time.sleep(0.05)
    return statistics.median(times)


@contextmanager
def followed(url: str) -> Iterator[None]:
    """Three browsers with the first page open: every two seconds each asks for it anew."""
    over = threading.Event()

    def follow() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not over.wait(2.0):
                client.get("/api/stamp")
                client.get("/?fragment=1")

    threads = [threading.Thread(target=follow) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()

"""`python -m benchmarks.ray_scale`: rollouts per hour with `--executor ray` on two simulated hosts, beside one.

Each host is a Ray node of a local cluster with `--slots` rollouts at once. The load is the agents': each calls the
model once (a scripted engine behind the real gateway) and then waits `--seconds` without computing, as an agent does
whose model is elsewhere. All else is real: runner, store, workers, sandboxes, verifiers. Measured from the end of the
first round to the end of the last, so that starting nodes and workers does not count; one host, two hosts, in the same
run. Exits with 1 below `GOAL`, and when a rollout is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import sys
import tempfile
from pathlib import Path

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.rollouts.store import RolloutStore
from tests.capture.serving import served
from tests.rollouts.ray_cluster import Nodes, RayBench
from tests.rollouts.rolling import CALL

GOAL = 1.8
_GROUP = 2


async def rate(folder: Path, nodes: Nodes, *, hosts: int, slots: int, seconds: float, rounds: int) -> float:
    """Rollouts per hour. Raises RuntimeError when one of them failed."""
    store = RolloutStore(folder / "store.sqlite")
    store.publish(1)
    at_once = hosts * slots
    wanted = at_once * (1 + rounds)
    async with served(ScriptedEngine("the moon", version="v1"), folder / "store.sqlite") as gateway:
        settings = {"group_size": _GROUP, "max_concurrent": at_once, "infra_retries": 0, "timeout_s": seconds + 600}
        groups = wanted // _GROUP
        run = RayBench(folder, gateway, store, nodes, max_open_groups=groups, num_groups=groups, **settings)
        agent = json.loads((folder / "agent.yaml").read_text())
        agent["argv"] = ["sh", "-c", f"{CALL}; sleep {seconds}"]
        (folder / "agent.yaml").write_text(json.dumps(agent))
        await run.start()
        try:
            while store.outcome_counts().get("ok", 0) < wanted:
                if run.process is None or not run.process.alive() or set(store.outcome_counts()) - {"ok", "running"}:
                    raise RuntimeError(f"{store.outcome_counts()}: {run.log()[-2000:]}")
                await asyncio.sleep(0.5)
        finally:
            await run.end()
            store.close()
    with sqlite3.connect(folder / "store.sqlite") as db:
        ends = sorted(end for (end,) in db.execute("SELECT finished_at FROM rollouts WHERE outcome = 'ok'"))
    first, last = ends[at_once - 1], ends[wanted - 1]
    return (wanted - at_once) / (last - first) * 3600


async def _measure(options: argparse.Namespace, folder: Path, nodes: Nodes) -> list[float]:
    found = []
    for hosts in (1, 2):
        nodes.add(options.slots)
        await asyncio.to_thread((folder / f"hosts-{hosts}").mkdir)
        one = await rate(
            folder / f"hosts-{hosts}",
            nodes,
            hosts=hosts,
            slots=options.slots,
            seconds=options.seconds,
            rounds=options.rounds,
        )
        load = " ".join(f"{average:.1f}" for average in os.getloadavg())
        print(f"{hosts} simulated host(s): {one:8.0f} rollouts/h   (load of the machine {load})", flush=True)
        found.append(one)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.ray_scale", description="Rollouts per hour, two hosts beside one."
    )
    parser.add_argument("--slots", type=int, default=4, help="rollouts at once on each host")
    parser.add_argument("--seconds", type=float, default=30.0, help="that each agent waits")
    parser.add_argument("--rounds", type=int, default=3, help="that are measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ray-scale-") as folder:
        nodes = Nodes(Path(folder))
        try:
            one, two = asyncio.run(_measure(options, Path(folder), nodes))
        finally:
            nodes.close()
    print(f"two hosts beside one: {two / one:.2f} times (goal: {GOAL})")
    return 0 if two / one >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

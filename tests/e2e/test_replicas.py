"""A run on two replicas of the engine: rollouts are spread and pinned, both engines get every version, and one of them
is killed while the other goes on. Everything is real but the engines, stand-ins that start in a second."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from capture_proxy.store import load_capture
from tests.e2e import stub_engine_server
from tests.e2e.test_restarts import ended, finish, start  # noqa: F401

NUM_STEPS = 9


def test_two_replicas_share_a_run_and_one_of_them_is_killed(tmp_path, ended):  # noqa: F811
    log = tmp_path / "sampled.jsonl"
    run = start(
        tmp_path,
        num_steps=NUM_STEPS,
        env={stub_engine_server.LOG: str(log)},
        **{
            "--engine.python": stub_engine_server.write_python(tmp_path),
            "--engine.replicas": 2,
            "--learner.verify-sync": "never",
            "--rollouts.max-concurrent": 4,
        },
    )
    ended(run)
    run.until(lambda: len(run.steps()) >= 1, "the first step")
    run.until(lambda: run.num_at_work() > 1, "agents are at work, to kill the second engine")
    pid = run.events("started", "engine-1")[-1]["pid"]
    os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]), signal.SIGKILL)
    run.until(lambda: len(run.events("started", "engine-1")) == 2, "the second engine runs again")
    run.kill_in_the_middle_of_a_step("runner", itself=False)
    run.kill_in_the_middle_of_a_step("gateway-1")
    finish(run, NUM_STEPS)
    assert [event["part"] for event in run.events("restart")] == ["engine-1", "runner", "gateway-1"]
    audit = [sys.executable, "-m", "harness_trainer.cli", "audit", str(run.path)]
    account = subprocess.run(audit, capture_output=True, text=True, timeout=120, check=False)
    assert account.returncode == 0, account.stdout

    sampled = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(call["version"].startswith("v") for call in sampled), "no call met an engine without a policy"
    versions = defaultdict(set)
    for call in sampled:
        versions[call["pid"]].add(call["version"])
    assert len(versions) == 3, "two engines, and the successor of one"
    newest = sorted(max(int(name[1:]) for name in seen) for seen in versions.values())
    assert newest[1] > newest[0] and newest[2] - newest[1] <= 3, "the successor has caught up, and kept up"

    store = run.store()
    try:
        results = [result for result in store.rollouts() if result.num_turns]
    finally:
        store.close()
    pinned = Counter(_gateway(run.path / "store.sqlite", result.rollout_id) for result in results)
    assert set(pinned) == {"", "gateway-1"} and 4 * min(pinned.values()) >= max(pinned.values()), pinned


def _gateway(store: Path, session_id: str) -> str:
    capture = load_capture(store, session_id)
    assert capture is not None
    return capture.session.gateway

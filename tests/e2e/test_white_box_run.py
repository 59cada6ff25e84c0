"""A whole run on a loop of one's own: real vLLM, real TRL, a tiny random model; three of its parts are killed once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.errors import SetupError
from harness_trainer.rollouts.store import RolloutStore
from tests.engine.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

LOOP = """
import asyncio

class Letters:
    \"\"\"Two turns; the share of letters in what was said, which differs from reply to reply of a random model.\"\"\"

    async def run(self, task, model):
        messages = [{"role": "user", "content": task.metadata["row"]["prompt"]}]
        said = ""
        for _ in range(2):
            reply = await model.chat(messages)
            text = reply.message["content"] or ""
            said += text
            messages += [reply.message, {"role": "user", "content": "Go on."}]
            await asyncio.sleep(0.2)
        return {"letters": sum(c.isalpha() for c in said) / max(1, len(said))}
"""
NUM_STEPS = 4


@pytest.fixture
def command(tmp_path):
    try:
        find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    model = make_tiny_model(tmp_path / "model", family="llama", tied=True)
    (tmp_path / "letters.py").write_text(LOOP)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in ("sun", "moon")))
    settings = {
        "--run-dir": tmp_path / "run",
        "--model": model.path,
        "--env": f"loop:{tmp_path / 'letters.py'}:Letters",
        "--tasks": rows,
        "--rollouts.group-size": 2,
        "--rollouts.max-concurrent": 2,
        "--rollouts.max-tokens": 12,
        "--learner.max-steps": NUM_STEPS,
        "--learner.groups-per-step": 1,
        "--learner.learning-rate": 0.01,
        "--learner.token-budget": 2048,
        "--engine.max-model-len": 512,
        "--engine.kv-cache-gib": 0.25,
    }
    arguments = [str(part) for pair in settings.items() for part in pair]
    return tmp_path / "run", [sys.executable, "-m", "harness_trainer.cli", "train", "--plain", *arguments]


def pid_of(run_dir: Path, part: str) -> int | None:
    """Of what watches over the newest process of this part, by the run's own account; with it the part ends."""
    path = run_dir / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    pids = [event["pid"] for event in events if event["kind"] == "started" and event["part"] == part]
    return pids[-1] if pids else None


def test_a_run_of_ones_own_loop_goes_on_when_its_parts_die(command, tmp_path):
    run_dir, argv = command
    log = tmp_path / "out.log"
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 560
        to_kill = ["runner", "gateway", "engine"]
        num_seen = 0
        metrics = run_dir / "metrics.jsonl"
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            num_steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if num_steps > num_seen and to_kill and (pid := pid_of(run_dir, to_kill[0])) is not None:
                os.kill(pid, signal.SIGKILL)
                to_kill.pop(0)
                num_seen = num_steps
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    assert process.returncode == 0, log.read_text()[-3000:]
    store = RolloutStore(run_dir / "store.sqlite")
    results = store.rollouts()
    trained = [result for step in range(1, NUM_STEPS + 1) for result in store.trained_results(step)]
    store.close()
    assert len(trained) == 2 * NUM_STEPS
    assert {(result.harness, result.num_turns) for result in trained} == {("Letters", 2)}
    assert all(result.rewards == {"letters": result.reward} for result in trained)
    assert {result.outcome for result in results} <= {"ok", "truncated", "cancelled", "infra_failed"}
    versions = {
        span["version"]
        for result in trained
        for row in result.trace["turns"]
        for stretch in row["metadata"]["turns"]
        for span in stretch["policy_versions"]
    }
    assert versions and all(version.startswith("v") for version in versions), "no token is of an engine without policy"
    audit = subprocess.run([*argv[:3], "audit", str(run_dir)], capture_output=True, text=True, timeout=120, check=False)
    assert audit.returncode == 0, audit.stdout

"""A whole run that trains a LoRA adapter: real vLLM serves each version by its name; killed once; its final model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.errors import SetupError
from harness_trainer.learner.checkpoints import last_checkpoint
from harness_trainer.learner.rows import rows_from_trace
from harness_trainer.rollouts.store import RolloutStore
from tests.engine.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

NUM_STEPS = 4
# Any text scores; what a random model says differs from reply to reply.
VERIFY = (
    "python3 -c \"import os; t = open(os.environ['SANDBOX_ROOT'] + '/logs/agent/final_message.txt').read(); "
    'print(sum(c.isalpha() for c in t) / max(1, len(t)))" > $SANDBOX_ROOT/logs/verifier/reward.txt'
)


def start(folder: Path) -> subprocess.Popen:
    settings = {
        "--run-dir": folder / "run",
        "--model": folder / "model",
        "--tasks": folder / "tasks.jsonl",
        "--harness": "pyagent-chat",
        "--rollouts.group-size": 2,
        "--rollouts.max-concurrent": 2,
        "--rollouts.max-tokens": 12,
        "--learner.lora": '{"rank": 4, "alpha": 8}',
        "--learner.weight-sync": "lora",
        "--learner.max-steps": NUM_STEPS,
        "--learner.groups-per-step": 1,
        "--learner.learning-rate": 0.01,
        "--learner.token-budget": 2048,
        "--learner.save-steps": 1,
        "--engine.max-model-len": 512,
        "--engine.kv-cache-gib": 0.25,
    }
    arguments = [str(part) for pair in settings.items() for part in pair]
    argv = [sys.executable, "-m", "harness_trainer.cli", "train", "--plain", *arguments]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_an_adapter_is_trained_through_a_kill_and_both_its_forms_load(tmp_path: Path) -> None:
    try:
        find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    make_tiny_model(tmp_path / "model", family="qwen3", tied=True)
    lines = [{"name": name, "instruction": f"Say {name}.", "verify": VERIFY} for name in ("sun", "moon")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tmp_path / "run"

    process = start(tmp_path)
    deadline = time.monotonic() + 300
    while last_checkpoint(run / "checkpoints") is None:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no checkpoint within 300 s"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert last_checkpoint(run / "checkpoints").name != f"checkpoint-{NUM_STEPS}", "killed too late to prove anything"

    process = start(tmp_path)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    fresh = [step for step in steps if step["staleness_max"] == 0]
    assert fresh and all(abs(step["ratio_mean"] - 1) < 1e-3 for step in fresh)

    store = RolloutStore(run / "store.sqlite")
    results = [result for step in range(1, NUM_STEPS + 1) for result in store.trained_results(step)]
    rows = [row for result in results if result.trace for row in rows_from_trace(result.trace).rows]
    sampled = {version for row in rows for version in row.versions_N if version >= 0}
    store.close()
    assert len(rows) == len(results) and len(sampled) > 1, sampled

    merged = AutoModelForCausalLM.from_pretrained(run / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    changed = [name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, base[name])]
    assert changed and all("_proj" in name for name in changed)
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert "adapter is merged" in (run / "model" / "README.md").read_text()

"""A whole run on three sources at once: an agent, an environment class, an ORS server. Real vLLM, TRL, a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.errors import SetupError
from harness_trainer.learner import metric_names
from harness_trainer.rollouts.store import RolloutStore
from tests.engine.tiny_model import make_tiny_model
from tests.loops.ors_server import running

pytestmark = pytest.mark.engine

ECHO = Path(__file__).parents[2] / "examples" / "white_box" / "ors_echo.py"
NUM_STEPS = 3
NAMES = ("code", "race", "shop")

# The share of letters in what was said, which differs from reply to reply of a random model: in each kind's own words.
VERIFY = (
    "python3 -c \"import os; t = open(os.environ['SANDBOX_ROOT'] + '/logs/agent/final_message.txt').read(); "
    'print(sum(c.isalpha() for c in t) / max(1, len(t)))" > $SANDBOX_ROOT/logs/verifier/reward.txt'
)
RACE = """
class Race:
    def reset(self, **columns):
        return "Go."


def letters(completions, **columns):
    texts = ["".join(str(m.get("content") or "") for m in said if m["role"] == "assistant") for said in completions]
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in texts]
"""


@pytest.fixture(scope="module")
def shop():
    with running(script=ECHO, args=("--serve", "--port", "{port}")) as server:
        yield server.url


@pytest.fixture(scope="module")
def run(tmp_path_factory, shop):
    """Its folder, and what it said."""
    try:
        find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "race.py").write_text(RACE)
    # The same names of tasks in two sources.
    (folder / "tasks.jsonl").write_text(json.dumps({"name": "sun", "instruction": "Say sun.", "verify": VERIFY}) + "\n")
    for name in ("sun", "moon"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"name": name, "prompt": f"Say {name}."}) + "\n")
    letters = [f"{folder / 'race.py'}:letters"]
    race = {"type": f"class:{folder / 'race.py'}:Race", "rewards": letters}
    settings = {
        "model": str(make_tiny_model(folder / "model", family="llama", tied=True).path),
        "sources": [
            {"name": "code", "tasks": str(folder / "tasks.jsonl"), "harness": "pyagent-chat"},
            {
                "name": "race",
                "env": race,
                "tasks": str(folder / "sun.jsonl"),
                "evaluation": str(folder / "moon.jsonl"),
                "pass_reward": 0.0,
                "max_turns": 1,
            },
            {"name": "shop", "tasks": f"ors:{shop}", "env": {"rewards": letters}, "max_turns": 1},
        ],
        "rollouts": {"group_size": 2, "max_concurrent": 3, "max_tokens": 12, "evaluation": {"every": NUM_STEPS}},
        "learner": {"max_steps": NUM_STEPS, "groups_per_step": 3, "learning_rate": 0.01, "token_budget": 4096},
        "engine": {"max_model_len": 2048, "kv_cache_gib": 0.25},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "harness_trainer.cli", "train", "--plain", "--config", str(folder / "run.yaml")]
    command += ["--run-dir", str(folder / "run")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run", done.stdout + done.stderr


def test_a_mixed_run_trains_with_metrics_and_evaluation_of_each_source(run):
    folder, said = run
    assert "running code: pyagent-chat on 1 tasks; race on 1 tasks; shop on" in said
    steps = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == NUM_STEPS
    groups = {name: sum(step.get(f"source/{name}/groups_total", 0) for step in steps) for name in NAMES}
    assert sum(groups.values()) == 3 * NUM_STEPS and min(groups.values()) >= 1, "by weight, but for dropped groups"
    for name in NAMES:
        assert any(f"source/{name}/reward" in step for step in steps)
    assert steps[0]["source/race/eval_pass_at_1"] == 1.0 and "source/code/eval_reward" not in steps[0]
    assert any("source/race/rewards/letters" in step for step in steps)
    assert not [name for step in steps for name in step if name.startswith("source/") and not metric_names.find(name)]


def test_every_rollout_is_accounted_for_by_source(run):
    folder, _ = run
    store = RolloutStore(folder / "store.sqlite")
    trained = [result for step in range(1, NUM_STEPS + 1) for result in store.trained_results(step)]
    names = {(result.source, result.harness, result.task.partition("/")[0]) for result in store.rollouts()}
    tasks = {result.task for result in trained}
    held_out = {result.task for result in store.rollouts() if result.group_id < 0}
    store.close()
    assert names == {("code", "pyagent-chat", "code"), ("race", "race", "race"), ("shop", "shop", "shop")}
    assert {"code/sun", "race/sun"} <= tasks and held_out == {"race/moon"}
    assert all(len({result.source for result in trained if result.group_id == one.group_id}) == 1 for one in trained)
    command = [sys.executable, "-m", "harness_trainer.cli", "audit", str(folder)]
    audit = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert audit.returncode == 0, audit.stdout
    for name in NAMES:
        assert f"source {name}: attempts: " in audit.stdout
    assert "everything is accounted for" in audit.stdout

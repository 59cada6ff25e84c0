"""A whole run on a Harbor server: the command line, real vLLM, real TRL, OpenEnv's server code, a tiny random model."""

import json
import os
import subprocess
import sys

import pytest

from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.errors import SetupError
from harness_trainer.rollouts.store import RolloutStore
from tests.engine.tiny_model import make_tiny_model
from tests.interop.openenv_servers import a_server, dataset

pytestmark = pytest.mark.engine

# What a random model says differs from reply to reply, and so does this.
REWARD = """
def score(outcome):
    text = str(outcome.completion[-1].get("content") or "")
    return outcome.env_reward + sum(map(str.isalpha, text)) / max(1, len(text))
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    try:
        find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    folder = tmp_path_factory.mktemp("server-run")
    (folder / "own.py").write_text(REWARD)
    settings = {
        "--run-dir": folder / "run",
        "--model": make_tiny_model(folder / "model", family="llama", tied=True).path,
        "--env.harness": "mini-swe-agent",
        "--env.sandbox": "docker",
        "--rollouts.reward": f"{folder / 'own.py'}:score",
        "--rollouts.group-size": 2,
        "--rollouts.max-concurrent": 2,
        "--rollouts.max-tokens": 12,
        "--learner.max-steps": 1,
        "--learner.groups-per-step": 1,
        "--learner.token-budget": 2048,
        "--engine.max-model-len": 512,
        "--engine.kv-cache-gib": 0.25,
    }
    return folder, [str(part) for pair in settings.items() for part in pair]


def train(folder, *arguments):
    command = [sys.executable, "-m", "harness_trainer.cli", "train", "--plain", *arguments]
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=420, check=False)


def test_a_run_on_a_server_takes_a_step_from_its_rollouts_and_leaves_nothing(arguments):
    folder, given = arguments
    with a_server(folder, dataset(folder / "tasks", "toolless-sun", "toolless-moon")) as server:
        done = train(folder, *given, "--env", f"openenv-harbor:{server.url}")
        assert done.returncode == 0, done.stderr[-2000:]
    assert "running mini-swe-agent on 2 tasks" in done.stdout + done.stderr
    (step,) = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["step"] == 1
    store = RolloutStore(folder / "run" / "store.sqlite")
    finished = [result for result in store.rollouts() if result.reward is not None]
    store.close()
    assert len(finished) >= 2 and all(result.num_trainable_turns == 2 for result in finished)
    assert all(result.rewards for result in finished), "the server's own are there beside it"


def test_a_server_that_is_not_there_is_one_line_before_anything_is_started(arguments):
    folder, given = arguments
    done = train(folder, *given, "--run-dir", str(folder / "none"), "--env", "openenv-harbor:http://127.0.0.1:9")
    assert done.returncode == 3
    assert done.stderr.strip().splitlines()[-1].startswith("harness-trainer: no server answers at http://127.0.0.1:9")
    assert "Traceback" not in done.stderr

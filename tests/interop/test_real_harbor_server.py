"""`openenv harbor serve` on real Harbor: its Terminus 2 works on our model, its verifier scores, our capture is exact.

Runs where one Python has both, as `make setup-harbor` makes one; $HARNESS_TRAINER_OPENENV_HARBOR_PYTHON names another.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.environments import OpenEnvHarborConfig
from harness_trainer.environments.openenv_harbor import inspect_server
from harness_trainer.rollouts.harbor_server import run_rollout
from harness_trainer.rollouts.types import Job, Outcome
from tests.interop.openenv_servers import a_server
from tests.interop.test_harbor_server import meaning

pytestmark = pytest.mark.harbor

LAUNCHER = Path(__file__).with_name("real_harbor_server.py")
OURS = Path(__file__).parents[2] / ".venv-harbor" / "bin" / "python"


@pytest.fixture(scope="module")
def python():
    """A Python that has Harbor and OpenEnv."""
    python = os.environ.get("HARNESS_TRAINER_OPENENV_HARBOR_PYTHON") or str(OURS)
    if lacks := [program for program in ("bwrap", "tmux") if shutil.which(program) is None]:
        pytest.skip(f"no {' and no '.join(lacks)} here: apt-get install bubblewrap tmux")
    if shutil.which(python) is None:
        pytest.skip(f"no {python}: make setup-harbor")
    probe = "import harbor.trial.trial, openenv.harbor.serving"
    found = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        last = (found.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"{python} has not both Harbor and OpenEnv ({last}): make setup-harbor")
    return python


@pytest.fixture(scope="module")
def server(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    (folder / "trials").mkdir()
    task = folder / "tasks" / "moon"
    (task / "environment").mkdir(parents=True)
    (task / "tests").mkdir()
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 120.0\n[verifier]\ntimeout_sec = 60.0\n")
    (task / "instruction.md").write_text("Write the word moon into /app/answer.txt.")
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (task / "tests" / "test.sh").write_text(
        "#!/bin/sh\ngrep -q moon /app/answer.txt && R=1 || R=0\necho $R > /logs/verifier/reward.txt\n"
    )
    with a_server(folder, folder / "tasks", argv=(python, str(LAUNCHER))) as server:
        yield server


def said(commands, *, done):
    """A reply in Terminus 2's own format."""
    keys = [{"keystrokes": f"{command}\n", "duration": 0.3} for command in commands]
    return json.dumps({"analysis": "-", "plan": "-", "commands": keys, "task_complete": done})


async def test_harbors_own_agent_is_trained_on_our_capture_and_scored_by_its_verifier(tmp_path, server):
    env = OpenEnvHarborConfig(url=server.url, harness="terminus-2", sandbox="docker")
    found = await inspect_server(env)
    assert [task.instruction for task in found.tasks] == ["Write the word moon into /app/answer.txt."]
    engine = ScriptedEngine([said(["echo moon > answer.txt"], done=False), said([], done=True), said([], done=True)])
    async with meaning(tmp_path, engine, env, max_tokens=2048, deadline_s=300) as means:
        result = await run_rollout(Job("g0-0-a", 0, 0, found.tasks[0]), means)
    assert (result.outcome, result.reward) == (Outcome.OK, 1.0), (result.detail, server.logged[-3000:])
    assert result.num_turns == result.num_trainable_turns == len(engine.requests) == 3
    (row,) = result.trace["turns"]
    assert sum(row["loss_mask"]) == result.num_completion_tokens > 100
    assert result.num_side_turns == 0 and not [f for f in result.findings if " FATAL " in f]
    told = json.loads((tmp_path / "artifacts" / "g0-0-a" / "server_result.json").read_text())
    assert (told["rollout_type"], told["capture_level"], told["task_name"]) == ("eval", "text", "moon")


async def test_an_agent_that_goes_on_too_long_is_cut_by_our_limit_and_scored_by_what_it_left(tmp_path, server):
    env = OpenEnvHarborConfig(url=server.url, harness="terminus-2", sandbox="docker")
    engine = ScriptedEngine([said(["echo moon > answer.txt; sleep 600"], done=False)])
    async with meaning(tmp_path, engine, env, max_tokens=2048, max_turns=400, timeout_s=10, deadline_s=150) as means:
        (task,) = await means.server.tasks()
        result = await run_rollout(Job("g0-0-b", 0, 0, task), means)
    assert (result.outcome, result.reward, result.timed_out) == (Outcome.TRUNCATED, 1.0, True), result.detail

"""A whole training run: real vLLM, real TRL, real agents, a tiny random model. Killed, stopped, continued."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.exactness import audit
from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.errors import SetupError
from harness_trainer.learner.checkpoints import last_checkpoint
from harness_trainer.rollouts.store import RolloutStore
from tests.engine.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

# Any text scores; what a random model says differs from reply to reply.
VERIFY = (
    "python3 -c \"import os; t = open(os.environ['SANDBOX_ROOT'] + '/logs/agent/final_message.txt').read(); "
    'print(sum(c.isalpha() for c in t) / max(1, len(t)))" > $SANDBOX_ROOT/logs/verifier/reward.txt'
)
STOP_WITHIN_S = 10.0
NUM_STEPS = 6


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The command line of one run; every test of this file uses the same folder, one after the other."""
    try:
        find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    folder = tmp_path_factory.mktemp("train")
    model = make_tiny_model(folder / "model", family="llama", tied=True)
    tasks = folder / "tasks.jsonl"
    lines = [{"name": name, "instruction": f"Say {name}.", "verify": VERIFY} for name in ("sun", "moon")]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "--run-dir": folder / "run",
        "--model": model.path,
        "--tasks": tasks,
        "--harness": "pyagent-chat",
        "--keep-weights": "true",
        "--rollouts.group-size": 2,
        "--rollouts.max-concurrent": 2,
        "--rollouts.max-tokens": 12,
        "--learner.max-steps": NUM_STEPS,
        "--learner.groups-per-step": 1,
        "--learner.learning-rate": 0.01,
        "--learner.token-budget": 2048,
        "--learner.save-steps": 1,
        "--engine.max-model-len": 512,
        "--engine.kv-cache-gib": 0.25,
    }
    arguments = [str(part) for pair in settings.items() for part in pair]
    return folder / "run", [sys.executable, "-m", "harness_trainer.cli", "train", "--plain", *arguments]


def steps_of(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_checkpoint(process, run_dir: Path, timeout_s: float = 240.0) -> None:
    """A step is only sure once its checkpoint is whole: one that is cut off before it is taken again."""
    deadline = time.monotonic() + timeout_s
    while last_checkpoint(run_dir / "checkpoints") is None:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no checkpoint within {timeout_s} s"
        time.sleep(0.1)


def start(command, state: Path) -> subprocess.Popen:
    env = {**os.environ, "XDG_STATE_HOME": str(state)}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=env, preexec_fn=_as_in_a_terminal)


def _as_in_a_terminal() -> None:
    """A shell starts what it puts in the background with SIGINT ignored, and so would everything below these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_steps(process, run_dir: Path, count: int, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while len(steps_of(run_dir)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no step {count} within {timeout_s} s"
        time.sleep(0.1)


def processes_of(run_dir: Path) -> dict[int, str]:
    """Live processes of the run: pid -> command line. vLLM's core hides its arguments but works in the run folder."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cwd = os.readlink(path / "cwd")
        except OSError:
            continue
        if str(run_dir) in line or cwd.startswith(str(run_dir)):
            found[int(path.name)] = line
    return found


def test_ctrl_c_ends_everything_soon_and_leaves_nothing(command, tmp_path_factory):
    run_dir, argv = command
    state = run_dir.parent / "state"
    process = start(argv, state)
    wait_for_checkpoint(process, run_dir)
    process.send_signal(signal.SIGINT)
    stopped = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - stopped < STOP_WITHIN_S
    assert process.returncode == 130, err
    assert "the same command continues" in err
    assert "Traceback" not in err
    assert processes_of(run_dir) == {}
    assert list((state / "harness-trainer" / "owned").glob("*.json")) == []


def test_without_restarts_a_part_that_dies_stops_the_run_with_its_name_and_leaves_nothing(command):
    run_dir, argv = command
    process = start([*argv, "--restarts.max-deaths", "0"], run_dir.parent / "state")
    deadline = time.monotonic() + 240
    while not (gateways := [pid for pid, line in processes_of(run_dir).items() if "-m capture_proxy" in line]):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    # The gateway itself, not the process that watches over it and names it too.
    os.kill(max(gateways), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 4, err
    assert "the gateway died" in err
    assert "Traceback" not in err
    assert processes_of(run_dir) == {}


def test_after_kill_9_of_the_supervisor_its_parts_end_and_the_same_command_continues(command):
    run_dir, argv = command
    state = run_dir.parent / "state"
    before = len(steps_of(run_dir))
    assert before >= 1
    process = start(argv, state)
    wait_for_steps(process, run_dir, before + 1)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while processes_of(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(run_dir) == {}

    process = start(argv, state)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert "Training steps" in out
    assert processes_of(run_dir) == {}


def test_every_step_was_taken_once_on_groups_of_its_own_with_ever_newer_policies(command):
    run_dir, _ = command
    steps = steps_of(run_dir)
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    versions = [step["policy_version"] for step in steps]
    assert versions == sorted(set(versions))
    store = RolloutStore(run_dir / "store.sqlite")
    trained = Counter(result.group_id for step in range(1, NUM_STEPS + 1) for result in store.trained_results(step))
    store.close()
    assert all(count == 2 for count in trained.values()), "a group is two rollouts and is trained once"
    assert len(trained) == NUM_STEPS
    assert abs(steps[0]["ratio_mean"] - 1) < 1e-3


def test_every_trained_token_is_what_its_policy_would_say(command):
    run_dir, _ = command
    found, num_rows = audit(run_dir)
    assert num_rows == 2 * NUM_STEPS
    assert found.same_max_diff is not None and found.same_max_diff < 1e-3
    assert found.mixed_max_diff is None or found.mixed_max_diff < 1e-3


def test_the_last_checkpoint_is_a_model_that_transformers_loads(command):
    from transformers import AutoModelForCausalLM

    run_dir, _ = command
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / f"checkpoint-{NUM_STEPS}")
    assert model.num_parameters() > 0

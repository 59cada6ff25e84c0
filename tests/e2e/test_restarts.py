"""A run goes on by itself when a part of it is killed, in the middle of a step with agents at work.

Everything is real but, in the first test, the engine: a stand-in that starts in a second and writes down under which
version each call was sampled. The second test is the same with vLLM.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from capture_proxy.store import load_capture
from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.errors import SetupError
from harness_trainer.rollouts.store import RolloutStore
from tests.e2e import stub_engine_server
from tests.engine.tiny_model import make_tiny_model

HERE = Path(__file__).parent
# Any text scores; what a random model says differs from reply to reply.
VERIFY = (
    "python3 -c \"import os; t = open(os.environ['SANDBOX_ROOT'] + '/logs/agent/final_message.txt').read(); "
    'print(sum(c.isalpha() for c in t) / max(1, len(t)))" > $SANDBOX_ROOT/logs/verifier/reward.txt'
)
PATIENCE_S = 600.0


@dataclass
class Run:
    """One run of the command line in a folder."""

    folder: Path
    process: subprocess.Popen

    @property
    def path(self) -> Path:
        return self.folder / "run"

    def events(self, kind: str, part: str | None = None) -> list[dict]:
        path = self.path / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["kind"] == kind and part in (None, event.get("part"))]

    def steps(self) -> list[dict]:
        path = self.path / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be being written
        return [json.loads(line) for line in whole.splitlines() if line]

    def until(self, condition, what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended before {what}: {self.process.communicate()[1][-3000:]}")
            assert time.monotonic() < until, f"not within {PATIENCE_S} s: {what}\n{self.tails()}"
            time.sleep(0.05)

    def tails(self) -> str:
        logs = sorted((self.path / "logs").glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def kill(self, part: str, *, itself: bool) -> None:
        """`itself`: the part; else what watches over it, which leaves the part alive until the supervisor ends it."""
        pid = self.events("started", part)[-1]["pid"]
        if itself:
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)

    def store(self) -> RolloutStore:
        return RolloutStore(self.path / "store.sqlite")

    def num_at_work(self) -> int:
        if not self.events("started", "runner"):  # the store is the run's to make
            return 0
        store = self.store()
        try:
            return store.outcome_counts().get("running", 0)
        finally:
            store.close()

    def kill_in_the_middle_of_a_step(self, part: str, *, itself: bool = True) -> None:
        """And wait until it runs again, and a step more was taken."""
        self.until(lambda: self.num_at_work() > 0, f"agents are at work, to kill the {part}")
        deaths = len(self.events("restart", part))
        self.kill(part, itself=itself)
        self.until(lambda: len(self.events("restart", part)) > deaths, f"the death of the {part} is noticed")
        self.until(lambda: len(self.events("started", part)) > deaths + 1, f"the {part} runs again")
        taken = len(self.events("step"))
        self.until(lambda: len(self.events("step")) > taken, f"a step after the death of the {part}")


def start(folder: Path, *, num_steps: int, env: dict[str, str] | None = None, **settings) -> Run:
    model = make_tiny_model(folder / "model", family="llama", tied=True)
    tasks = folder / "tasks.jsonl"
    lines = [{"name": name, "instruction": f"Say {name}.", "verify": VERIFY} for name in ("sun", "moon")]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {
        "--run-dir": folder / "run",
        "--model": model.path,
        "--tasks": tasks,
        "--harness": "cmd:python3 patient_agent.py",
        "--rollouts.group-size": 2,
        "--rollouts.max-concurrent": 2,
        "--rollouts.max-tokens": 12,
        "--learner.max-steps": num_steps,
        "--learner.groups-per-step": 1,
        "--learner.learning-rate": 0.001,
        "--learner.token-budget": 4096,
        "--learner.save-steps": 2,
        **settings,
    }
    argv = [sys.executable, "-m", "harness_trainer.cli", "train", "--plain"]
    process = subprocess.Popen(
        [*argv, *(str(part) for pair in given.items() for part in pair)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=HERE,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), **(env or {})},
    )
    return Run(folder, process)


def finish(run: Run, num_steps: int) -> str:
    """Wait for the end; what a person was told. The run must have come to what an undisturbed one comes to."""
    out, err = run.process.communicate(timeout=PATIENCE_S)
    assert run.process.returncode == 0, err[-3000:] + run.tails()
    assert "Traceback" not in err and "Training steps" in out
    assert [step["step"] for step in run.steps()] == list(range(1, num_steps + 1))
    versions = [step["policy_version"] for step in run.steps()]
    assert versions == sorted(set(versions))
    store = run.store()
    try:
        trained = Counter(r.group_id for step in range(1, num_steps + 1) for r in store.trained_results(step))
        assert len(trained) == num_steps and set(trained.values()) == {2}, "a group is two rollouts, trained once"
        for step in range(1, num_steps + 1):
            for result in store.trained_results(step):
                _check_versions(run, result.rollout_id)
    finally:
        store.close()
    assert list((run.folder / "state" / "harness-trainer" / "owned").glob("*.json")) == []
    return err


def _check_versions(run: Run, session_id: str) -> None:
    """Nothing that a rollout's agent was told is of an engine without a policy."""
    capture = load_capture(run.path / "store.sqlite", session_id)
    assert capture is not None and capture.turns
    named = {span.version for turn in capture.turns for span in turn.version_spans}
    assert named and all(name.startswith("v") and name[1:].isdigit() for name in named), (session_id, named)


@pytest.fixture
def ended():
    """Whatever happens, no run is left."""
    runs = []
    yield runs.append
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
            run.process.communicate(timeout=60)


def test_each_part_in_turn_is_killed_and_the_run_goes_on(tmp_path, ended):
    num_steps, log = 14, tmp_path / "sampled.jsonl"
    run = start(
        tmp_path,
        num_steps=num_steps,
        env={stub_engine_server.LOG: str(log)},
        **{"--engine.python": stub_engine_server.write_python(tmp_path), "--learner.verify-sync": "never"},
    )
    ended(run)
    run.until(lambda: len(run.steps()) >= 1, "the first step")
    run.kill_in_the_middle_of_a_step("gateway")
    run.kill_in_the_middle_of_a_step("runner", itself=False)
    run.kill_in_the_middle_of_a_step("engine")
    run.kill_in_the_middle_of_a_step("learner")
    run.kill_in_the_middle_of_a_step("engine", itself=False)
    err = finish(run, num_steps)
    assert [event["part"] for event in run.events("restart")] == ["gateway", "runner", "engine", "learner", "engine"]
    assert all(event["exit_code"] == -9 and event["pid"] and event["last_line"] for event in run.events("restart"))
    assert "the engine died (signal 9)" in err and "it is started again (death 1 of at most 3)" in err
    sampled = [json.loads(line) for line in log.read_text().splitlines()]
    assert len({call["pid"] for call in sampled}) == 3, "three engines"
    assert all(call["version"].startswith("v") for call in sampled), "no call met an engine without a policy"


@pytest.mark.engine
def test_each_part_in_turn_is_killed_and_the_run_goes_on_with_vllm(tmp_path, ended):
    try:
        find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    num_steps = 10
    engine = {"--engine.max-model-len": 512, "--engine.kv-cache-gib": 0.25}
    run = start(tmp_path, num_steps=num_steps, **engine, **{"--learner.verify-sync": "always"})
    ended(run)
    run.until(lambda: len(run.steps()) >= 1, "the first step")
    for part in ("runner", "engine", "gateway", "learner"):
        run.kill_in_the_middle_of_a_step(part)
    finish(run, num_steps)
    assert [event["part"] for event in run.events("restart")] == ["runner", "engine", "gateway", "learner"]


def test_a_part_that_dies_again_and_again_ends_the_run_and_says_so(tmp_path, ended):
    run = start(
        tmp_path,
        num_steps=50,
        **{
            "--engine.python": stub_engine_server.write_python(tmp_path),
            "--learner.verify-sync": "never",
            "--restarts.max-deaths": 1,
        },
    )
    ended(run)
    run.until(lambda: run.num_at_work() > 0, "agents are at work")
    run.kill("gateway", itself=True)
    run.until(lambda: len(run.events("started", "gateway")) == 2, "the gateway runs again")
    run.kill("gateway", itself=True)
    _, err = run.process.communicate(timeout=60)
    assert run.process.returncode == 4, err
    assert "the gateway died 2 times within 3600 s: " in err and "gateway.log" in err and "Traceback" not in err

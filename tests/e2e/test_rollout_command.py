"""`harness-trainer rollout`: agents on tasks without a learner, killed and finished, scored and exported."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.errors import SetupError
from harness_trainer.rollouts.__main__ import RUNNER_ERROR
from harness_trainer.rollouts.store import RolloutStore
from tests.engine.tiny_model import make_tiny_model
from tests.http_serving import in_thread
from tests.rollouts.rolling import CALL, VERIFY


class TextEngine:
    """An OpenAI-compatible server that knows no token ids. Of the calls on a task every second one says its word."""

    def __init__(self) -> None:
        self.url, self.num_calls, self.stalled = "", Counter(), threading.Event()
        self.stall_after = None  # calls; later ones wait until `stalled` is set

    def say(self, body: dict) -> str:
        text = " ".join(str(message.get("content")) for message in body["messages"])
        word = "moon" if "moon" in text else "star"
        self.num_calls[word] += 1
        if self.stall_after is not None and self.num_calls.total() > self.stall_after:
            self.stalled.wait(60)
        return word if self.num_calls[word] % 2 else "nothing"


@contextmanager
def serving(engine: TextEngine):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "theirs", "max_model_len": 4096}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions":
                self.send_error(404)
                return
            message = {"role": "assistant", "content": engine.say(body)}
            if not body.get("stream"):
                self._answer({"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
                return
            parts = [{"index": 0, "delta": message, "finish_reason": None}, {"index": 0, "delta": {}} | STOP]
            events = [json.dumps({"id": "c", "choices": [part]}) for part in parts]
            self._answer("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode(), "text/event-stream")

        def _answer(self, content, kind: str = "application/json") -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    with in_thread(Handler) as port:
        engine.url = f"http://127.0.0.1:{port}"
        try:
            yield engine
        finally:
            engine.stalled.set()


STOP = {"finish_reason": "stop"}


class Command:
    """The command line of one run, with two tasks and two agents that ask the model once."""

    def __init__(self, folder: Path, *more: object) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        lines = [
            {"name": name, "instruction": f"Say {name}.", "verify": VERIFY.replace("moon", name)} for name in TASKS
        ]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name in ("one", "two"):
            agent = {
                "name": name, "dialect": "openai_chat", "output": {"type": "text"},
                "argv": ["sh", "-c", CALL.replace('"content": "go"', '"content": "\'"$1"\'"'), "sh", "${instruction}"],
                "env": {"URL": "${base_url}/v1/chat/completions", "TOKEN": "${token}"},
            }  # fmt: skip
            (folder / f"{name}.yaml").write_text(json.dumps(agent))
        given = {"--tasks": folder / "tasks.jsonl", "--harness": f"{folder / 'one.yaml'},{folder / 'two.yaml'}"}
        words = [*(word for pair in given.items() for word in pair), "--run-dir", self.run_dir, *more]
        self.argv = [sys.executable, "-m", "harness_trainer.cli", "rollout", "--plain", *map(str, words)]
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}

    def start(self, *more: object) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        argv = [*self.argv, *map(str, more)]
        return subprocess.Popen(argv, env=self.env, text=True, cwd=self.folder, **pipes)

    def run(self, *more: object) -> tuple[int, str, str]:
        process = self.start(*more)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def scores(self) -> dict[tuple[str, str | None], dict]:
        return {(s["harness"], s["task"]): s for s in json.loads((self.run_dir / "scores.json").read_text())}

    def processes(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found += [line] if str(self.run_dir) in line else []
        return found


TASKS = ("moon", "star")


def test_every_task_is_run_with_every_agent_and_the_table_says_what_they_came_to(tmp_path):
    with serving(TextEngine()) as engine:
        command = Command(tmp_path, "--engine-url", engine.url + "/v1", "--samples", 4)
        code, out, err = command.run("--export", "atif")
        assert code == 0, err
        assert engine.num_calls["moon"] >= 8 and engine.num_calls["star"] >= 8
    scores = command.scores()
    assert set(scores) == {(agent, task) for agent in ("one", "two") for task in (*TASKS, None)}
    assert all(score["num_scored"] == (8 if task is None else 4) for (_, task), score in scores.items())
    for task in TASKS:  # every second call of a task says its word, whichever agent asks
        passed = [scores[agent, task]["pass_at_1"] for agent in ("one", "two")]
        assert sum(passed) == pytest.approx(1.0, abs=0.26)
    assert "pass@4" in out and "all tasks" in out and "0.5" in out
    assert "it returns no token ids" in err
    exported = [json.loads(line) for line in (command.run_dir / "rollouts.atif.jsonl").read_text().splitlines()]
    assert len(exported) == 16
    store = RolloutStore(command.run_dir / "store.sqlite")
    assert store.group_counts() == {}, "nothing of it is a group to train on"
    assert [(row["step"], row["policy_version"]) for row in store.evaluations()] == [(0, 1)]
    store.close()
    assert command.processes() == []

    began = time.monotonic()
    code, again, err = command.run()  # there is nothing left to run, and no engine any more
    assert code == 0 and again.splitlines()[:10] == out.splitlines()[:10], err
    assert time.monotonic() - began < 60


def test_after_kill_9_the_same_command_runs_what_is_missing(tmp_path):
    engine = TextEngine()
    engine.stall_after = 5
    with serving(engine):
        command = Command(tmp_path, "--engine-url", engine.url, "--samples", 3, "--rollouts.max-concurrent", 2)
        process = command.start()
        store_file, deadline = command.run_dir / "store.sqlite", time.monotonic() + 120
        while finished(store_file) < 4:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
        process.communicate()
        while command.processes():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        engine.stalled.set()
        kept = finished(store_file)
        with closing(RolloutStore(store_file)) as store:  # what a runner judged that a person has put right since
            store.set_state(RUNNER_ERROR, "nothing can be started there")
        code, _, err = command.run()
        assert code == 0, err
    store = RolloutStore(store_file)
    outcomes = store.outcome_counts()
    assert outcomes.pop("cancelled", 0) <= 2, "those that the kill met"
    assert sum(outcomes.values()) == 12 and kept >= 4, "three of each pair, and none that was finished was run again"
    store.close()
    assert all(score["num_scored"] == (6 if task is None else 3) for (_, task), score in command.scores().items())


def test_so_many_groups_are_run_in_turn(tmp_path):
    with serving(TextEngine()) as engine:
        command = Command(tmp_path, "--engine-url", engine.url, "--num-groups", 5)
        code, _, err = command.run()
        assert code == 0, err
    numbers = {key: score["num_scored"] for key, score in command.scores().items() if key[1] is not None}
    assert sorted(numbers.values()) == [1, 1, 1, 2]


def test_another_run_is_not_continued_and_an_engine_that_is_none_is_named(tmp_path):
    with serving(TextEngine()) as engine:
        command = Command(tmp_path, "--engine-url", engine.url)
        assert command.run()[0] == 0
        code, _, err = command.run("--samples", 2)
        assert code == 5 and "samples: 1 there, 2 now" in err
    other = tmp_path / "other"
    other.mkdir()
    code, _, err = Command(other, "--engine-url", engine.url).run()
    assert code == 4 and engine.url in err and "Traceback" not in err
    code, _, err = Command(other, "--rollouts.evaluation.tasks", "x").run()
    assert code == 2 and "here --tasks are what is evaluated" in err


def finished(store_file: Path) -> int:
    if not store_file.exists():
        return 0
    store = RolloutStore(store_file)
    try:
        return sum(result.outcome != "cancelled" for result in store.rollouts())
    finally:
        store.close()


@pytest.mark.engine
def test_with_an_engine_of_its_own_the_weights_are_version_1_and_rows_can_be_exported(tmp_path):
    try:
        find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    model = make_tiny_model(tmp_path / "model", family="llama", tied=True)
    command = Command(
        tmp_path, "--model", model.path, "--samples", 2, "--rollouts.max-tokens", 12,
        "--engine.max-model-len", 512, "--engine.kv-cache-gib", 0.25,
    )  # fmt: skip
    process = command.start("--export", "jsonl")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    rows = [json.loads(line) for line in (command.run_dir / "rollouts.rows.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    store = RolloutStore(command.run_dir / "store.sqlite")
    traces = [store.rollout(result.rollout_id).trace for result in store.rollouts()]
    versions = {
        span["version"]
        for trace in traces
        for turn in trace["turns"]
        for stretch in turn["metadata"].get("turns", [turn["metadata"]])
        for span in stretch["policy_versions"]
    }
    assert versions == {"v1"}
    assert store.policy_version() == 1 and 1 in store.lineage()
    store.close()
    assert command.processes() == [] and "pass@2" in out


def test_ctrl_c_ends_it_and_says_how_it_goes_on(tmp_path):
    engine = TextEngine()
    engine.stall_after = 0
    with serving(engine):
        command = Command(tmp_path, "--engine-url", engine.url)
        process = subprocess.Popen(
            command.argv, env=command.env, text=True, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while not engine.num_calls.total():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "the same command continues the run" in err
        assert command.processes() == []

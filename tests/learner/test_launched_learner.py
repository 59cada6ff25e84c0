"""A learner of two processes as a run starts it: by `accelerate launch`, with our files; the engine is a stub."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from finished_groups import finish_group
from stub_engine import StubEngine, serving

from harness_trainer.learner.__main__ import LEARNER_ERROR, LearnerSpec
from harness_trainer.learner.checkpoints import last_checkpoint, read_state
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.launch import config_file, module_of, pinned
from harness_trainer.rollouts.store import RolloutStore
from sandboxes.lifecycle import OwnedProcess, start_process
from sandboxes.processes import Traces, find_all

STARTED_S = 240.0  # two processes import TRL on cores that others use too
ENDED_S = 30.0


class Launched:
    """A run folder, its store with finished groups, and the learner's processes."""

    def __init__(self, folder: Path, model: Path, engine: StubEngine, *, layout: str, num_groups: int) -> None:
        self.folder = folder
        self.store_path, self.metrics = folder / "s.sqlite", folder / "m.jsonl"
        self.checkpoints = folder / "checkpoints"
        for path in (self.checkpoints, folder / "transfer", folder / "registry"):
            path.mkdir(parents=True)
        (folder / "engine_url").write_text(engine.url)
        config = LearnerConfig(
            max_steps=2, groups_per_step=1, token_budget=64, max_staleness=5, save_steps=1, learning_rate=0.01,
            device="cpu", num_processes=2, accelerate_config=layout,
        )  # fmt: skip
        spec = LearnerSpec(
            config=pinned(config), model_path=model, store=self.store_path, checkpoints=self.checkpoints,
            metrics=self.metrics, engine_url_file=folder / "engine_url", transfer_dir=folder / "transfer",
            keep_weights=None, temperature=1.0, starved_after_s=600,
        )  # fmt: skip
        (folder / "spec.json").write_text(spec.model_dump_json())
        self.argv = [sys.executable, "-m", module_of(spec.config), "--spec", str(folder / "spec.json")]
        self.log = folder / "learner.log"
        self.store = RolloutStore(self.store_path)
        for group_id in range(num_groups):
            finish_group(self.store, group_id)

    def start(self) -> OwnedProcess:
        """As the supervisor does."""
        env = {**os.environ, "TQDM_DISABLE": "1"}
        registry = self.folder / "registry"
        return start_process(self.argv, env=env, cwd=self.folder, log_path=self.log, registry=registry, kind="learner")

    def ranks(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for process in psutil.process_iter():
            try:
                argv, env = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            if str(self.folder / "spec.json") in argv and "harness_trainer.learner" in argv and "RANK" in env:
                found[int(env["RANK"])] = process.pid
        return found

    def ends_within(self, limit_s: float, process: Any) -> None:
        until = time.monotonic() + limit_s
        while process.alive() or self.ranks():
            assert time.monotonic() < until, f"{self.ranks()} still run: {self.tail()}"
            time.sleep(0.2)

    def wait(self, what: Callable[[], bool], process: Any) -> None:
        until = time.monotonic() + STARTED_S
        while not what():
            assert process.alive() and time.monotonic() < until, self.tail()
            time.sleep(0.2)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@pytest.mark.parametrize("num_machines", [1, 2])
def test_a_sharded_learner_leaves_what_a_single_one_leaves(tmp_path: Path, tiny_model: Path, num_machines: int) -> None:
    """The second machine is this one too: another launcher, started as a person would on its own machine."""
    layout = "fsdp2" if num_machines == 1 else str(two_machines(tmp_path / "mine.yaml"))
    with serving(StubEngine()) as engine:
        run = Launched(tmp_path / "run", tiny_model, engine, layout=layout, num_groups=2)
        process = run.start()
        other = None if num_machines == 1 else subprocess.Popen([*run.argv, "--machine-rank", "1"], cwd=tmp_path)
        try:
            assert process.wait(STARTED_S) == 0, run.tail()
            assert other is None or other.wait(ENDED_S) == 0
        finally:
            process.stop()
            if other is not None:
                other.kill()
                other.wait()
        assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2]
        checkpoint = last_checkpoint(run.checkpoints)
        assert checkpoint is not None and read_state(checkpoint).trained_groups == {1: [0], 2: [1]}
        assert (checkpoint / "model.safetensors").is_file() and (checkpoint / "optimizer.pt").is_file()
        assert engine.version == "v3" and not engine.paused and not engine.active
        assert run.store.policy_version() == 3 and not run.store.state(LEARNER_ERROR)
        assert run.store.group_counts() == {"trained": 2}
        run.store.close()


def two_machines(path: Path) -> Path:
    settings = yaml.safe_load(config_file("multi_node").read_text())
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        settings |= {"num_machines": 2, "main_process_port": found.getsockname()[1]}
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.parametrize("killed", ["rank 0", "launcher", "owner's stop"])
def test_no_process_outlives_another(tmp_path: Path, tiny_model: Path, killed: str) -> None:
    """While the learner waits for groups. None of these ends is an error that a restart would only repeat."""
    with serving(StubEngine()) as engine:
        run = Launched(tmp_path, tiny_model, engine, layout="ddp", num_groups=1)
        process = run.start()
        try:
            run.wait(lambda: run.metrics.exists() and len(run.ranks()) == 2, process)
            ranks = run.ranks()
            launcher = psutil.Process(ranks[0]).ppid()
            if killed == "owner's stop":
                process.stop(10.0)
            else:
                os.kill({"rank 0": ranks[0], "launcher": launcher}[killed], signal.SIGKILL)
            run.ends_within(ENDED_S, process)
            assert process.returncode != 0
            assert not find_all(process.owned_id, Traces(log=run.log.resolve()))
        finally:
            process.stop()
        assert not run.store.state(LEARNER_ERROR)
        if killed == "rank 0":
            last = run.tail().strip().splitlines()[-1]
            assert last == f"process 0 of the learner (pid {ranks[0]}) ended by signal 9"
        run.store.close()


def test_without_its_launcher_one_of_several_says_how_it_is_started(tmp_path: Path, tiny_model: Path) -> None:
    with serving(StubEngine()) as engine:
        run = Launched(tmp_path, tiny_model, engine, layout="ddp", num_groups=0)
        alone = [sys.executable, "-m", "harness_trainer.learner", "--spec", str(tmp_path / "spec.json")]
        assert subprocess.run(alone, capture_output=True, check=False).returncode == 1
        assert "start it by python -m harness_trainer.learner.launch" in str(run.store.state(LEARNER_ERROR))
        run.store.close()

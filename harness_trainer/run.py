"""The supervisor: starts the parts of a run, watches them, and ends them all.

Owns the order of start and stop and the judgement that a part has died. The parts are processes of their own (engine,
gateway, rollout runner, learner); they meet in the run folder and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_trainer.cache import cache_dir
from harness_trainer.config import MAY_CHANGE, RunConfig
from harness_trainer.display import Display, step_line
from harness_trainer.engine.config import find_environment
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import ModelInfo, prepare_model
from harness_trainer.errors import EngineFailed, GatewayFailed, HarnessTrainerError, TrainingFailed
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.learner.__main__ import LEARNER_ERROR, LearnerSpec
from harness_trainer.rewards.custom import load_reward, pin_reward
from harness_trainer.rollouts.__main__ import RUNNER_ERROR
from harness_trainer.rollouts.boxes import check_tasks
from harness_trainer.rollouts.budget import Limits
from harness_trainer.rollouts.config import RunnerSpec
from harness_trainer.rollouts.mix import load_mix, pin_harness
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rundir import RunDir, filesystem_errors, write_atomically
from harness_trainer.tasks import Task, load_tasks, pin_tasks
from sandboxes.base import Access, Endpoint
from sandboxes.lifecycle import OwnedProcess, claim, default_registry, reap, start_process

READY_TIMEOUT_S = 30.0
STOP_GRACE_S = 3.0
POLL_S = 0.25


@dataclass(slots=True)
class Part:
    """A process of the run, and the error its death means."""

    name: str
    process: OwnedProcess
    log: Path
    error: type[HarnessTrainerError]


class Supervisor:
    """Runs one training run from start to end. Use `train`."""

    def __init__(self, config: RunConfig, run: RunDir, display: Display) -> None:
        self._config = config
        self._run = run
        self._display = display
        self._registry = default_registry()
        self._parts: list[Part] = []
        self._admin_key = secrets.token_urlsafe(32)

    def run(self, stack: ExitStack) -> list[dict[str, Any]]:
        config, run, display = self._config, self._run, self._display
        for left in reap(self._registry):
            counts = f"{left.num_processes} processes, {len(left.objects)} objects of an engine"
            display.phase(f"cleaned up what a dead run left: {left.kind}, {counts} {left.problem}".rstrip())
        find_environment(config.engine)  # cheap to ask, and nothing below is worth doing without it
        load_reward(config.rollouts.reward)
        tasks_spec = pin_tasks(config.tasks)  # every part of the run reads the same commit of a dataset
        tasks = load_tasks(tasks_spec)
        mix = load_mix(config.harness, tasks, config.rollouts)
        asyncio.run(check_tasks(tasks, config.sandbox, run_id=run.path.name, registry=self._registry))
        bins = {name: ensure_installed(agent, cache_dir(), display.phase) for name, agent in mix.harnesses.items()}
        model = prepare_model(config.model, cache_dir(), progress=display.phase)
        store = RolloutStore(run.store)
        stack.callback(store.close)
        engine_url_file = run.internal / "engine_url"
        engine_url_file.unlink(missing_ok=True)
        engine = Engine(config.engine, model=model, log_path=run.logs / "engine.log", registry=self._registry)
        stack.callback(engine.stop)
        stack.callback(self._stop_parts)  # before the line above: the engine ends at the same time as everything else
        learner = self._start_learner(model, tasks, engine_url_file, self._transfer_dir(stack))
        engine_url, context = self._start_engine(engine)
        write_atomically(engine_url_file, engine_url)
        agents_socket = self._agents_socket(stack)
        gateway = self._start_gateway(engine_url, model, agents_socket)
        spec = RunnerSpec(
            config=config.rollouts.model_copy(update={"reward": pin_reward(config.rollouts.reward)}),
            sandbox=config.sandbox,
            tasks=tasks_spec,
            harness=pin_harness(config.harness),
            harness_bin=next(iter(bins.values())),
            harness_bins=bins,
            store=run.store,
            artifacts=run.artifacts,
            registry=self._registry,
            run_id=run.path.name,
            model=model.model_id,
            context=context,
            access=Access(gateway=Endpoint(gateway["agent_url"], agents_socket, config.gateway.public_url)),
            admin_url=gateway["admin_url"],
            max_open_groups=config.learner.groups_per_step * (config.learner.max_staleness + 1),
            num_groups=config.learner.groups_per_step * config.learner.max_steps,
        )
        display.phase(f"running {' and '.join(bins)} on {len(tasks)} tasks, {config.rollouts.max_concurrent} at a time")
        self._start_module("runner", "harness_trainer.rollouts", spec, TrainingFailed)
        return self._watch(learner, store)

    # -- starting ------------------------------------------------------------------------------------------------

    def _start_learner(
        self, model: ModelInfo, tasks: Sequence[Task], engine_url_file: Path, transfer_dir: Path
    ) -> Part:
        run = self._run
        rollouts = self._config.rollouts
        longest_s = max(Limits.of(rollouts, task).total_s + task.box.build_timeout_s for task in tasks)
        spec = LearnerSpec(
            config=self._config.learner,
            model_path=model.path,
            store=run.store,
            checkpoints=run.checkpoints,
            metrics=run.metrics,
            engine_url_file=engine_url_file,
            transfer_dir=transfer_dir,
            keep_weights=run.weights if self._config.keep_weights else None,
            temperature=rollouts.temperature,
            starved_after_s=longest_s + 120,  # nothing may be heard of a rollout for as long as it may take
        )
        return self._start_module("learner", "harness_trainer.learner", spec, TrainingFailed)

    def _start_module(self, name: str, module: str, spec: Any, error: type[HarnessTrainerError]) -> Part:
        spec_file = self._run.internal / f"{name}.json"
        with filesystem_errors(self._run.path):
            write_atomically(spec_file, spec.model_dump_json(indent=1))
        return self._start(name, [sys.executable, "-m", module, "--spec", str(spec_file)], error)

    def _start(self, name: str, argv: list[str], error: type[HarnessTrainerError]) -> Part:
        log = self._run.logs / f"{name}.log"
        # Passive waiting: the learner's threads share their cores with agents and, on a CPU, with the engine.
        # No progress bars: a log's last line is what a person is shown when a part dies.
        ours = {"OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1"}
        env = {**ours, **os.environ, "CAPTURE_PROXY_ADMIN_KEY": self._admin_key}
        process = start_process(argv, env=env, cwd=self._run.path, log_path=log, registry=self._registry, kind=name)
        part = Part(name, process, log, error)
        self._parts.append(part)
        self._run.event("started", part=name, pid=process.pid)
        return part

    def _start_engine(self, engine: Engine) -> tuple[str, int]:
        """Start the engine, prove that it can be trained from; its address and window."""
        from harness_trainer.engine.check import require_trainable

        display = self._display
        url = engine.start(progress=lambda text: display.status(f"engine: {text}"))
        self._run.event("started", part="engine", pid=engine.process.pid)
        self._parts.append(Part("engine", engine.process, engine.log_path, EngineFailed))
        capabilities = require_trainable(url)
        display.phase(f"engine serves {capabilities.model}, window {capabilities.max_model_len} tokens")
        if capabilities.max_model_len is None:
            raise EngineFailed("the engine does not report its window (max_model_len); use a vLLM that does")
        return url, capabilities.max_model_len

    def _start_gateway(self, engine_url: str, model: ModelInfo, agents_socket: Path | None) -> dict[str, str]:
        ready = self._run.internal / "gateway.json"
        ready.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "capture_proxy", "--engine-url", engine_url, "--store", str(self._run.store)]
        argv += ["--model", model.model_id, "--transport", "generate", "--ready-file", str(ready)]
        config = self._config.gateway
        argv += ["--bridging", config.bridging, "--renderer", config.renderer, "--tokenizer", str(model.path)]
        argv += ["--thinking-retention", config.thinking_retention, "--agent-bind", f"127.0.0.1:{config.port}"]
        if agents_socket is not None:
            argv += ["--agent-socket", str(agents_socket)]
        part = self._start("gateway", argv, GatewayFailed)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not ready.exists():
            self._check(part)
            if time.monotonic() > deadline:
                raise GatewayFailed(f"the gateway was not ready within {READY_TIMEOUT_S:.0f} s: see {part.log}")
            time.sleep(0.05)
        addresses: dict[str, str] = json.loads(ready.read_text(encoding="utf-8"))
        self._display.phase(f"capture gateway for agents at {addresses['agent_url']}")
        return addresses

    def _agents_socket(self, stack: ExitStack) -> Path | None:
        """Where the gateway listens for sealed containers: their relay gets this socket's folder and nothing else.

        The folder above keeps this machine's other users out; it is short, as a socket's path must be.
        """
        if self._config.sandbox.type != "docker":
            return None
        owned = claim(self._registry, "sockets", run_id=self._run.path.name)
        stack.callback(owned.release)
        folder = owned.make_folder(Path(tempfile.gettempdir())) / "agents"
        stack.callback(shutil.rmtree, folder.parent, ignore_errors=True)
        folder.mkdir()
        folder.chmod(0o711)
        return folder / "gateway.sock"

    def _transfer_dir(self, stack: ExitStack) -> Path:
        """A folder for weights on their way to the engine, in memory where there is a /dev/shm; gone with the run."""
        shm = Path("/dev/shm")
        owned = claim(self._registry, "weights", run_id=self._run.path.name)
        stack.callback(owned.release)
        folder = owned.make_folder(shm if os.access(shm, os.W_OK) else self._run.internal)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    # -- watching ------------------------------------------------------------------------------------------------

    def _watch(self, learner: Part, store: RolloutStore) -> list[dict[str, Any]]:
        """Until the learner ends: show progress, and stop the run when another part dies."""
        reports: list[dict[str, Any]] = []
        while True:
            reports = self._show_new_steps(reports)
            if not learner.process.alive():
                break
            reason = store.state(RUNNER_ERROR)
            if reason:
                raise TrainingFailed(reason)
            for part in self._parts:
                self._check(part)
            self._display.status(_status(store, reports))
            time.sleep(POLL_S)
        reports = self._show_new_steps(reports)
        if learner.process.returncode != 0:
            raise TrainingFailed(store.state(LEARNER_ERROR) or f"the learner died: {_last_line(learner.log)}")
        return reports

    def _show_new_steps(self, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
        reports = read_metrics(self._run.metrics)
        for report in reports[len(known) :]:
            self._display.phase(step_line(report))
            self._run.event("step", step=report["step"], policy_version=report["policy_version"])
        return reports

    def _check(self, part: Part) -> None:
        if not part.process.alive():
            raise part.error(f"the {part.name} died: {_last_line(part.log)} (log: {part.log})")

    def _stop_parts(self) -> None:
        """End every part at the same time, so that the waits overlap."""
        with ThreadPoolExecutor(max_workers=max(1, len(self._parts))) as pool:
            for part, code in zip(
                self._parts, pool.map(lambda p: p.process.stop(STOP_GRACE_S), self._parts), strict=True
            ):
                self._run.event("stopped", part=part.name, exit_code=code)


def train(config: RunConfig, run_dir: Path, display: Display) -> list[dict[str, Any]]:
    """Run (or continue) training in `run_dir` until `learner.max_steps`; the report of every step.

    Raises a HarnessTrainerError with one line for people; whatever happens, nothing that it started is left running.
    """
    run = RunDir(run_dir)
    with ExitStack() as stack:
        stack.enter_context(run.opened(config.model_dump(mode="json"), may_change=MAY_CHANGE))
        reports = Supervisor(config, run, display).run(stack)
        display.phase("training is done; stopping engine, gateway and agents")
    return reports


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a run so far; a line that is still being written is left for the next look."""
    if not path.exists():
        return []
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines()]


def _status(store: RolloutStore, reports: list[dict[str, Any]]) -> str:
    outcomes = " ".join(f"{count} {name}" for name, count in sorted(store.outcome_counts().items()))
    groups = " ".join(f"{count} {name}" for name, count in sorted(store.group_counts().items()))
    head = f"step {len(reports)} · policy v{store.policy_version()}"
    return f"{head} · rollouts: {outcomes or 'none yet'} · groups: {groups or 'none yet'}"


def _last_line(log: Path) -> str:
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError as error:
        return f"no log ({error})"
    return next((line for line in reversed(lines) if line), "its log is empty")

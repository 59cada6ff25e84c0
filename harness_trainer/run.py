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
from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import ModelInfo, prepare_model
from harness_trainer.environments import OpenEnvHarborConfig
from harness_trainer.environments.openenv_harbor import inspect_server, require_reachable
from harness_trainer.errors import ConfigError, EngineFailed, GatewayFailed, HarnessTrainerError, TrainingFailed
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.learner.__main__ import LEARNER_ERROR, LearnerSpec
from harness_trainer.learner.final_model import write_final_model
from harness_trainer.learner.sync_config import LoraSync, NcclSync
from harness_trainer.learner.trackers import require_trackers
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
NOTES_SHOWN = "notes_shown"  # run-state key: the newest note of the runner's that a person has seen


@dataclass(slots=True)
class Part:
    """A process of the run, and the error its death means."""

    name: str
    process: OwnedProcess
    log: Path
    error: type[HarnessTrainerError]


@dataclass(frozen=True, slots=True)
class _What:
    """What the runner is told of tasks and agents. `bins`: where each agent's programs are, by its name."""

    tasks: str
    harness: str
    bins: dict[str, Path]
    num_tasks: int  # that are trained on
    evaluation: str | None = None  # tasks that are only evaluated on


class Supervisor:
    """Runs one training run from start to end. Use `train`."""

    def __init__(self, config: RunConfig, run: RunDir, display: Display) -> None:
        self._config = config
        self._run = run
        self._display = display
        self._registry = default_registry()
        self._parts: list[Part] = []
        self._admin_key = secrets.token_urlsafe(32)
        self._metrics_size = 0  # bytes of metrics.jsonl at the last look

    def run(self, stack: ExitStack) -> list[dict[str, Any]]:
        config, run, display = self._config, self._run, self._display
        for left in reap(self._registry):
            counts = f"{left.num_processes} processes, {len(left.objects)} objects of an engine"
            display.phase(f"cleaned up what a dead run left: {left.kind}, {counts} {left.problem}".rstrip())
        find_environment(config.engine)  # cheap to ask, and nothing below is worth doing without it
        load_reward(config.rollouts.reward)
        tasks, what = self._what_runs()
        model = prepare_model(config.model, cache_dir(), progress=display.phase)
        store = RolloutStore(run.store)
        stack.callback(store.close)
        store.forget_engine()  # before anything starts that could take the old one's word
        engine_url_file = run.internal / "engine_url"
        engine_url_file.unlink(missing_ok=True)
        engine = Engine(_engine_for(config), model=model, log_path=run.logs / "engine.log", registry=self._registry)
        stack.callback(engine.stop)
        stack.callback(self._stop_parts)  # before the line above: the engine ends at the same time as everything else
        learner = self._start_learner(model, tasks, engine_url_file, self._transfer_dir(stack))
        engine_url, context = self._start_engine(engine)
        write_atomically(engine_url_file, engine_url)
        agents_socket = self._agents_socket(stack)
        gateway = self._start_gateway(engine_url, model, agents_socket)
        spec = RunnerSpec(
            config=config.rollouts.model_copy(
                update={
                    "reward": pin_reward(config.rollouts.reward),
                    "evaluation": config.rollouts.evaluation.model_copy(update={"tasks": what.evaluation}),
                }
            ),
            sandbox=config.sandbox,
            env=config.env,
            tasks=what.tasks,
            harness=what.harness,
            harness_bin=next(iter(what.bins.values())),
            harness_bins=what.bins,
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
            groups_per_step=config.learner.groups_per_step,
            max_staleness=config.learner.max_staleness,
            max_dropped_in_a_row=config.learner.max_dropped_in_a_row,
        )
        display.phase(
            f"running {' and '.join(what.bins)} on {what.num_tasks} tasks, {config.rollouts.max_concurrent} at a time"
        )
        self._start_module("runner", "harness_trainer.rollouts", spec, TrainingFailed)
        return self._watch(learner, store)

    # -- starting ------------------------------------------------------------------------------------------------

    def _what_runs(self) -> tuple[list[Task], _What]:
        """All tasks, and agents, checked before anything slow is started: ours, or those of `--env`'s server."""
        config, display = self._config, self._display
        if isinstance(config.env, OpenEnvHarborConfig):
            if config.rollouts.evaluation.tasks is not None:
                raise ConfigError("rollouts.evaluation.tasks runs in our own sandboxes: leave it out with --env")
            require_reachable(config.env, config.gateway.public_url)
            display.phase(f"asking the server at {config.env.url} what it can run")
            found = asyncio.run(inspect_server(config.env))
            for note in found.notes:
                display.phase(note)
            return found.tasks, _What("", config.env.harness, {config.env.harness: Path()}, len(found.tasks))
        spec = pin_tasks(config.tasks)  # every part of the run reads the same commit of a dataset
        tasks = load_tasks(spec)
        held_out = config.rollouts.evaluation.tasks
        evaluation = None if held_out is None else pin_tasks(held_out)
        everything = [*tasks, *(load_tasks(evaluation) if evaluation else [])]
        mix = load_mix(config.harness, everything, config.rollouts)
        asyncio.run(check_tasks(everything, config.sandbox, run_id=self._run.path.name, registry=self._registry))
        bins = {name: ensure_installed(agent, cache_dir(), display.phase) for name, agent in mix.harnesses.items()}
        return everything, _What(spec, pin_harness(config.harness), bins, len(tasks), evaluation)

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
            evaluate_every=rollouts.evaluation.every if rollouts.evaluation.tasks else None,
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
        if isinstance(self._config.learner.weight_sync, LoraSync):
            argv += ["--adapters"]
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
        """Until the learner ends and its last policy is evaluated: show progress, stop when another part dies."""
        reports: list[dict[str, Any]] = []
        while True:
            has_ended = not learner.process.alive()
            is_over = has_ended and (learner.process.returncode != 0 or not self._is_evaluating(store))
            reports = self._show_new_steps(reports)
            self._show_notes(store)
            if is_over:
                break
            reason = store.state(RUNNER_ERROR)
            if reason:
                raise TrainingFailed(reason)
            for part in self._parts:
                if part is not learner:
                    self._check(part)
            self._display.status(_status(store, reports))
            time.sleep(POLL_S)
        if learner.process.returncode != 0:
            raise TrainingFailed(store.state(LEARNER_ERROR) or f"the learner died: {_last_line(learner.log)}")
        return reports

    def _is_evaluating(self, store: RolloutStore) -> bool:
        """Whether the last policy of the run is still to be evaluated."""
        evaluation, last_step = self._config.rollouts.evaluation, self._config.learner.max_steps
        return evaluation.tasks is not None and store.due_evaluation(evaluation.every, last_step) is not None

    def _show_notes(self, store: RolloutStore) -> None:
        """What the runner has to say, each once, also over restarts."""
        for note in store.notes(after=int(store.state(NOTES_SHOWN) or 0)):
            self._display.phase(note.detail["line"])
            self._run.event(note.kind, **{key: value for key, value in note.detail.items() if key != "line"})
            store.set_state(NOTES_SHOWN, str(note.seq))

    def _show_new_steps(self, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
        size = self._run.metrics.stat().st_size if self._run.metrics.exists() else 0
        if size == self._metrics_size:  # asked several times a second, over a file that grows with every step
            return known
        self._metrics_size = size
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
    require_trackers(config.learner.report_to)
    run = RunDir(run_dir)
    with ExitStack() as stack:
        stack.enter_context(run.opened(config.model_dump(mode="json"), may_change=MAY_CHANGE))
        reports = Supervisor(config, run, display).run(stack)
        display.phase("training is done; stopping engine, gateway and agents")
        # From the last checkpoint, so that the same command does it after a kill between the two.
        model = prepare_model(config.model, cache_dir(), progress=display.phase)
        for merge in _final_forms(config):
            display.phase(f"the trained model is in {write_final_model(run, model.path, merge=merge)}")
    return reports


def _final_forms(config: RunConfig) -> list[bool]:
    """Of an adapter, the adapter alone (False) and, if wanted, the whole model (True)."""
    lora = config.learner.lora
    return [True] if lora is None else [False, True] if lora.merge else [False]


def _engine_for(config: RunConfig) -> EngineConfig:
    """The engine's settings, with what the learner's way of sending weights needs of it."""
    learner = config.learner
    if isinstance(learner.weight_sync, NcclSync):
        return config.engine.model_copy(update={"weight_transfer_backend": "nccl"})
    if isinstance(learner.weight_sync, LoraSync) and learner.lora is not None:
        # A batch may hold calls of every version that is fresh enough to be trained, and of the one before.
        needed = {"max_loras": learner.max_staleness + 2, "max_lora_rank": learner.lora.served_rank}
        return config.engine.model_copy(update=needed)
    return config.engine


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

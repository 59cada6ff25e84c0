"""The supervisor: starts the parts of a run, watches them, and ends them all.

Owns what a run consists of, the order of start and stop, and when it is over. The parts are processes of their own
(engine, gateway, rollout runner, learner); they meet in the run folder and nowhere else. That a part which dies is
started again is `supervision`'s.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from harness_trainer.cache import cache_dir
from harness_trainer.config import RunConfig, may_change
from harness_trainer.display import Display
from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import ModelInfo, prepare_model
from harness_trainer.engine.replicas import name_of, port_of, settings_of
from harness_trainer.errors import EngineFailed, GatewayFailed, Terminated, TrainingFailed
from harness_trainer.learner import checkpoints
from harness_trainer.learner.__main__ import LEARNER_ERROR, LearnerSpec
from harness_trainer.learner.final_model import write_final_model
from harness_trainer.learner.launch import module_of, num_gpus_here, on_other_machines, pinned
from harness_trainer.learner.sync_config import LoraSync, NcclSync
from harness_trainer.learner.trackers import require_trackers
from harness_trainer.progress import Progress
from harness_trainer.rollouts.__main__ import RUNNER_ERROR
from harness_trainer.rollouts.config import PipelineSpec, ReplicaSpec, RunnerSpec, Transport
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rundir import RunDir, filesystem_errors, write_atomically
from harness_trainer.supervision.engine import EnginePart, Startable
from harness_trainer.supervision.folders import agents_socket, transfer_dir
from harness_trainer.supervision.gateway import Elsewhere, Gateway
from harness_trainer.supervision.parts import Part, Parts
from harness_trainer.supervision.process import PartProcess, search_path
from harness_trainer.supervision.remote import RemoteHost
from harness_trainer.supervision.remote_engine import RemoteEngine
from harness_trainer.supervision.replicas import (
    Entrance,
    Replica,
    release_served,
    require_one_in_containers,
)
from harness_trainer.supervision.restarts import Restarts
from harness_trainer.supervision.way_out import WayOut
from harness_trainer.workload import Inspector, Workload
from sandboxes.base import Access, Endpoint
from sandboxes.lifecycle import OwnedProcess, default_registry, reap, start_process

POLL_S = 0.25
SAVE_S = 10.0  # for a checkpoint when this machine is told to go; everything is to be closed within as much again
ENGINE_AGAIN_S = 120.0  # from an engine's death until its next start has begun, back-off included


class Supervisor:
    """Runs one training run from start to end. Use `train`."""

    def __init__(self, config: RunConfig, run: RunDir, display: Display) -> None:
        self._config = config
        self._run = run
        self._display = display
        self._registry = default_registry()
        self._parts = Parts(Restarts(config.restarts), event=run.event, say=display.phase)
        self._admin_key = secrets.token_urlsafe(32)
        self._progress = Progress(run, display)
        self._way_out = WayOut(
            config.gateway.expose, config.gateway.public_url, run=run, registry=self._registry, say=display.phase
        )
        self._pipeline: PipelineSpec | None = None  # as the gateway's, which is started first

    def run(self, stack: ExitStack) -> list[dict[str, Any]]:
        config, run, display = self._config, self._run, self._display
        self._clean_up()
        self._require_engine()  # cheap to ask, and nothing below is worth doing without it
        what = self._what_runs()
        model = prepare_model(config.model, cache_dir(), progress=display.phase)
        store = RolloutStore(run.store)
        stack.callback(store.close)
        self._forget_reasons(store)
        engines = self._engines(_engine_for(config), model, store, stack)
        on_the_way = transfer_dir(stack, self._registry, run)
        url_files = [engine.url_file for engine in engines]
        learner = self._start_learner(model, what.longest_s, url_files, on_the_way, store)
        replicas, context = self._start_replicas(engines, model, stack)
        self._start_runner(
            what, model.model_id, context, replicas, store,
            max_open_groups=config.learner.groups_per_step * (config.learner.max_staleness + 1),
            num_groups=config.learner.groups_per_step * config.learner.max_steps,
            groups_per_step=config.learner.groups_per_step,
            max_staleness=config.learner.max_staleness,
            max_dropped_in_a_row=config.learner.max_dropped_in_a_row,
        )  # fmt: skip

        return self._watch(learner, store, lambda: release_served(replicas, store))

    # -- starting ------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        for left in reap(self._registry):
            counts = f"{left.num_processes} processes, {len(left.objects)} objects of an engine"
            self._display.phase(f"cleaned up what a dead run left: {left.kind}, {counts} {left.problem}".rstrip())

    def _forget_reasons(self, store: RolloutStore) -> None:
        """What parts of an earlier life judged is put right by now, or is judged anew. Before any part is started: each
        takes its own back only when it has loaded, and the learner and this process look before that."""
        for key in (RUNNER_ERROR, LEARNER_ERROR):
            store.set_state(key, "")

    def _start_runner(
        self,
        what: Workload,
        model: str,
        context: int,
        entrances: Sequence[Entrance],
        store: RolloutStore,
        **schedule: Any,
    ) -> None:
        """`schedule`: what the learner will take, as in `RunnerSpec`."""
        config, run = self._config, self._run
        first, (entrance, *others) = what.specs[0], entrances
        addresses = entrance.gateway.addresses
        spec = RunnerSpec(
            config=config.rollouts,
            sources=what.specs,
            sandbox=config.sandbox,
            tasks=first.tasks,
            harness=first.harness,
            harness_bin=next(iter(first.harness_bins.values()), Path()),
            store=run.store,
            artifacts=run.artifacts,
            registry=self._registry,
            run_id=run.path.name,
            model=model,
            context=context,
            access=Access(gateway=self._way_out.endpoint(addresses["agent_url"], entrance.agents_socket, self._parts)),
            admin_url=addresses["admin_url"],
            pipeline=self._pipeline,
            replicas=[
                ReplicaSpec(
                    access=Access(gateway=Endpoint(other.gateway.addresses["agent_url"], other.agents_socket)),
                    admin_url=other.gateway.addresses["admin_url"],
                )
                for other in others
            ],
            **schedule,
        )
        at_once = config.rollouts.max_concurrent
        self._display.phase(f"running {what.line}, {at_once} at a time")
        self._start_module("runner", "harness_trainer.rollouts", spec, reason=lambda: store.state(RUNNER_ERROR) or None)

    def _what_runs(self) -> Workload:
        """All tasks, agents and servers of the run's sources, checked before anything slow is started."""
        return Inspector(self._config, self._run.path.name, self._registry, self._display.phase).inspect()

    def _start_learner(
        self,
        model: ModelInfo,
        longest_s: float,
        engine_url_files: Sequence[Path],
        transfer_dir: Path,
        store: RolloutStore,
    ) -> Part:
        run = self._run
        rollouts = self._config.rollouts
        # Nothing may be heard of a rollout for as long as it may take, and as its runner may wait for a node.
        for_node_s = rollouts.ray.patience_s if rollouts.executor == "ray" else 0
        spec = LearnerSpec(
            config=pinned(self._config.learner),
            model_path=model.path,
            store=run.store,
            checkpoints=run.checkpoints,
            metrics=run.metrics,
            engine_url_file=engine_url_files[0],
            replica_url_files=list(engine_url_files[1:]),
            transfer_dir=transfer_dir,
            keep_weights=run.weights if self._config.keep_weights else None,
            temperature=rollouts.temperature,
            starved_after_s=longest_s + 120 + for_node_s,
            evaluate_every=rollouts.evaluation.every if self._config.evaluates else None,
            engine_away_s=self._config.engine.start_timeout_s + ENGINE_AGAIN_S,
        )
        reason = lambda: store.state(LEARNER_ERROR) or None  # noqa: E731
        if elsewhere := on_other_machines(spec.config, run.internal / "learner.json"):
            self._display.phase(f"on each other machine of the learner: {elsewhere}")
        return self._start_module("learner", module_of(spec.config), spec, reason=reason, ends=True)

    def _start_module(
        self, name: str, module: str, spec: Any, *, reason: Callable[[], str | None], ends: bool = False
    ) -> Part:
        spec_file = self._run.internal / f"{name}.json"
        with filesystem_errors(self._run.path):
            write_atomically(spec_file, spec.model_dump_json(indent=1))
        argv = [sys.executable, "-m", module, "--spec", str(spec_file)]
        part = Part(name, self._log(name), TrainingFailed, lambda: self._spawn(name, argv), reason=reason, ends=ends)
        self._parts.start(part)
        return part

    def _spawn(self, name: str, argv: list[str], *, kind: str | None = None) -> OwnedProcess:
        """`kind` is what its record says it is; None = as its name."""
        # Passive waiting: the learner's threads share their cores with agents and, on a CPU, with the engine.
        # No progress bars: a log's last line is what a person is shown when a part dies.
        ours = {"OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1"}
        env = {**ours, **os.environ, **search_path(), "CAPTURE_PROXY_ADMIN_KEY": self._admin_key}
        return start_process(
            argv, env=env, cwd=self._run.path, log_path=self._log(name), registry=self._registry, kind=kind or name
        )

    def _require_engine(self) -> None:
        """Raises SetupError when there is nothing to start an engine with: no environment here, no container there."""
        require_one_in_containers(self._config.engine.replicas)
        host = RemoteHost.find("engine")
        if host is None:
            self._settings_of_each(self._config.engine)
        else:
            host.address()

    def _engines(
        self, config: EngineConfig, model: ModelInfo, store: RolloutStore, stack: ExitStack
    ) -> list[EnginePart]:
        """Every replica of the engine, not started yet; all parts of the run end with `stack`."""
        engines = []
        store.forget_engines(config.replicas)  # before anything starts that could take the old ones' word
        for number, own in enumerate([config] if config.replicas == 1 else self._settings_of_each(config)):
            url_file = self._run.internal / name_of("engine_url", number)
            url_file.unlink(missing_ok=True)
            make = partial(self._make_engine, model=model, replica=number)
            status = self._display.status if number == 0 else lambda text: None
            engines.append(EnginePart(own, make, store, url_file, status=status, replica=number))
            stack.callback(engines[-1].stop)
        stack.callback(self._way_out.close)
        stack.callback(self._parts.stop)  # before the lines above: the engine ends at the same time as everything else
        return engines

    def _settings_of_each(self, config: EngineConfig) -> list[EngineConfig]:
        return settings_of(config, find_environment(config).kind, num_learner_gpus=self._num_learner_gpus)

    @property
    def _num_learner_gpus(self) -> int:
        return num_gpus_here(self._config.learner)

    def _start_replicas(
        self, engines: Sequence[EnginePart], model: ModelInfo, stack: ExitStack
    ) -> tuple[list[Replica], int]:
        """Engines and gateways, started; with them the engines' window in tokens."""
        parts, context = self._start_engines(engines)
        replicas = []
        for engine, part in zip(engines, parts, strict=True):
            socket = self._agents_socket(stack)
            gateway = self._start_gateway(
                engine.url, model.model_id, socket, tokenizer=model.path, transport="generate", replica=engine.replica
            )
            engine.hold = gateway.hold
            replicas.append(Replica(gateway, socket, engine, part))
        return replicas, context

    def _make_engine(self, settings: EngineConfig, *, model: ModelInfo, replica: int) -> Startable:
        host, log = RemoteHost.find("engine"), self._log(name_of("engine", replica))
        if host is None:
            return Engine(settings, model=model, log_path=log, registry=self._registry)
        return RemoteEngine(host, settings, model=model, folder=self._run.internal, log_path=log)

    def _spawn_gateway(self, host: RemoteHost | None, name: str, argv: list[str]) -> PartProcess:
        if host is None:
            return self._spawn(name, argv, kind="gateway")
        # Of this container's variables it gets its keys and no other: they hold a person's secrets.
        keys = {name: os.environ[name] for name in ("CAPTURE_PROXY_ENGINE_KEY",) if name in os.environ}
        env = {**keys, "CAPTURE_PROXY_ADMIN_KEY": self._admin_key}
        return host.start(argv, env=env, cwd=self._run.path, log_path=self._log("gateway"), kind="gateway")

    def _log(self, name: str) -> Path:
        return self._run.logs / f"{name}.log"

    def _start_engines(self, engines: Sequence[EnginePart]) -> tuple[list[Part], int]:
        """Start the engines, prove that they can be trained from, tell the learner; their parts and their window."""
        from harness_trainer.engine.check import require_trainable

        names = [name_of("engine", engine.replica) for engine in engines]
        parts = [
            Part(name, self._log(name), EngineFailed, engine.launch, on_death=engine.lost, give_up=engine.give_up)
            for name, engine in zip(names, engines, strict=True)
        ]
        self._parts.start_together(parts)
        found = [require_trainable(engine.url) for engine in engines]
        num = f"{len(engines)} replicas of the engine serve" if len(engines) > 1 else "engine serves"
        window = found[0].max_model_len
        self._display.phase(f"{num} {found[0].model}, window {window} tokens")
        if window is None:
            raise EngineFailed("the engine does not report its window (max_model_len); use a vLLM that does")
        for engine in engines:
            engine.announce()
        return parts, window

    def _start_gateway(
        self,
        engine_url: str,
        model: str,
        agents_socket: Path | None,
        *,
        tokenizer: Path | None,
        transport: Transport,
        replica: int = 0,
    ) -> Gateway:
        """`tokenizer` None, `transport` "auto": of an engine of which nothing is known but its address."""
        config, name = self._config.gateway, name_of("gateway", replica)
        way = PipelineSpec(
            engine_url=engine_url,
            model=model,
            transport=transport,
            adapters=isinstance(self._config.learner.weight_sync, LoraSync),
            bridging=config.bridging,
            renderer=config.renderer,
            tokenizer=tokenizer,
            thinking_retention=config.thinking_retention,
            engine_patience_s=config.engine_patience_s,
        )
        self._pipeline = self._pipeline or way
        argv = [sys.executable, "-m", "capture_proxy", "--engine-url", way.engine_url, "--store", str(self._run.store)]
        argv += ["--model", way.model, "--transport", way.transport]
        argv += ["--bridging", way.bridging, "--renderer", way.renderer]
        if way.tokenizer is not None:
            argv += ["--tokenizer", str(way.tokenizer)]
        argv += ["--thinking-retention", way.thinking_retention, "--engine-patience", str(way.engine_patience_s)]
        if way.adapters:
            argv += ["--adapters"]
        if agents_socket is not None:
            argv += ["--agent-socket", str(agents_socket)]
        if replica:
            argv += ["--name", name]
        host = RemoteHost.find("gateway")
        gateway = Gateway(
            argv,
            lambda command: self._spawn_gateway(host, name, command),
            key=self._admin_key,
            port=port_of(config.port, replica),
            ready_file=self._run.internal / f"{name}.json",
            log=self._log(name),
            elsewhere=None if host is None else Elsewhere(host.address(), host.folder / "admin.sock"),
        )
        self._parts.start(Part(name, self._log(name), GatewayFailed, gateway.launch, give_up=gateway.give_up))
        self._display.phase(f"capture gateway for agents at {gateway.addresses['agent_url']}")
        return gateway

    def _agents_socket(self, stack: ExitStack) -> Path | None:
        """None = no sandbox of the run needs one."""
        if self._config.sandbox.type != "docker":
            return None
        return agents_socket(stack, self._registry, self._run)

    # -- watching ------------------------------------------------------------------------------------------------

    def _watch(self, learner: Part, store: RolloutStore, each_look: Callable[[], None]) -> list[dict[str, Any]]:
        """Until the learner is done and its last policy is evaluated; what is learnt is saved if that is cut short."""
        try:
            return self._until_over(learner, store, each_look)
        except Terminated:
            self._save(learner)
            raise

    def _save(self, learner: Part) -> None:
        """If the learner can within some seconds: it can while it waits for groups, or when a step ends."""
        folder, process = self._run.checkpoints, learner.process
        if process is None or not learner.running or learner.finished:
            return
        self._display.phase(f"told to end: a checkpoint first, if there can be one within {SAVE_S:g} s")
        if (why := checkpoints.request(folder)) is not None:
            self._display.phase(f"no checkpoint can be asked for ({why}): the last one counts")
            return
        deadline = time.monotonic() + SAVE_S
        while checkpoints.is_requested(folder) and process.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        if checkpoints.is_requested(folder):
            self._display.phase("no checkpoint could be made in the middle of a step: the last one counts")

    def _until_over(self, learner: Part, store: RolloutStore, each_look: Callable[[], None]) -> list[dict[str, Any]]:
        """Show progress, start again what dies."""
        while True:
            is_over = learner.finished and not self._is_evaluating(store)
            self._progress.show_new_steps()
            self._progress.show_notes(store)
            if is_over:
                if self._lacks_last_evaluation(store):
                    self._display.phase("the engine died after the last step: the last policy is not evaluated")
                return self._progress.reports
            reason = store.state(RUNNER_ERROR)  # before the runner has ended all that it runs
            if reason:
                raise TrainingFailed(reason)
            self._parts.look()
            each_look()
            self._progress.show_status(store)
            time.sleep(POLL_S)

    def _is_evaluating(self, store: RolloutStore) -> bool:
        """Whether the last policy of the run is still to be evaluated."""
        evaluation, last_step = self._config.rollouts.evaluation, self._config.learner.max_steps
        return self._config.evaluates and store.due_evaluation(evaluation.every, last_step) is not None

    def _lacks_last_evaluation(self, store: RolloutStore) -> bool:
        """The learner is done, so nobody can send its last weights to an engine that was started again."""
        return self._config.evaluates and all(e["step"] != self._config.learner.max_steps for e in store.evaluations())


def train(config: RunConfig, run_dir: Path, display: Display) -> list[dict[str, Any]]:
    """Run (or continue) training in `run_dir` until `learner.max_steps`; the report of every step.

    Raises a HarnessTrainerError with one line for people; whatever happens, nothing that it started is left running.
    """
    require_trackers(config.learner.report_to)
    run = RunDir(run_dir)
    with ExitStack() as stack:
        stack.enter_context(run.opened(config.model_dump(mode="json"), may_change=may_change(config)))
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

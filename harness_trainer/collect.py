"""Agents on tasks, or environments whose turns are ours, without a learner: evaluate a model, collect what it does.

Starts engine, gateway and runner. Owns the order of it, the name of the weights and when it is over; the parts are
`run.Supervisor`'s. To the runner it is one evaluation, that of the policy after no step: groups with ids below 0, never
trained on, finished where a killed one left off. Called by `harness-trainer rollout`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from harness_trainer.cache import cache_dir
from harness_trainer.config import CollectConfig, may_change
from harness_trainer.display import Display
from harness_trainer.engine.check import what_serves
from harness_trainer.engine.prepare import prepare_model
from harness_trainer.errors import ConfigError, TrainingFailed
from harness_trainer.learner.engine_calls import EngineCalls, version_name
from harness_trainer.rollouts.__main__ import RUNNER_ERROR
from harness_trainer.rollouts.lineage import BASE
from harness_trainer.rollouts.scores import Score, stored_scores
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.run import POLL_S, Supervisor
from harness_trainer.rundir import RunDir, filesystem_errors, write_atomically
from harness_trainer.supervision.replicas import Entrance, release_served
from harness_trainer.workload import Workload

VERSION = 1  # of the only policy: the model as it was given
STEP = 0  # of the evaluation: nobody has trained this policy here
ENGINE_KEY = "CAPTURE_PROXY_ENGINE_KEY"  # the gateway reads it by itself


class Collector(Supervisor):
    """Runs every task with every agent. Use `collect`."""

    def __init__(self, config: CollectConfig, run: RunDir, display: Display) -> None:
        super().__init__(config.as_run(), run, display)
        self._wanted = config
        self._each_look: Callable[[], None] = lambda: None

    def collect(self, stack: ExitStack) -> list[Score]:
        """Until every rollout is over, also those that an earlier start left; what they came to."""
        store = RolloutStore(self._run.store)
        stack.callback(store.close)
        if not store.evaluations():
            self._begin(stack, store)
            self._wait(store)
        passes = self._config.rollouts.pass_reward
        own = {one.name: one.pass_reward for one in self._wanted.sources or () if one.pass_reward is not None}
        return stored_scores(store, STEP, self._wanted.samples, passes, own)

    def _begin(self, stack: ExitStack, store: RolloutStore) -> None:
        self._clean_up()
        self._forget_reasons(store)
        if self._wanted.engine_url is None:
            self._require_engine()  # cheap to ask, and nothing below is worth doing without it
        work = self._what_runs().only_evaluated()
        store.forget_engine()  # before anything starts that could take the old one's word
        if store.used_up() == 0:
            store.continue_from(BASE, 0)
            store.announce(VERSION)
        begin = self._on_own_engine if self._wanted.engine_url is None else self._on_their_engine
        begin(stack, store, work)

    def _on_own_engine(self, stack: ExitStack, store: RolloutStore, work: Workload) -> None:
        model = prepare_model(self._config.model, cache_dir(), progress=self._display.phase)
        replicas, context = self._start_replicas(self._engines(self._config.engine, model, store, stack), model, stack)

        def each_look() -> None:
            serving = store.serving(len(replicas))
            for number, replica in enumerate(replicas):
                if replica.part.running and number not in serving:
                    _name_weights(replica.engine.url)
                    store.publish(VERSION, engine={number: store.engine_number(number)})
            release_served(replicas, store)

        self._run_tasks(work, model.model_id, context, replicas, store, each_look)

    @property
    def _num_learner_gpus(self) -> int:
        return 0

    def _on_their_engine(self, stack: ExitStack, store: RolloutStore, work: Workload) -> None:
        """An engine that serves already: it keeps the names that it has, and nothing of it is ours to start again."""
        url = (self._wanted.engine_url or "").rstrip("/").removesuffix("/v1")
        usual = CollectConfig.model_fields["model"].default
        named = None if self._wanted.model == usual else self._wanted.model
        found = what_serves(url, model=named, key=os.environ.get(ENGINE_KEY))
        context = found.max_model_len or self._config.engine.max_model_len
        if context is None:
            raise ConfigError(f"the engine at {url} does not say how long its window is: give --engine.max-model-len")
        self._display.phase(f"the engine at {url} serves {found.model}, window {context} tokens")
        if not found.token_ids:
            self._display.phase("it returns no token ids: rollouts are scored, and nothing of them can be trained on")
        stack.callback(self._way_out.close)
        stack.callback(self._parts.stop)
        socket = self._agents_socket(stack)
        gateway = self._start_gateway(url, found.model, socket, tokenizer=None, transport="auto")
        store.publish(VERSION)
        self._run_tasks(work, found.model, context, [Entrance(gateway, socket)], store, gateway.release)

    def _run_tasks(
        self,
        work: Workload,
        model: str,
        context: int,
        entrances: Sequence[Entrance],
        store: RolloutStore,
        each_look: Callable[[], None],
    ) -> None:
        self._each_look = each_look
        wanted = self._wanted
        self._start_runner(
            work, model, context, entrances, store,
            max_open_groups=1, num_groups=0, every_agent=True, num_evaluated=wanted.num_groups,
        )  # fmt: skip

    def _wait(self, store: RolloutStore) -> None:
        while not store.evaluations():
            self._progress.show_notes(store)
            reason = store.state(RUNNER_ERROR)  # before the runner has ended all that it runs
            if reason:
                raise TrainingFailed(reason)
            self._parts.look()
            self._each_look()
            outcomes = " ".join(f"{count} {name}" for name, count in sorted(store.outcome_counts().items()))
            self._display.status(f"rollouts: {outcomes or 'none yet'}")
            time.sleep(POLL_S)
        self._progress.show_notes(store)


def _name_weights(url: str) -> None:
    """An engine of our own holds the model as it was given. From here on its tokens say so: they are of v1."""
    calls = EngineCalls(url, control_timeout_s=60, cleanup_timeout_s=10)
    try:
        calls.post("update_weight_version", {"new_version": version_name(VERSION)})
        calls.confirm(version_name(VERSION))
    finally:
        calls.close()


def collect(config: CollectConfig, run_dir: Path, display: Display) -> list[Score]:
    """Run (or finish) all rollouts in `run_dir`; the scores, also written to its `scores.json`.

    Raises a HarnessTrainerError with one line for people; whatever happens, nothing that it started is left running.
    """
    run = RunDir(run_dir)
    with ExitStack() as stack:
        stack.enter_context(run.opened(config.model_dump(mode="json"), may_change=may_change(config) | {"engine_url"}))
        found = Collector(config, run, display).collect(stack)
        with filesystem_errors(run.path):
            write_atomically(run.path / "scores.json", json.dumps([asdict(score) for score in found], indent=1) + "\n")
    return found

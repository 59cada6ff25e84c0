"""The learner as a process: `python -m harness_trainer.learner --spec FILE`, started by the supervisor.

Owns its life cycle: it loads its libraries while the engine is still loading, waits for the engine's address, picks the
checkpoint to continue from, and writes one line of `metrics.jsonl` per step. It trains nothing itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict

from harness_trainer.errors import HarnessTrainerError
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.engine_presence import EnginePresence
from harness_trainer.learner.final_model import ENGINE_VERSION
from harness_trainer.learner.replicas import Replicas
from harness_trainer.learner.store_source import StoreGroupSource
from harness_trainer.rollouts.__main__ import RUNNER_ERROR
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome
from harness_trainer.rundir import RunDir, append_line, filesystem_errors, write_atomically

if TYPE_CHECKING:
    from harness_trainer.learner.ranks import Ranks
    from harness_trainer.learner.train import StepReport, WeightTransfer

    class Transfer(WeightTransfer, Protocol):
        """Any that `transfers` makes."""

        @property
        def last_timings(self) -> dict[str, float]: ...

        def compare_next(self) -> None: ...


LEARNER_ERROR = "learner_error"  # run-state key that holds the one line a person should read


_OTHER_POLICY = "harness_trainer.learner.same_policy"  # whose warnings a person is told


class LearnerSpec(BaseModel):
    """What the supervisor hands to the learner process, as one JSON file in the run folder. Holds no secret."""

    model_config = ConfigDict(extra="forbid")

    config: LearnerConfig
    model_path: Path
    store: Path
    checkpoints: Path
    metrics: Path
    engine_url_file: Path  # appears when the engine serves; holds its address
    replica_url_files: list[Path] = []  # the same of the engine's replicas beyond the first
    transfer_dir: Path  # memory-backed folder for weights on their way to the engine
    keep_weights: Path | None  # folder that keeps the weights of every published policy; None = not kept
    temperature: float  # of sampling, and so of the recomputed log-probabilities
    starved_after_s: float
    evaluate_every: int | None = (
        None  # steps between two evaluations, during which no step is taken; None = there are none
    )
    engine_away_s: float = 900.0  # longest wait for an engine that is started again


def _run(spec: LearnerSpec, store: RolloutStore, engine: EnginePresence | Replicas) -> None:
    # Ten seconds of imports that overlap with the engine's own start.
    from harness_trainer.learner.rank_watch import among_peers

    with among_peers(spec.config) as ranks:
        engine.while_waiting = ranks.keep_waiting
        _learn(spec, store, engine, ranks)


def _help(spec: LearnerSpec) -> int:
    """As one of several processes, but not the main one: the store and the engine are not this one's business."""
    from harness_trainer.learner.rank_watch import among_peers

    try:
        with among_peers(spec.config) as ranks:
            from harness_trainer.learner.train import help_learner

            help_learner(
                spec.config,
                model_path=spec.model_path,
                output_dir=spec.checkpoints,
                ranks=ranks,
                temperature=spec.temperature,
            )
        return 0
    except Exception:
        traceback.print_exc()
        return 1


def _presence(spec: LearnerSpec, store: RolloutStore) -> EnginePresence | Replicas:
    members = [
        EnginePresence(store, file, away_s=spec.engine_away_s, replica=replica)
        for replica, file in enumerate([spec.engine_url_file, *spec.replica_url_files])
    ]
    return members[0] if len(members) == 1 else Replicas(members, away_s=spec.engine_away_s)


def _learn(spec: LearnerSpec, store: RolloutStore, engine: EnginePresence | Replicas, ranks: Ranks) -> None:
    from harness_trainer.learner.continuing import used_up
    from harness_trainer.learner.measuring import EngineWatch, Meter
    from harness_trainer.learner.train import run_learner

    resume_from, run_name = _go_on(spec, store)
    transfer = _transfer(spec, store, engine)
    with _telling_first(store):
        run_learner(
            spec.config,
            model_path=spec.model_path,
            output_dir=spec.checkpoints,
            group_source=StoreGroupSource(
                spec.store,
                alive=lambda: store.state(RUNNER_ERROR) or None,
                starved_after_s=spec.starved_after_s,
                evaluate_every=spec.evaluate_every,
                engine_number=lambda: engine.numbers,
            ),
            weight_transfer=transfer,
            on_step=lambda report: _write_down(spec.metrics, store, report),
            resume_from=resume_from,
            base_version=used_up(store),
            temperature=spec.temperature,
            measure=Meter(
                store,
                EngineWatch(spec.store),
                max_staleness=spec.config.max_staleness,
                phases_s=lambda: transfer.last_timings,
            ),
            run_name=run_name,
            engine=engine,
            ranks=ranks,
        )


class TellsFirst(logging.Handler):
    """The first warning also as a note of the run: a person may never open the log, which has all of them."""

    def __init__(self, store: RolloutStore) -> None:
        super().__init__(logging.WARNING)
        self._store: RolloutStore | None = store

    def emit(self, record: logging.LogRecord) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.tell("other_policy", record.getMessage())


@contextmanager
def _telling_first(store: RolloutStore) -> Iterator[None]:
    handler, logger = TellsFirst(store), logging.getLogger(_OTHER_POLICY)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)  # the store is closed after this


def _go_on(spec: LearnerSpec, store: RolloutStore) -> tuple[Path | None, str]:
    """Set right what an earlier life left; the checkpoint to go on from (None = none), the run's name for trackers."""
    from harness_trainer.learner.checkpoints import last_checkpoint, read_state
    from harness_trainer.learner.continuing import settle
    from harness_trainer.learner.trackers import go_on
    from harness_trainer.learner.weight_transfer import remove_unsent

    resume_from = last_checkpoint(spec.checkpoints)
    state = None if resume_from is None else read_state(resume_from)
    after_step = 0 if state is None else state.step
    _forget_steps_after(spec.metrics, after_step)
    settle(store, state)
    run_name = go_on(spec.config.report_to, store, spec.metrics.parent, after_step=after_step)
    for folder in filter(None, (spec.transfer_dir, spec.keep_weights, RunDir(spec.metrics.parent).internal)):
        remove_unsent(folder)  # of a learner that was killed while it sent them
    return resume_from, run_name


def _transfer(spec: LearnerSpec, store: RolloutStore, engine: EnginePresence | Replicas) -> Transfer:
    """Wait for the engine, or for a replica of it, and make the way that weights take there."""
    from harness_trainer.learner.continuing import announce
    from harness_trainer.learner.engine_calls import engine_version
    from harness_trainer.learner.transfers import make_replicated, make_transfer
    from harness_trainer.learner.weight_check import take_request

    run = RunDir(spec.metrics.parent)
    with filesystem_errors(run.path):
        run.internal.mkdir(parents=True, exist_ok=True)

    def tell(version: int) -> None:
        """Before each update: of its version, and whether it is to be compared with the engine's weights."""
        announce(store, version)
        with filesystem_errors(run.path):
            asked = take_request(run.path)
        if asked:
            transfer.compare_next()

    engine_url = engine.reach()
    store.set_state(ENGINE_VERSION, engine_version(engine_url))
    make = (
        partial(make_replicated, spec.config, engine)
        if isinstance(engine, Replicas)
        else partial(make_transfer, spec.config, engine_url)
    )
    # The run's own disk is where the weights go when memory has no room: the engine sees it in every layout.
    transfer: Transfer = make(
        directory=spec.transfer_dir, keep_weights=spec.keep_weights, announce=tell, fallback_dir=run.internal
    )
    return transfer


def _write_down(metrics: Path, store: RolloutStore, report: StepReport) -> None:
    """The step's line, on the disk before the step's checkpoint is."""
    line = json.dumps({**asdict(report), **_rollout_facts(store, report)})
    with filesystem_errors(metrics.parent):
        append_line(metrics, line)


def _rollout_facts(store: RolloutStore, report: StepReport) -> dict[str, Any]:
    """What the step's rollouts came to, beside what the learner measured."""
    results = store.trained_results(report.step)
    counts = store.outcome_counts(report.step)
    num_rows, num_rollouts = report.num_rows, report.num_rollouts
    stages = dict.fromkeys(stage for result in results for stage in result.stages_s)
    return {
        "outcomes": {outcome.value: counts[outcome] for outcome in Outcome if counts.get(outcome)},
        # Of the whole run so far, by reason: what the learner would not train and what the runner would not hand over.
        "dropped_total": store.drop_counts(),
        # Of the policy that this step started from; None = it was not evaluated.
        "evaluation": next((e for e in store.evaluations() if e["step"] == report.step - 1), None),
        "num_turns": sum(result.num_turns for result in results),
        "num_side_turns": sum(result.num_side_turns for result in results),
        "rows_per_rollout": num_rows / num_rollouts if num_rollouts else None,
        # Medians over the rollouts that reached the stage, in seconds; `warm` = the share that found a sandbox ready.
        "stages_s": {
            stage: round(statistics.median(r.stages_s[stage] for r in results if stage in r.stages_s), 3)
            for stage in stages
        },
        "warm": statistics.fmean(bool(r.warm) for r in results) if results else None,
    }


def _forget_steps_after(metrics: Path, step: int) -> None:
    """A continued run takes the steps after its checkpoint again; their lines must not stand twice."""
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()  # without one that was cut off
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        write_atomically(metrics, "".join(line + "\n" for line in kept))


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="harness_trainer.learner", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True)
    spec = LearnerSpec.model_validate_json(parser.parse_args().spec.read_text(encoding="utf-8"))
    if spec.config.num_processes > 1 and os.environ.get("RANK", "0") != "0":
        return _help(spec)
    signal.signal(signal.SIGTERM, _interrupt)
    logging.basicConfig(format="%(message)s")  # to stderr, which is the learner's log
    logging.getLogger("harness_trainer").setLevel(logging.INFO)
    store = RolloutStore(spec.store)
    store.set_state(LEARNER_ERROR, "")
    engine = _presence(spec, store)
    try:
        _run(spec, store, engine)
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        traceback.print_exc()
        # What is said here ends the run. An engine that died, or an error that nobody foresaw (out of memory, say), is
        # a reason to start again from the last checkpoint.
        if isinstance(error, HarnessTrainerError) and not engine.is_gone(error):
            store.set_state(LEARNER_ERROR, str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())

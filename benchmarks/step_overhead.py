"""What an optimizer step of ours costs beyond one of TRL's own trainer on the same batch, in one process.

    python -m benchmarks.step_overhead [--steps 12] [--groups 2] [--group-size 4] [--turns 3] [--model smollm2]

Two trainers of the same model take turns, step by step. Both train the same rows with the same number of forward and
backward passes of the same tokens (checked), the same attention and the same optimizer; neither sends weights anywhere.
TRL's finds its samples ready in a queue, as its worker leaves them. Ours begins where the learner of a run begins, with
captured rollouts in the run's SQLite store, and ends where it ends: groups marked as trained, every metric computed,
the step's line in metrics.jsonl. So reading, building rows and packing, which TRL's worker does elsewhere, are counted
against us. The clock runs from one step's log to the next.

Off CUDA TRL's trainer needs two of our amendments (`fit_trl_to_this_machine`); both have them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import random_model
from benchmarks.scripted_groups import Recorded, Shape, record
from harness_trainer.cache import cache_dir
from harness_trainer.engine.prepare import prepare_model
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rundir import append_line

if TYPE_CHECKING:
    from harness_trainer.learner.train import StepReport

GOAL = 0.03  # of TRL's step
TRL, OURS = "TRL", "ours"
_WARM = 2  # steps of each that do not count
_NEVER_STALE = 10**6
_FORWARDED, _PASSES = "batch/forwarded_tokens_per_step", "batch/microbatches_per_step"
_PARTS = {"forward and backward": "perf/fwd_bwd_s", "optimizer": "perf/optimizer_s"}


@dataclass(frozen=True, slots=True)
class Batch:
    """What both train on."""

    model: Path
    folder: Path
    groups: list[list[Recorded]]  # one step's after the other's
    groups_per_step: int
    config: LearnerConfig

    @property
    def store(self) -> Path:
        return self.folder / "store.sqlite"


@dataclass(slots=True)
class Taken:
    """One trainer's steps: wall and processor seconds of each, and its log."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)

    def part(self, metric: str) -> list[float]:
        return [log[metric] for log in self.logs]

    @property
    def rest_s(self) -> list[float]:
        """What a step takes beside its forward and backward passes and the optimizer."""
        parts = [self.part(metric) for metric in _PARTS.values()]
        return [wall - sum(each) for wall, *each in zip(self.wall_s, *parts, strict=True)]


class Turns:
    """Lets one trainer at a time run, from one of its steps' logs to the next, and takes the time of each."""

    def __init__(self) -> None:
        self.taken = {TRL: Taken(), OURS: Taken()}
        self._turn = TRL
        self._condition = threading.Condition()
        self._began: tuple[float, float] | None = None
        self._failed: BaseException | None = None

    def wait(self, name: str) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == name or self._failed is not None)
            if self._failed is not None:
                raise SystemExit(f"the other trainer failed: {self._failed}")
        self._began = time.perf_counter(), time.process_time()

    def step_is_over(self, name: str, log: dict[str, float]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        assert self._began is not None
        taken = self.taken[name]
        taken.wall_s.append(wall - self._began[0])
        taken.cpu_s.append(cpu - self._began[1])
        taken.logs.append(log)
        with self._condition:
            self._turn = OURS if name == TRL else TRL
            self._condition.notify_all()
        self.wait(name)

    def failed(self, error: BaseException) -> None:
        with self._condition:
            self._failed = self._failed or error
            self._condition.notify_all()

    def is_over(self, name: str) -> None:
        """The trainer needs no more turns."""
        with self._condition:
            self._turn = OURS if name == TRL else TRL
            self._condition.notify_all()


class NoTransfer:
    """A weight transfer that sends nothing."""

    def next_version(self, version: int) -> None: ...

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[Any]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


# --- TRL ------------------------------------------------------------------------------------------------------------


class ReadySamples:
    """TRL's rollout worker, whose samples are all there."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise SystemExit("TRL's trainer asked for more samples than a step has")


def step_samples(batch: Batch, groups: Sequence[Sequence[Recorded]]) -> list[dict[str, Any]]:
    """The samples that the learner makes of these groups for one step."""
    from harness_trainer.learner.group_source import TrainGroup
    from harness_trainer.learner.rows import rows_from_trace
    from harness_trainer.learner.step_batch import build_step

    whole = []
    for group in groups:
        results = [recorded.result for recorded in group]
        rows = [rows_from_trace(result.trace or {}).rows for result in results]
        whole.append(TrainGroup(results[0].group_id, results[0].task, results, rows))
    return build_step(whole, lambda version: 0, batch.config.objective).samples


def train_trl(batch: Batch, turns: Turns) -> None:
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    from harness_trainer.learner.train import trainer_arguments
    from harness_trainer.learner.trl_compat import fit_trl_to_this_machine, use_attention_that_runs_here

    turns.wait(TRL)
    fit_trl_to_this_machine()
    size = batch.groups_per_step
    steps = [step_samples(batch, batch.groups[i : i + size]) for i in range(0, len(batch.groups), size)]
    samples = [
        RolloutSample(
            prompt=[],
            completion=[],
            input_ids=sample["input_ids"],
            completion_mask=sample["completion_mask"],
            old_log_probs=sample["old_log_probs"],
            advantage=sample["advantage"],
            model_version=1,
            group_id=sample["group_id"],
            metrics={"reward": 0.5, "reward_std": 0.5},
        )
        for step in steps
        for sample in step
    ]
    arguments = trainer_arguments(batch.config, batch.folder / "trl", 1.0)
    arguments.gradient_accumulation_steps = size  # a group fills one forward pass
    arguments.save_strategy = "no"

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "loss" in logs:
                turns.step_is_over(TRL, dict(logs))

    trainer = AsyncGRPOTrainer(
        model=str(batch.model),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        rollout_worker=ReadySamples(samples),
        weight_transfer=NoTransfer(),
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)
    use_attention_that_runs_here()
    trainer.train()


# --- ours -----------------------------------------------------------------------------------------------------------


def fill_store(batch: Batch) -> None:
    """What the runner would have left there."""
    store = RolloutStore(batch.store)
    for group in batch.groups:
        first = group[0].result
        store.open_group(first.group_id, first.task, first.harness)
        for slot, recorded in enumerate(group):
            store.start_rollout(recorded.result.rollout_id, first.group_id, slot, 0)
            store.finish_rollout(recorded.result, final=True)
        store.group_ready(first.group_id)
    store.close()


def train_ours(batch: Batch, turns: Turns) -> None:
    from harness_trainer.learner.__main__ import _rollout_facts
    from harness_trainer.learner.measuring import EngineWatch, Meter
    from harness_trainer.learner.store_source import StoreGroupSource
    from harness_trainer.learner.train import run_learner

    turns.wait(OURS)
    store, metrics = RolloutStore(batch.store), batch.folder / "metrics.jsonl"

    def on_step(report: StepReport) -> None:
        append_line(metrics, json.dumps({**asdict(report), **_rollout_facts(store, report)}))
        turns.step_is_over(OURS, report.metrics)

    try:
        run_learner(
            batch.config,
            model_path=batch.model,
            output_dir=batch.folder / "ours",
            group_source=StoreGroupSource(batch.store, alive=lambda: None, starved_after_s=600),
            weight_transfer=NoTransfer(),
            on_step=on_step,
            resume_from=None,
            base_version=0,
            measure=Meter(store, EngineWatch(batch.store), max_staleness=batch.config.max_staleness, phases_s=dict),
        )
    finally:
        store.close()


# --- both -----------------------------------------------------------------------------------------------------------


def take_turns(batch: Batch) -> dict[str, Taken]:
    """Every step of both; the steps that count."""
    turns = Turns()

    def run(name: str, train: Callable[[Batch, Turns], None]) -> None:
        try:
            train(batch, turns)
            turns.is_over(name)
        except BaseException as error:
            turns.failed(error)
            raise

    threads = [threading.Thread(target=run, args=pair) for pair in ((TRL, train_trl), (OURS, train_ours))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns._failed is not None:
        raise SystemExit(f"a trainer failed: {turns._failed!r}")
    for taken in turns.taken.values():
        for values in (taken.wall_s, taken.cpu_s, taken.logs):
            del values[:_WARM]
    return turns.taken


def one_pass_per_group(batch: Batch) -> int:
    """The token budget with which each group of the batch fills a forward pass of its own."""
    from harness_trainer.learner.trl_compat import pack_micro_batches

    sizes = [
        len(tree.tokens) for group in batch.groups for tree in pack_micro_batches(step_samples(batch, [group]), 10**9)
    ]
    return max(sizes)


def report(taken: dict[str, Taken]) -> bool:
    """Print the table; whether the goal is met."""
    theirs, ours = taken[TRL], taken[OURS]
    for metric in (_FORWARDED, _PASSES):
        if theirs.part(metric) != ours.part(metric):
            raise SystemExit(f"the two did not do the same: {metric} {theirs.part(metric)} and {ours.part(metric)}")
    print(
        f"{len(ours.wall_s)} steps of each, {ours.part(_FORWARDED)[0]:.0f} distinct tokens in"
        f" {ours.part(_PASSES)[0]:.0f} passes\n"
    )
    print(f"{'seconds, medians':<28}{'TRL':>10}{'ours':>10}{'ours - TRL (quartiles)':>32}{'of a step':>12}")
    whole = statistics.median(theirs.wall_s)

    def row(title: str, a: list[float], b: list[float]) -> float:
        differences = sorted(y - x for x, y in zip(a, b, strict=True))
        middle = statistics.median(differences)
        low, high = differences[len(differences) // 4], differences[-1 - len(differences) // 4]
        spread = f"{middle:+.4f} ({low:+.4f}, {high:+.4f})"
        numbers = f"{statistics.median(a):>10.4f}{statistics.median(b):>10.4f}{spread:>32}{middle / whole:>12.2%}"
        print(f"{title:<28}{numbers}")
        return middle / whole

    share = row("a step", theirs.wall_s, ours.wall_s)
    for title, metric in _PARTS.items():
        row(f"  {title}", theirs.part(metric), ours.part(metric))
    row("  everything else", theirs.rest_s, ours.rest_s)
    row("processor time of a step", theirs.cpu_s, ours.cpu_s)
    met = share <= GOAL
    print(f"\nours beyond TRL's step: {share:.2%}, goal {GOAL:.0%}, met: {'yes' if met else 'NO'}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="smollm2, a Hugging Face id, or a model folder; default: a random one")
    parser.add_argument("--hidden", type=int, default=512, help="width of the random model")
    parser.add_argument("--layers", type=int, default=8, help="of the random model")
    parser.add_argument("--steps", type=int, default=12, help="of each trainer, after those that warm it up")
    parser.add_argument("--groups", type=int, default=2, help="per step; each is one forward pass")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the smallest run that goes through everything")
    options = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-step-")))
        if options.quick:
            options.steps, options.group_size, options.hidden, options.layers = 2, 2, 64, 1
        model = folder / "model"
        if options.model is None or options.quick:
            size = f"{random_model.build(model, hidden=options.hidden, layers=options.layers) / 1e6:.1f} M parameters"
        else:
            model, size = prepare_model(options.model, cache_dir()).path, options.model
        shape = Shape(options.group_size, options.turns, num_prompt=100, num_sampled=75, num_answered=20)
        num_steps = _WARM + options.steps
        # A step's groups more, and one, which no step takes: TRL's dataloader is a pass ahead, and its batcher closes a
        # pass when it sees what does not fit.
        groups = asyncio.run(record(folder, (num_steps + 1) * options.groups + 1, shape))
        config = LearnerConfig(
            max_steps=num_steps,
            groups_per_step=options.groups,
            max_staleness=_NEVER_STALE,
            learning_rate=1e-6,
            device="cpu",
            verify_sync="never",  # what sampled was no model
            save_steps=10**6,
        )
        batch = Batch(model, folder, groups, options.groups, config)
        config.token_budget = one_pass_per_group(batch)
        fill_store(batch)
        print(
            f"{size}; {options.groups} groups of {options.group_size} rollouts of {options.turns} turns a step;"
            f" {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        )
        met = report(take_turns(batch))
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())

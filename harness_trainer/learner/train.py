"""Runs the learner: builds TRL's trainer from our configuration, reports every step, saves and continues.

Owns the settings of the trainer, the report of a step and what a checkpoint remembers of ours. Groups come from a
`GroupSource`, weights leave through a weight transfer; neither is built here. The learner process calls `run_learner`.
Importing this module imports TRL (10 s).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import Dataset
from transformers import TrainerCallback

from harness_trainer.learner import checkpoints
from harness_trainer.learner.checkpoints import HarnessState, last_checkpoint, read_state
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.engine_presence import Presence
from harness_trainer.learner.feeder import FeederOptions, GroupFeeder
from harness_trainer.learner.group_source import GroupSource
from harness_trainer.learner.ranks import Ranks
from harness_trainer.learner.step_batch import StepBatch
from harness_trainer.learner.sync_config import LoraSync, NcclSync
from harness_trainer.learner.trl_compat import AsyncGRPOConfig, HarnessGRPOTrainer, build_trainer

__all__ = ["StepReport", "WeightTransfer", "help_learner", "last_checkpoint", "run_learner"]


class WeightTransfer(Protocol):
    """TRL's `WeightTransferProtocol` plus the number of the policy that the next sync publishes."""

    def next_version(self, version: int) -> None: ...

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step. Times are wall seconds; None = not known, never 0."""

    step: int  # from 1
    policy_version: int  # the version published after this step
    reward_mean: float | None  # over the scored rollouts of the step's groups, one reward each
    reward_std: float | None  # population standard deviation over the same
    named_rewards: dict[str, float]  # mean by name, over those of the same rollouts whose tests gave the name
    harnesses: dict[str, dict[str, float | int | None]]  # by agent: groups, scored rollouts, turns, reward mean and sd
    num_groups: int
    num_rollouts: int  # scored rollouts in the groups, with or without rows
    num_rows: int
    trained_tokens: int
    forwarded_tokens: int | None  # distinct tokens that went through the model, trained or context
    num_micro_batches: int | None
    loss: float | None
    grad_norm: float | None  # before clipping
    learning_rate: float | None
    ratio_mean: float | None  # of new to old probability, over trained tokens; 1 when nothing is off-policy
    ratio_max: float | None  # the largest of them
    kl: float | None  # approximate KL(old, new) in nats, over trained tokens
    kl_reference: float | None  # approximate KL(new, start of the run) in nats; None without a kl_coef
    entropy: float | None  # nats, over trained tokens
    clip_fraction: float | None  # of trained tokens, by the loss's own ratio
    clip_low_fraction: float | None  # those below the lower bound with a negative advantage
    clip_high_fraction: float | None  # those above the upper bound with a positive one
    importance_mean: float | None  # weight of the importance correction, over trained tokens; None = no correction
    importance_bounded_fraction: float | None  # of trained tokens whose weight was cut or masked
    num_masked: int  # rollouts left out of the loss because a limit had cut them
    staleness_mean: float | None  # optimizer steps, over rows
    staleness_max: int | None
    dropped: dict[str, int]  # groups dropped since the step before, by reason
    sync_s: float | None  # the weight update after this step
    wait_s: float | None  # waiting for groups
    fwd_bwd_s: float | None
    optimizer_s: float | None
    step_s: float | None  # from the start of the wait to the end of the weight update
    metrics: dict[str, float] = field(default_factory=dict)  # what trackers get, by the names of `metric_names`


Measure = Callable[[StepReport, StepBatch], Mapping[str, float]]


def run_learner(
    config: LearnerConfig,
    *,
    model_path: Path,
    output_dir: Path,
    group_source: GroupSource,
    weight_transfer: WeightTransfer,
    on_step: Callable[[StepReport], None],
    resume_from: Path | None,
    base_version: int,
    temperature: float = 1.0,
    measure: Measure = lambda report, batch: {},
    run_name: str | None = None,
    ranks: Ranks | None = None,
    engine: Presence | None = None,
) -> None:
    """Train until `config.max_steps` steps are taken, counted from the first start of the run.

    The weights are published once before the first step and after each step, as versions v + 1, v + 2, ... with v the
    higher of `base_version` (the highest version that any engine of this run may have reported; 0 in a new run) and
    the version in the checkpoint. `temperature` is that of the sampling; the old log-probabilities must be of it.
    What `measure` says of a step goes to the trackers of `report_to`, with TRL's own numbers, and into its report;
    `run_name` is the run's for them (None = its folder's).
    All `ranks` but this one, the main process, are in `help_learner`. `engine` = it may be started again meanwhile.

    Raises TrainingFailed (source dead, weight update failed, loss not finite, checkpoint not written), SetupError, and
    whatever the source or the transfer raises. Ctrl-C goes through; source and transfer are closed on every path.
    """
    state = HarnessState(0, base_version) if resume_from is None else read_state(resume_from)
    state.policy_version = max(state.policy_version, base_version)
    ranks = ranks or Ranks()
    resume = None if resume_from is None else str(resume_from)
    is_over = state.step >= config.max_steps
    ranks.hand_out([(is_over, resume)] * ranks.size)
    if is_over:
        return
    options = FeederOptions(
        groups_per_step=config.groups_per_step,
        token_budget=config.token_budget,
        max_staleness=config.max_staleness,
        max_dropped_in_a_row=config.max_dropped_in_a_row,
        objective=config.objective,
    )
    feeder = GroupFeeder(group_source, options)
    trainer = _trainer(config, model_path, output_dir, temperature, ranks, state, feeder, weight_transfer)
    _follow_engine(trainer, feeder, engine, by_nccl=isinstance(config.weight_sync, NcclSync))
    if ranks.size == 1:  # in several processes all would have to know of it at the same moment
        _save_on_request(trainer, feeder, output_dir)
    trainer.args.run_name = run_name or trainer.args.run_name
    # First of all: what it adds to a step's log is seen by the trackers' callbacks.
    trainer.callback_handler.callbacks.insert(0, _Reporter(trainer, on_step, measure))
    trainer.train(resume_from_checkpoint=resume)


def help_learner(
    config: LearnerConfig, *, model_path: Path, output_dir: Path, ranks: Ranks, temperature: float = 1.0
) -> None:
    """Compute this process's share of every step of the main process's `run_learner`, until that ends."""
    is_over, resume = ranks.take()
    if is_over:
        return
    state = HarnessState(0, 0) if resume is None else read_state(Path(resume))
    config = config.model_copy(update={"report_to": []})  # the main process reports
    trainer = _trainer(config, model_path, output_dir, temperature, ranks, state, None, None)
    trainer.train(resume_from_checkpoint=resume)


def _trainer(
    config: LearnerConfig,
    model_path: Path,
    output_dir: Path,
    temperature: float,
    ranks: Ranks,
    state: HarnessState,
    feeder: GroupFeeder | None,
    weight_transfer: WeightTransfer | None,
) -> HarnessGRPOTrainer:
    return build_trainer(
        feeder=feeder,
        harness_state=state,
        objective=config.objective,
        ranks=ranks,
        adapter_sync=isinstance(config.weight_sync, LoraSync),
        ends_on_other_policy=config.verify_sync != "never",
        lora=config.lora,
        model=str(model_path),
        args=trainer_arguments(config, output_dir, temperature),
        # TRL insists on a dataset of prompts; prompts are the rollout side's business.
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        # TRL drops it on all processes but the main one; without any it would ask an engine of its own choice.
        weight_transfer=weight_transfer or object(),
    )


def _follow_engine(trainer: HarnessGRPOTrainer, feeder: GroupFeeder, engine: Presence | None, *, by_nccl: bool) -> None:
    """Between two looks for a group: tell the other processes to wait on, and see to an engine that has died."""
    ranks = trainer.ranks
    if ranks.size > 1:

        def while_waiting() -> None:
            ranks.keep_waiting()
            if engine is not None:  # weights that are spread over processes are gathered at the end of a step only
                engine.require()

        feeder.while_waiting = while_waiting
    elif engine is not None and by_nccl:
        feeder.while_waiting = engine.require  # a group whose other side is dead is left only with the process
    elif engine is not None:
        trainer.engine = engine
        feeder.while_waiting = trainer.send_again_if_lost


def trainer_arguments(config: LearnerConfig, output_dir: Path, temperature: float) -> Any:
    """TRL's configuration for ours. One optimizer step is one item of the dataloader, hence the two ones."""
    args = AsyncGRPOConfig(
        output_dir=str(output_dir),
        max_steps=config.max_steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        token_budget=config.token_budget,
        max_staleness=config.max_staleness,
        temperature=temperature,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant_with_warmup" if config.warmup_steps else "constant",
        warmup_steps=config.warmup_steps,
        optim=config.optimizer,
        adam_beta2=config.adam_beta2,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        dtype=config.weights_dtype,
        bf16=config.dtype != config.weights_dtype,  # mixed precision: computed in bfloat16 on float32 weights
        use_cpu=config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()),
        activation_checkpointing=config.gradient_checkpointing,
        save_strategy="steps",
        save_steps=config.save_steps,
        save_total_limit=config.save_total_limit,
        seed=config.seed,
        report_to=config.report_to or "none",
        project="harness-trainer",
        run_name=output_dir.absolute().parent.name,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    # Several visible GPUs in one process would make Transformers wrap the model in DataParallel.
    args._n_gpu = min(args.n_gpu, 1)
    return args


def _save_on_request(trainer: HarnessGRPOTrainer, feeder: GroupFeeder, folder: Path) -> None:
    """A checkpoint when somebody asks for one: a machine that is about to go away does (`checkpoints.request`)."""
    checkpoints.answered(folder)  # one that an earlier life was asked for
    before = feeder.while_waiting

    def while_waiting() -> None:
        before()
        if checkpoints.is_requested(folder):
            last, step = last_checkpoint(folder), trainer.state.global_step
            if step > (0 if last is None else read_state(last).step):
                trainer._save_checkpoint(trainer.model, None)
            checkpoints.answered(folder)

    feeder.while_waiting = while_waiting
    trainer.add_callback(_SaveOnRequest(folder))


class _SaveOnRequest(TrainerCallback):  # type: ignore[misc]
    """The end of a step, for `_save_on_request`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save = control.should_save or checkpoints.is_requested(self._folder)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpoints.answered(self._folder)


class _Reporter(TrainerCallback):  # type: ignore[misc]
    """Turns the trainer's log of a step into a `StepReport`, after the weight update, and completes the log."""

    def __init__(self, trainer: HarnessGRPOTrainer, on_step: Callable[[StepReport], None], measure: Measure) -> None:
        self._trainer = trainer
        self._on_step = on_step
        self._measure = measure

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        # The summary at the end of training is a log too, but of no step.
        batch = self._trainer.last_step
        if "loss" in logs and batch is not None:
            report = self._report(state.global_step, batch, logs)
            logs.update(self._measure(report, batch))
            metrics = {name: float(value) for name, value in logs.items() if _is_known(value)}
            metrics.pop("epoch", None)  # of the dataset of prompts, which is none
            for name in logs.keys() - metrics.keys():
                del logs[name]  # a tracker would warn of TRL's None
            self._on_step(replace(report, metrics=metrics))

    def _report(self, step: int, batch: StepBatch, logs: dict[str, Any]) -> StepReport:
        def known(name: str) -> float | None:
            value = logs.get(name)
            return None if value is None else float(value)

        def count(name: str) -> int | None:
            value = known(name)
            return None if value is None else round(value)

        return StepReport(
            step=step,
            policy_version=self._trainer.model_version,
            reward_mean=batch.reward_mean,
            reward_std=batch.reward_std,
            named_rewards={name: statistics.fmean(values) for name, values in batch.named_rewards.items()},
            harnesses=batch.by_harness(),
            num_groups=len(batch.groups),
            num_rollouts=len(batch.rewards),
            num_rows=len(batch.samples),
            trained_tokens=batch.num_trained_tokens,
            forwarded_tokens=count("batch/forwarded_tokens_per_step"),
            num_micro_batches=count("batch/microbatches_per_step"),
            loss=known("loss"),
            grad_norm=known("grad_norm"),
            learning_rate=known("learning_rate"),
            ratio_mean=known("ratio"),
            ratio_max=known("ratio_max"),
            kl=known("kl"),
            kl_reference=known("kl_ref"),
            entropy=known("entropy"),
            clip_fraction=known("cispo_clip_ratio" if "cispo_clip_ratio" in logs else "clip_ratio/region_mean"),
            clip_low_fraction=known("clip_ratio/low_mean"),
            clip_high_fraction=known("clip_ratio/high_mean"),
            importance_mean=known("sampling/importance_sampling_ratio/mean"),
            importance_bounded_fraction=known("sampling/importance_sampling_ratio/bounded_frac"),
            num_masked=batch.num_masked,
            staleness_mean=statistics.fmean(batch.staleness) if batch.staleness else None,
            staleness_max=max(batch.staleness, default=None),
            dropped={str(reason): number for reason, number in batch.dropped.items()},
            sync_s=self._trainer.sync_s,
            wait_s=batch.wait_s,
            fwd_bwd_s=known("perf/fwd_bwd_s"),
            optimizer_s=known("perf/optimizer_s"),
            step_s=time.monotonic() - batch.started_at,
        )


def _is_known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

"""TRL's experimental names, met in one place: `AsyncGRPOTrainer` with whole-group steps and without CUDA's needs.

Owns everything that would break when TRL changes (1.16.0 is pinned): the trainer subclass, how a step's rows become
micro-batches, the choice of attention kernel, the two functions of TRL that assume a GPU. `train` builds the trainer;
`weight_transfer` is the only other module that speaks TRL's protocols. Importing this module imports TRL (10 s).
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from harness_trainer.engine.prepare import checkpoint_shapes
from harness_trainer.errors import HarnessTrainerError, SetupError, TrainingFailed
from harness_trainer.learner import checkpoints
from harness_trainer.learner.base_weights import base_weights_kept
from harness_trainer.learner.checkpoints import HarnessState
from harness_trainer.learner.engine_presence import OneEngine, Sending
from harness_trainer.learner.feeder import GroupFeeder
from harness_trainer.learner.flops import nan_where_unknown
from harness_trainer.learner.nccl_transfer import Manifest, NcclWeightTransfer
from harness_trainer.learner.objective import ObjectiveLoss, objective
from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.learner.packed_loss import Reference, score, sum_spread_rollouts, terms_of
from harness_trainer.learner.ranks import Ranks, shard_on_cpu_too
from harness_trainer.learner.same_policy import look, without_dropout
from harness_trainer.learner.sent_weights import SentWeights
from harness_trainer.learner.sharded_state import SameCheckpoints, whole
from harness_trainer.learner.shares import share_out
from harness_trainer.learner.step_batch import StepBatch
from harness_trainer.learner.sync_config import LoraConfig
from harness_trainer.learner.tree_attention import flash_attention_3_available, sdpa_tree_attention

with warnings.catch_warnings():
    # Two notices that are settled by the pin: "experimental", and a vLLM in another environment.
    warnings.simplefilter("ignore")
    import peft
    import trl.trainer.utils as trl_utils
    from peft.utils.error import PeftError
    from transformers import AttentionInterface, PrinterCallback
    from transformers.utils import logging as transformers_logging
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo import async_grpo_trainer as trl_module
    from trl.experimental.async_grpo import async_rollout_worker as trl_workers
    from trl.experimental.async_grpo import weight_transfer as trl_transfer
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
    from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, _flash_attn
    from trl.experimental.async_grpo.vllm_client import VLLMClient

# What TRL counts of a step, and each process of its own part.
_COUNTS = ("_step_microbatches", "_step_forward_tokens", "_step_seq_len_weighted", "_step_samples")

__all__ = [
    "AsyncGRPOConfig",
    "HarnessGRPOTrainer",
    "build_trainer",
    "fit_trl_to_this_machine",
    "pack_micro_batches",
    "trl_utils",
    "use_attention_that_runs_here",
]


def pack_micro_batches(samples: list[dict[str, Any]], token_budget: int) -> list[TreeRow]:
    """Fold the samples into as few prefix trees as first-fit gives, each of at most `token_budget` distinct tokens.

    A tree that already holds rows of the same group is tried first: that is where the sample's prefix is.
    """
    trees: list[TreeRow] = []
    for sample in samples:
        home_first = sorted(trees, key=lambda tree: sample["group_id"] not in tree.groups)
        tree = next((tree for tree in home_first if tree.fits(sample, token_budget)), None)
        if tree is None:
            tree = TreeRow()
            trees.append(tree)
        tree.add(sample)
    return trees


def nccl_client(base_url: str, manifest: Manifest, timeout_s: float) -> Any:
    """TRL's client for `nccl_transfer`. Raises SetupError where vLLM's half is not installed beside the trainer."""
    try:
        return trl_transfer.WeightTransferClient(
            VLLMClient(base_url), manifest, weight_sync_timeout=math.ceil(timeout_s)
        )
    except ImportError as error:
        raise SetupError(
            f"weight_sync nccl needs vLLM's transfer code in the trainer's own environment ({error}):"
            " install the engine's release of vllm there without its dependencies, or use weight_sync shm"
        ) from error


class _Steps(IterableDataset[Any]):
    """One item per optimizer step, made when the trainer asks for it (nothing is fetched ahead)."""

    def __init__(self, next_step: Callable[[], Any]) -> None:
        self._next_step = next_step

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._next_step()


class HarnessGRPOTrainer(SameCheckpoints, AsyncGRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, with one optimizer step = the whole groups of one `StepBatch`, and the loss of `objective`.

    TRL fills micro-batches from a queue of single samples and averages their means. Here a step's rows are split into
    micro-batches whose tokens carry the weights of the *step*, so that the gradient does not depend on the split, and
    no group straddles two policies. `harness_state` counts on from what it is given and goes into every checkpoint;
    `last_step` is the batch of the step that was taken last, `sync_s` the seconds of the last weight update.

    With several processes the micro-batches are dealt to them by the main one, which alone has a feeder and a weight
    transfer. Gradients are averaged over processes, so each loss counts as many times as there are processes.
    """

    def __init__(
        self,
        *,
        feeder: GroupFeeder | None,
        harness_state: HarnessState,
        objective: ObjectiveConfig,
        model: str,
        ranks: Ranks,
        adapter_sync: bool,
        ends_on_other_policy: bool = True,
        lora: LoraConfig | None = None,
        **kwargs: Any,
    ) -> None:
        """`feeder` is None on all processes but the main one. `adapter_sync`: the adapter alone goes to the engine.

        `ends_on_other_policy`: the run ends when the first step shows that the engine samples another (`same_policy`).
        """
        _without_cuda()
        shard_on_cpu_too()
        self.ranks = ranks
        self.feeder = feeder
        self.harness_state = harness_state
        self.objective = objective
        self.last_step: StepBatch | None = None
        self.sync_s: float | None = None
        self.engine: Sending = OneEngine()
        self._start_path, self._ends_on_other_policy = model, ends_on_other_policy
        self._noted: dict[str, list[Any]] = defaultdict(list)  # metrics of this process's part of the step
        if lora is not None:
            kwargs["peft_config"] = peft_config(lora)
        super().__init__(model=model, rollout_worker=feeder, **kwargs)
        without_dropout(self.model)
        self.require_shardable()
        self.model_version = harness_state.policy_version
        use_attention_that_runs_here(is_float32=self.args.dtype == "float32" and not self.args.bf16)
        self._lora_sync = adapter_sync
        trained = self.accelerator.unwrap_model(self.model)
        if not adapter_sync:
            named = trl_module._iter_vllm_named_params(trained)
            self._sent = SentWeights(trained, named, checkpoint_shapes(Path(model)))
            if isinstance(self.weight_transfer, NcclWeightTransfer):
                self.weight_transfer.describe(self._sent.manifest(trained))
        self._reference: Reference | None = None
        if objective.kl_coef:
            self._reference = Reference(trained, lambda: self._copy_of_the_start(model))

    def _copy_of_the_start(self, path: str) -> Any:
        """The weights that the run started from, also where training continues from a checkpoint.

        It is to compute as the model does: under FSDP2, mixed precision is weights that are put together in bfloat16.
        """
        dtype = "bfloat16" if self.args.bf16 and self.is_fsdp_enabled else self.args.dtype
        copy = trl_utils.create_model_from_path(path, device_map=None, attn_implementation=TREE_ATTENTION, dtype=dtype)
        trl_utils.add_fused_lm_head(copy, temperature=self.temperature, outputs=("log_probs",))
        return copy.to(self.accelerator.device)

    def get_train_dataloader(self) -> DataLoader[Any]:
        # TRL flushes `wait_s` of this object once per step.
        self._rollout_dataset = self.feeder
        if self.feeder is None:
            return DataLoader(_Steps(self.ranks.take), batch_size=None, collate_fn=dict, num_workers=0)
        return DataLoader(_Steps(self.feeder.next_step), batch_size=None, collate_fn=self._collate, num_workers=0)

    def _collate(self, step: Any) -> dict[str, Any]:
        """The main process's share of the step; the others get theirs here."""
        shares = share_out(
            step.samples,
            pack_micro_batches,
            self._collator(self._trained_groups, self._metrics["train"]),
            self._collator(set(), defaultdict(list)),
            budget=self.args.token_budget,
            objective=self.objective,
            num_processes=self.ranks.size,
        )
        return {**self.ranks.hand_out(shares), "step": step}

    def _collator(self, groups: set[int], metrics: dict[str, list[Any]]) -> Callable[[Any], dict[str, Any]]:
        """Tensors of one tree. What TRL counts of it goes to `groups` and `metrics`."""
        collator = DataCollatorForRollout(
            self.processing_class.pad_token_id,
            num_processes=1,
            groups_trained=groups,
            metrics=metrics,
            token_budget=self.args.token_budget,
        )
        return lambda tree: collator.torch_call([[tree]])

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        micro_batches = inputs["micro_batches"]
        self._step_trained_tokens = inputs["num_trained_tokens"]
        if self.objective.needs_whole_rollouts:
            started = time.perf_counter()
            micro_batches = [self._prepare_inputs(batch) for batch in micro_batches]
            sum_spread_rollouts(
                micro_batches,
                lambda batch: score(model, batch).log_probs_M,
                num_passes=inputs["num_spread"],
                everywhere=self.ranks.gather,
            )
            self._current_train_step_time += time.perf_counter() - started
        losses = []
        for i, batch in enumerate(micro_batches):
            with self._gradient_kept_here(model, until_later=i + 1 < len(micro_batches)):
                losses.append(super().training_step(model, batch, num_items_in_batch))
        self.last_step = inputs.get("step")
        self._gather_notes(sum("is_nothing" in batch for batch in micro_batches))
        if self.last_step is not None:
            step, ends = self.state.global_step + 1, self._ends_on_other_policy
            look(self._metrics["train"], self.last_step, model=self._start_path, step=step, ends=ends)
        loss: torch.Tensor = self.accelerator.reduce(torch.stack(losses).sum(), reduction="mean")
        if not torch.isfinite(loss):  # for all processes alike
            raise TrainingFailed(
                f"the loss of step {self.state.global_step + 1} is {loss.item()}: lower the learning rate,"
                " or continue from the last checkpoint"
            )
        return loss

    def _gradient_kept_here(self, model: Any, *, until_later: bool) -> contextlib.AbstractContextManager[Any]:
        """Copies of a whole model exchange a step's gradient once; a sharded one has no room to keep it whole."""
        if until_later and not self.is_fsdp_enabled:
            kept: contextlib.AbstractContextManager[Any] = self.accelerator.no_sync(model)
            return kept
        return contextlib.nullcontext()

    def _gather_notes(self, num_nothing: int) -> None:
        """The main process's metrics become the step's."""
        self._step_microbatches -= num_nothing
        counts = [getattr(self, name) for name in _COUNTS]
        parts = self.ranks.gather((dict(self._noted), counts))
        self._noted.clear()
        if self.ranks.is_main:
            for noted, _ in parts:
                for name, values in noted.items():
                    self._metrics["train"][name] += values
            for i, name in enumerate(_COUNTS):
                setattr(self, name, sum(counts[i] for _, counts in parts))

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The micro-batch's part of the step's loss, times the number of processes; notes its metrics."""
        started = time.time()
        with contextlib.nullcontext() if self.is_fsdp_enabled else self.accelerator.autocast():
            reference = None if self._reference is None else self._reference.log_probs(inputs)
        scored = score(model, inputs, aux_loss=self.aux_loss_enabled)
        self._step_forward_s += time.time() - started
        if "is_nothing" in inputs:
            parts = [scored.log_probs_M.sum(), *([] if scored.aux_loss is None else [scored.aux_loss])]
            return 0.0 * torch.stack(parts).sum()
        result = objective(terms_of(inputs, scored, reference), self.objective)
        loss = result.loss
        if scored.aux_loss is not None:
            # A mean over tokens: the micro-batches of a step share its weight as they share its tokens.
            share = float(inputs["global_n_tokens"][0]) / self._step_trained_tokens
            loss = loss + self.router_aux_loss_coef * share * scored.aux_loss
            self._noted["aux_loss"].append(scored.aux_loss.item())
        self._note(result)
        num_tokens, length = float(inputs["global_n_forward_tokens"][0]), float(inputs["mean_seq_len"][0])
        self._step_forward_tokens += num_tokens
        self._step_seq_len_weighted += length * num_tokens
        self._step_samples += num_tokens / length
        return loss * self.ranks.size

    def _note(self, result: ObjectiveLoss) -> None:
        """TRL divides the sums of a step's numerators and denominators, and takes the extreme of the extremes."""
        metrics = self._noted
        pairs = [number for rate in result.rates.values() for number in rate]
        numbers = torch.stack([*pairs, *result.extremes.values()]).tolist()  # one copy from the device
        for name in result.rates:
            metrics[name].append((numbers.pop(0), numbers.pop(0)))
        for name in result.extremes:
            metrics[name].append(numbers.pop(0))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = whole(norm) if torch.is_tensor(norm) else norm
        # The last moment before the optimizer writes it into every weight.
        if not math.isfinite(float(norm)):
            raise TrainingFailed(
                f"the gradient of step {self.state.global_step + 1} is not finite: lower the learning rate,"
                " or continue from the last checkpoint"
            )
        return norm

    def _sync_weight(self) -> None:
        """Publish the weights as policy `model_version + 1`. The transfer frees the engine when that fails."""
        if not self.ranks.is_main:
            super()._sync_weight()  # what is sharded takes all of them to gather
            return
        started = time.monotonic()
        self._record_step()
        try:
            self.engine.send(self._send, self.weight_transfer.init_weight_transfer)
        except HarnessTrainerError:
            raise
        except Exception as error:
            raise TrainingFailed(f"the weight update to policy v{self.model_version + 1} failed: {error}") from error
        self.sync_s = time.monotonic() - started

    def _send(self) -> None:
        self.weight_transfer.next_version(self.model_version + 1)
        super()._sync_weight()

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """TRL folds an adapter into the base weights for the send and takes it out again."""
        with base_weights_kept(self.accelerator.unwrap_model(self.model)):
            marks: tuple[float, float, float] = super()._sync_weight_merged(t0)
        return marks

    def send_again_if_lost(self) -> None:
        """To an engine that was started again: the weights that it lost, under the name that they have."""
        if self.engine.is_lost:
            self.model_version -= 1
            self._sync_weight()

    def _record_step(self) -> None:
        """The step just taken is final from here on: its groups count as trained even if publishing it fails."""
        step = self.state.global_step
        if self.feeder is not None and self.last_step is not None and self.harness_state.step < step:
            self.harness_state.step = step
            self.harness_state.trained_groups[step] = self.last_step.group_ids
            self.feeder.source.on_trained(self.last_step.group_ids, step)

    def _sync_weight_lora(self, t0: float) -> tuple[float, float, float]:
        """Publish the adapter alone. Called by TRL's `_sync_weight`; the marks are its phases."""
        version = self.model_version + 1
        transfer = self.weight_transfer
        model = self.accelerator.unwrap_model(self.model)
        folder = "" if transfer is None else str(transfer.folder_of(version))  # the main process writes it
        trl_module.save_lora_adapter(model, self.accelerator, self._adapter_name, folder)
        written = time.time()
        if transfer is not None:
            transfer.publish(version)
            self.model_version = version
            self.rollout_worker.update_model_version(version)
        return t0, t0, written

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as the checkpoint has it, and a tied output head, each gathered when its turn comes."""
        named = self._sent.stream(self.accelerator.unwrap_model(self.model), super()._streaming_iter())
        return ((name, whole(tensor.detach()).to(self.accelerator.device)) for name, tensor in named)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.feeder is None:
            super()._save_checkpoint(model, trial)
            return
        state = self.harness_state
        state.policy_version = self.model_version
        state.next_group, state.group_counts = self.feeder.source.position()
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        # Transformers would remove older checkpoints before this one is on the disk.
        keep, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            checkpoints.begin(checkpoint)
            super()._save_checkpoint(model, trial)
            checkpoints.complete(checkpoint, state, keep=keep)
        except Exception as error:  # OSError, safetensors' and torch's own errors: all mean it is not on the disk
            raise TrainingFailed(
                f"checkpoint-{self.state.global_step} could not be written to {Path(self.args.output_dir)}"
                f" ({str(error).splitlines()[0] if str(error) else type(error).__name__}): free disk space and"
                " run the same command again"
            ) from error
        finally:
            self.args.save_total_limit = keep

    def _send_telemetry(self) -> None:
        """TRL reports each trainer to the Hub; we do not."""


def peft_config(lora: LoraConfig) -> Any:
    """PEFT's configuration for ours: plain factors, which is all that vLLM serves as an adapter."""
    return peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, lora_dropout=0.0, bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip


def build_trainer(**kwargs: Any) -> HarnessGRPOTrainer:
    """The trainer, without its noise: a warning about TRL's own two callbacks, and a printer of logs to stdout."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        trainer = HarnessGRPOTrainer(**kwargs)
    except (ValueError, NotImplementedError, PeftError) as error:
        reason = " ".join(str(error).split())
        raise SetupError(f"this model or adapter cannot be trained here: {reason}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    trainer.remove_callback(PrinterCallback)
    return trainer


def use_attention_that_runs_here(*, is_float32: bool = True) -> None:
    """After a trainer was made: TRL's constructor registers FlashAttention 3, which has no float32, on any machine."""
    if is_float32 or not flash_attention_3_available(_flash_attn):
        AttentionInterface.register(TREE_ATTENTION, sdpa_tree_attention)


def fit_trl_to_this_machine() -> None:
    """Before TRL's own trainer and rollout workers are made here: what they lack off CUDA, and without a local vLLM.

    TRL's workers speak to vLLM over HTTP only, yet refuse to be made where the package is not installed; ours lives in
    an environment of its own. Idempotent. `use_attention_that_runs_here` is to follow.
    """
    _without_cuda()
    trl_workers.is_vllm_available = lambda *_: True


def _without_cuda() -> None:
    """Replace three functions of TRL that are wrong off CUDA, or for some models; else they stay. Idempotent."""
    trl_module.compute_flops_per_token = nan_where_unknown(trl_utils.compute_flops_per_token)
    if getattr(trl_module.get_peak_flops_per_device, "__module__", "") != __name__:
        original_peak_flops = trl_module.get_peak_flops_per_device

        def get_peak_flops_per_device(accelerator: Any, dtype: str) -> float | None:
            """None, which turns MFU off, where there is no GPU to ask."""
            if accelerator.device.type != "cuda":
                return None
            peak: float | None = original_peak_flops(accelerator, dtype)
            return peak

        trl_module.get_peak_flops_per_device = get_peak_flops_per_device
    # Off Triton TRL projects every position through the output head, trained or not, to keep shapes static for
    # compilers. Eager mode has no such need, and in agents' rows most positions are not trained.
    trl_utils._use_triton = lambda device: True

"""Checkpoints that do not know how many processes wrote them, also when the model was sharded over these (FSDP2).

Owns saving and loading of a sharded trainer: what is on the disk is what one process would have written, so that a run
continues with any number of processes, and so that the final model and its readers need not know of sharding. Each
process reads the checkpoint itself. `trl_compat` mixes it into the trainer; without sharding it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from harness_trainer.errors import SetupError, TrainingFailed

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this process holds a shard of, or itself. A collective call for a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class SameCheckpoints:
    """Over Transformers' `Trainer`, whose names these are."""

    accelerator: Any
    args: Any
    is_fsdp_enabled: bool
    lr_scheduler: Any
    model: Any
    optimizer: Any

    def require_shardable(self) -> None:
        """Raises SetupError for what cannot be put together again, before anything is sharded; sets its precision."""
        if not self.is_fsdp_enabled:
            return
        if not self.accelerator.is_fsdp2:
            raise SetupError("the accelerate config asks for the first FSDP: set fsdp_version to 2 in it")
        if self.args.optim == "adafactor":
            raise SetupError("adafactor factors whole matrices, which FSDP2 shards: use optimizer adamw_torch or sgd")
        if self.args.bf16:
            # Accelerate's own choice would round gradients before they are added up, and log-probabilities.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        weights = {name: tensor for name, tensor in self._whole_weights() if self.args.should_save}
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)  # type: ignore[attr-defined]

    def _whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is trained, on the CPU, a tied tensor as one; of an adapter's model the adapter alone."""
        found: dict[int, torch.Tensor] = {}
        adapter_only = hasattr(self.model, "peft_config")
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if adapter_only and not parameter.requires_grad:
                continue
            if id(parameter) not in found:
                found[id(parameter)] = whole(parameter.detach()).cpu()
            yield name.replace("_checkpoint_wrapped_module.", ""), found[id(parameter)]
            if not self.args.should_save:
                found[id(parameter)] = torch.empty(0)  # others only help to gather it
        if not adapter_only:
            kept = self.model.state_dict().keys()
            yield from ((name, whole(buffer).cpu()) for name, buffer in self.model.named_buffers() if name in kept)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        state = self._whole_optimizer_state()
        if self.args.should_save:
            torch.save(state, Path(output_dir) / _OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _whole_optimizer_state(self) -> dict[str, Any]:
        sharded = self.optimizer.state_dict()
        state: dict[int, dict[str, Any]] = {}
        for index, values in sharded["state"].items():
            gathered = {name: whole(v).cpu() if torch.is_tensor(v) else v for name, v in values.items()}
            if self.args.should_save:
                state[index] = gathered
        return {**sharded, "state": state}

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        # The main process marks the checkpoint as complete next: each has written its part by then.
        self.accelerator.wait_for_everyone()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self.is_fsdp_enabled and resume_from_checkpoint is not None:
            self.is_fsdp_enabled = False  # not sharded yet: loaded as one process loads it
            try:
                self._load_from_checkpoint(resume_from_checkpoint)
            finally:
                self.is_fsdp_enabled = True
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            return  # it was loaded before the model was sharded
        if hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        # Transformers' trainer looks for the model's own names, and passes over what a checkpoint names otherwise, as
        # it does the experts of a mixture: they would be the base model's again.
        saved, report = type(self.model).from_pretrained(
            resume_from_checkpoint, dtype=self.model.dtype, output_loading_info=True
        )
        if report["missing_keys"]:
            raise TrainingFailed(
                f"{resume_from_checkpoint} lacks {sorted(report['missing_keys'])[0]!r}: remove that folder, and the"
                " same command continues from the checkpoint before"
            )
        self.model.load_state_dict(saved.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_fsdp_enabled or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        saved = torch.load(Path(checkpoint) / _OPTIMIZER, map_location="cpu", mmap=True, weights_only=True)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, values in saved["state"].items():
            values.update({name: _like(value, parameters[index]) for name, value in values.items()})
        self.optimizer.load_state_dict(saved)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """This process's shard of a value that has an entry for each of the parameter's; anything else as it is."""
    if not isinstance(parameter, DTensor) or not torch.is_tensor(value) or value.shape != parameter.shape:
        return value
    mesh = parameter.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)

"""What a person may decide about learning. Owns the configuration only; `train` obeys it. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness_trainer.errors import ConfigError
from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.learner.sync_config import LoraConfig, LoraSync, ShmSync, VerifySync, WeightSync


class LearnerConfig(BaseModel):
    """Everything about optimisation. The sampling temperature is the rollouts' and is handed over beside it."""

    model_config = ConfigDict(extra="forbid")

    max_steps: int = Field(100, ge=1, description="optimizer steps of the run")
    groups_per_step: int = Field(2, ge=1, description="whole groups that one optimizer step trains on")
    token_budget: int = Field(
        16384, ge=2, description="distinct tokens of one forward pass; must hold the longest row (bounds memory)"
    )
    max_staleness: int = Field(
        2,
        ge=0,
        description="optimizer steps from the policy of a group's oldest trained token to the current one; "
        "a group that is further away is dropped",
    )
    max_dropped_in_a_row: int = Field(
        256, ge=1, description="the run stops when so many groups in a row could not be trained"
    )
    learning_rate: float = Field(1e-5, ge=0, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up; constant afterwards")
    optimizer: Literal["adamw_torch", "adafactor", "sgd"] = Field("adamw_torch", description="optimizer")
    adam_beta2: float = Field(0.999, gt=0, lt=1, description="AdamW's second-moment decay")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    max_grad_norm: float = Field(1.0, ge=0, description="gradient clipping; 0 is off")
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="that the model is computed in; what is trained is kept in float32, a frozen base (lora) in this."
        " float32 keeps the ratio exact",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes the GPU if there is one")
    num_processes: int = Field(1, ge=1, description="processes of the learner, on all its machines together")
    accelerate_config: str = Field(
        "ddp",
        description="how several processes share the model: ddp (each holds all of it), fsdp2 (sharded),"
        " or the path of a configuration of accelerate's",
    )
    process_timeout_s: float = Field(
        1800, gt=0, description="how long processes wait for each other, longer than a checkpoint or a weight update"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass to save memory")
    save_steps: int = Field(10, ge=1, description="steps between checkpoints; the last step is always kept")
    save_total_limit: int | None = Field(2, ge=1, description="checkpoints kept; None keeps all")
    lora: LoraConfig | None = Field(None, description="train a low-rank adapter instead of all weights; null = all")
    weight_sync: WeightSync = Field(
        default_factory=ShmSync, description="how weights go to the engine (lora: the adapter alone, by its name)"
    )
    verify_sync: VerifySync = Field(
        "start",
        description="compare a sample of weights with the engine's: after the first update, each, or none (and after"
        " the next one when a person creates the file verify-now in the run folder); never also"
        " lets a run go on whose first step shows that engine and learner compute different log-probabilities",
    )
    seed: int = Field(0, ge=0, description="seed of the learner")
    report_to: list[str] = Field(
        default_factory=list, description="experiment trackers beside metrics.jsonl: tensorboard, trackio, wandb, ..."
    )

    @property
    def weights_dtype(self) -> Literal["float32", "bfloat16"]:
        """Of the model's weights in memory. In bfloat16 an update as small as a learning rate would be rounded away."""
        return "float32" if self.lora is None else self.dtype

    @model_validator(mode="after")
    def _optimizer_fits_layout(self) -> Self:
        if self.optimizer != "adafactor" or self.num_processes == 1:
            return self
        from harness_trainer.learner.launch import is_sharded

        try:
            sharded = is_sharded(self)
        except ConfigError:  # a file of another machine's: the learner looks there
            return self
        if sharded:
            raise ValueError(
                f"optimizer adafactor factors whole matrices, which accelerate_config {self.accelerate_config} shards "
                "(FSDP): use adamw_torch or sgd, or accelerate_config ddp"
            )
        return self

    @model_validator(mode="after")
    def _adapter_to_send(self) -> Self:
        if isinstance(self.weight_sync, LoraSync) and self.lora is None:
            raise ValueError("weight_sync lora sends an adapter: say which with learner.lora, e.g. '{\"rank\": 16}'")
        return self

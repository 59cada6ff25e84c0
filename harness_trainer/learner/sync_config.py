"""How weights go to the engine, and what is trained of them. Owns that part of the learner's configuration."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

VerifySync: TypeAlias = Literal["start", "always", "never"]

# What vLLM makes room for; another `max_lora_rank` is refused when it starts.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class LoraConfig(BaseModel):
    """A low-rank adapter that is trained in the model's place. Example: LoraConfig(rank=16, alpha=32)."""

    model_config = ConfigDict(extra="forbid")

    rank: int = Field(16, ge=1, le=_LORA_RANKS[-1], description="of the two factors of each trained matrix")
    alpha: int = Field(32, ge=1, description="the product is scaled by alpha / rank")
    targets: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="names of the layers that get factors, e.g. q_proj; all-linear = all but the head"
    )

    merge: bool = Field(True, description="at the end, write the whole model with the adapter merged as well")

    @property
    def served_rank(self) -> int:
        """The smallest rank that vLLM can be started with and that holds this one."""
        return next(rank for rank in _LORA_RANKS if rank >= self.rank)


class ShmSync(BaseModel):
    """Whole weights by a file in shared memory: trainer and engine on one host, on a CPU or on one GPU."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["shm"] = "shm"


class NcclSync(BaseModel):
    """Whole weights by TRL's NCCL client: trainer and engine on different GPUs, of one host or several."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["nccl"] = "nccl"
    transfer_timeout_s: float = Field(1800, gt=0, description="for the handshake, and for each transfer of all weights")


class LoraSync(BaseModel):
    """The adapter alone, under a new name per version: the engine never pauses. Needs `learner.lora`."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["lora"] = "lora"


WeightSync: TypeAlias = Annotated[ShmSync | NcclSync | LoraSync, Field(discriminator="type")]

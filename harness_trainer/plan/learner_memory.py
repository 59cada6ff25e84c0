"""Memory of one learner process at its peak: the formulas of docs/plan.md, "Learner". Pure.

The peak is what stays for the whole run (weights, gradients, optimizer state, reference) plus the larger of what a
backward pass needs (activations, the head) and what the optimizer's own step needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness_trainer.learner.config import LearnerConfig
from harness_trainer.plan.amounts import Part, times, total, whole
from harness_trainer.plan.shape import ModelShape
from harness_trainer.plan.sizes import GIB

_SIZE = {"float32": 4, "bfloat16": 2}
# TRL's fused head (`trl.kernels.chunked_logprob`) projects so many tokens on so many ids at a time.
HEAD_TOKENS, HEAD_IDS = 4096, 32768
# A tile and what torch makes of it: one where a Triton kernel folds it in place; on a CPU the tile, its scaled form,
# its exponential and their product.
_TILES = {"cuda": 1, "cpu": 4}
CONTEXT = 1 * GIB  # CUDA context, cuBLAS workspaces, and what the caching allocator cannot use
# Python with torch, TRL and what they import, before a model is loaded (measured: docs/plan.md).
PROCESS = round(0.5 * GIB)


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes of one process. `resident` stays; of `backward` and `update` the larger counts."""

    resident: list[Part]
    backward: list[Part]
    update: list[Part]

    @property
    def peak(self) -> int | None:
        moving = [total(self.backward), total(self.update)]
        known = [m for m in moving if m is not None]
        resident = total(self.resident)
        return None if resident is None or len(known) < len(moving) else resident + max(known)


def learner_memory(
    config: LearnerConfig, shape: ModelShape, *, device: str, sharded: bool, tokens: int | None = None
) -> LearnerMemory:
    """`tokens`: distinct ones of the largest micro-batch; None = as many as the token budget allows.

    `sharded`: the layout is FSDP2, with `num_processes` shards; else every process holds the whole model.
    """
    shards = config.num_processes if sharded else 1
    return LearnerMemory(
        _resident(config, shape, sharded, shards, device),
        _backward(config, shape, sharded, device, tokens or config.token_budget),
        _update(config, shape, shards, device),
    )


def trained(config: LearnerConfig, shape: ModelShape) -> tuple[int | None, int]:
    """Parameters that are trained, and bytes of each: float32, an adapter too (PEFT's `autocast_adapter_dtype`)."""
    if config.lora is None:
        return shape.parameters, 4
    return shape.adapter(config.lora.rank, config.lora.targets), 4


def _is_autocast(config: LearnerConfig, sharded: bool) -> bool:
    """Mixed precision of whole weights: products are of bfloat16 copies, all between them stays float32.

    Of sharded ones it is weights that are put together in bfloat16, and all is computed in that.
    """
    return config.dtype != config.weights_dtype and not sharded


def _resident(config: LearnerConfig, shape: ModelShape, sharded: bool, shards: int, device: str) -> list[Part]:
    size, number, of_one = _SIZE[config.weights_dtype], *trained(config, shape)
    divided = f" / {shards} shards" if shards > 1 else ""
    parts = [
        Part("weights", whole(times(shape.parameters, size / shards)), f"parameters x {size} B{divided}"),
        Part("gradients", whole(times(number, of_one / shards)), f"trained parameters x {of_one} B{divided}"),
        _optimizer(config, shape, number, of_one, shards),
    ]
    if config.lora is not None:
        adapter = Part("adapter", whole(times(number, of_one / shards)), f"rank x (in + out) x {of_one} B{divided}")
        parts.insert(1, adapter)
    if config.num_processes > 1 and shards == 1:
        parts.append(Part("exchange of gradients", whole(times(number, of_one)), "DDP's buckets, as large as these"))
    if config.objective.kl_coef and config.lora is None:
        copy = times(shape.parameters, _SIZE[config.dtype] if sharded else size)
        parts.append(Part("reference", whole(copy), "a whole copy in every process (kl_coef)"))
    if device == "cuda":
        parts.append(Part("CUDA", CONTEXT, "context, workspaces, fragmentation: assumed"))
    else:
        parts.append(Part("process", PROCESS, "Python with torch and TRL: measured once"))
    return parts


def _optimizer(config: LearnerConfig, shape: ModelShape, number: int | None, of_one: int, shards: int) -> Part:
    if config.optimizer == "adamw_torch":
        state = whole(times(number, 2 * of_one / shards))
        return Part("optimizer", state, f"AdamW: two moments x trained parameters x {of_one} B")
    if config.optimizer == "adafactor":
        factored = number if config.lora is not None else shape.factored
        return Part("optimizer", whole(times(factored, 4)), "Adafactor: rows + columns of every matrix x 4 B")
    return Part("optimizer", 0, "SGD without momentum keeps nothing")


def _backward(config: LearnerConfig, shape: ModelShape, sharded: bool, device: str, tokens: int) -> list[Part]:
    size, autocast = _SIZE[config.dtype], _is_autocast(config, sharded)
    between = 4 if autocast else size  # what layers hand on
    layer = kept_by_layer(shape, size, autocast=autocast)
    if config.gradient_checkpointing:
        # Each layer's input stays; one layer at a time is computed again.
        kept = times(tokens, shape.hidden, shape.num_layers, between)
        again = times(tokens, layer)
        kept = None if kept is None or again is None else kept + again
        how = "tokens x layers x hidden, and one layer computed again"
    else:
        kept = times(tokens, layer, shape.num_layers)
        how = "tokens x layers x what a layer keeps"
    head = _head(config, shape, between, device, tokens)
    parts = [Part("activations", whole(kept), f"{tokens} {how}"), *head]
    at_ends = (shape.embedding or 0) + (0 if shape.tied else shape.head or 0)
    if autocast:
        in_layers = None if shape.parameters is None else shape.parameters - at_ends
        parts.append(Part("weights in bfloat16", whole(times(in_layers, 2)), "of all layers, kept for the products"))
    if sharded:
        exchanged = 4 if config.dtype != config.weights_dtype else 0  # a gradient is added up in float32
        gathered = times(shape.largest_layer, 3 * size + exchanged)
        ends = times(at_ends, size)
        both = None if gathered is None or ends is None else gathered + ends
        parts.append(Part("layers put together", whole(both), "two layers, one layer's gradient, embedding and head"))
    return parts


def kept_by_layer(shape: ModelShape, size: int, *, autocast: bool = False) -> float | None:
    """Bytes that one decoder layer keeps of one token for the backward pass, without recomputation.

    Two norms keep input, normed and scaled form (the first two in float32); attention keeps query, key, value and its
    output; a gated MLP gate, its activation, up, and their product. With autocast the norms keep two forms in float32,
    and each of the five products that read them a copy of its own.
    """
    if None in (shape.hidden, shape.query, shape.key_value, shape.intermediate):
        return None
    hidden, query, key_value, intermediate = map(int, (shape.hidden, shape.query, shape.key_value, shape.intermediate))  # type: ignore[arg-type]
    norms = hidden * (2 * 8 + 5 * size) if autocast else 2 * hidden * (4 + 2 * size)
    heads = (query + key_value) * (4 + 2 * size) if shape.normed_heads else 0
    return float(norms + heads + size * (2 * query + 2 * key_value + 4 * intermediate))


def _head(config: LearnerConfig, shape: ModelShape, size: int, device: str, tokens: int) -> list[Part]:
    """TRL's fused head never holds all logits: a tile at a time, and the gradients in float32. `size`: of its input."""
    rows = min(tokens, HEAD_TOKENS)
    columns = None if shape.vocabulary is None else min(shape.vocabulary, HEAD_IDS)
    tile_size = _SIZE[config.dtype] if device == "cuda" else 4
    tile = times(rows, columns, tile_size, _TILES[device])
    hidden = times(tokens, shape.hidden, 4 + 2 * size)
    parts = [Part("logits", whole(tile), f"a tile of {rows} tokens x {columns or 'unknown'} ids at a time")]
    weight = 0 if config.lora is not None else times(shape.head, 4 + (size if size != 4 else 0))
    both = None if hidden is None or weight is None else hidden + weight
    how = "hidden states and their gradient" + ("" if config.lora else ", the head's gradient in float32")
    return [*parts, Part("head", whole(both), how)]


def _update(config: LearnerConfig, shape: ModelShape, shards: int, device: str) -> list[Part]:
    number, of_one = trained(config, shape)
    if config.optimizer == "sgd":
        return [Part("optimizer step", 0, "in place")]
    if device == "cuda":
        return [Part("optimizer step", whole(times(number, of_one / shards)), "torch's foreach form: one more copy")]
    return [Part("optimizer step", whole(times(shape.head, of_one)), "the largest matrix once more")]

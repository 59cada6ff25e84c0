"""Memory of the engine on each of its GPUs: the formulas of docs/plan.md, "Engine". Pure.

vLLM takes a share of the GPU and gives the cache what weights and its own work leave of it; so what is asked here is
whether the calls that a run makes at a time find room there, or wait for each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness_trainer.config import RunConfig
from harness_trainer.learner.sync_config import LoraSync
from harness_trainer.plan.amounts import Part, times, total, whole
from harness_trainer.plan.shape import ModelShape
from harness_trainer.plan.sizes import GIB

_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
SHARE = 0.92  # vLLM 0.32's own gpu_memory_utilization
OVERHEAD = round(1.5 * GIB)  # CUDA context, NCCL, graphs
BATCHED_TOKENS = 8192  # vLLM 0.32 on GPUs of 70 GiB and more; less below that
CPU_CACHE = 1 * GIB  # what we give vLLM on a CPU, see `engine.config`


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU. The cache of a call: `per_call`; calls that a run makes at a time: `num_calls`."""

    fixed: list[Part]  # weights, adapters, vLLM's own work
    cache: Part  # for all calls at once, each with its whole context
    per_call: int | None
    num_calls: int
    context: int | None  # tokens

    @property
    def needed(self) -> int | None:
        """For every call at once without waiting."""
        return total([*self.fixed, self.cache])

    def room(self, taken: int) -> int | None:
        """How many whole contexts fit into what vLLM takes of a GPU; 0 = not even the weights leave room."""
        fixed = total(self.fixed)
        return None if fixed is None or not self.per_call else max(0, (taken - fixed) // self.per_call)


def engine_memory(config: RunConfig, shape: ModelShape, *, device: str, context: int | None) -> EngineMemory:
    """`context`: tokens of one rollout's longest call; None = the model's window, or what the engine is limited to."""
    engine, size = config.engine, engine_size(config, device)
    parallel = engine.tensor_parallel_size
    window = engine.max_model_len or shape.window
    context = window if context is None or window is None else min(context, window)
    per_call = whole(times(cache_of(shape, context, size), 1 / parallel))
    num_calls = min(calls_of(config), engine.max_num_seqs or 10**9)
    fixed = [Part("weights", whole(times(shape.parameters, size / parallel)), f"parameters x {size} B / {parallel}")]
    if isinstance(config.learner.weight_sync, LoraSync) and config.learner.lora is not None:
        adapters = config.learner.max_staleness + 2
        number = shape.adapter(config.learner.lora.served_rank, config.learner.lora.targets)
        fixed.append(Part("adapters", whole(times(number, adapters * size)), f"{adapters} versions at a time"))
    if device == "cuda":
        fixed.append(_work(shape, size, parallel))
        fixed.append(Part("CUDA", OVERHEAD, "context, graphs: assumed"))
    how = f"{num_calls} calls x {context or 'unknown'} tokens x layers x 2 x key/value heads x {size} B / {parallel}"
    return EngineMemory(fixed, Part("KV cache", whole(times(per_call, num_calls)), how), per_call, num_calls, context)


def calls_of(config: RunConfig) -> int:
    """Calls that a run makes at a time of one replica of the engine."""
    rollouts = config.rollouts
    max_running = None if rollouts.executor == "ray" else rollouts.max_running  # there it is of each node
    return math.ceil((max_running or rollouts.max_concurrent) / config.engine.replicas)


def engine_size(config: RunConfig, device: str) -> int:
    """Bytes of a weight and of an element of the cache."""
    dtype = config.engine.dtype
    if dtype == "auto":
        return 4 if device == "cpu" else 2  # the checkpoint's on a GPU, which is bfloat16 of nearly all models
    return _SIZE[dtype]


def cache_of(shape: ModelShape, tokens: int | None, size: int) -> float | None:
    """Bytes that the engine keeps of a context of so many tokens, on all its GPUs together."""
    if shape.full_layers is None or shape.cached is None or tokens is None:
        return None
    sliding = 0 if shape.sliding_window is None else shape.sliding_layers * min(tokens, shape.sliding_window)
    return float(size * shape.cached * (shape.full_layers * tokens + sliding))


def _work(shape: ModelShape, size: int, parallel: int) -> Part:
    """The largest batch that vLLM computes at a time: hidden states, the MLP's width, logits of 256 calls."""
    if shape.hidden is None or shape.intermediate is None or shape.vocabulary is None:
        return Part("activations", None, "not known of this architecture")
    batch = BATCHED_TOKENS * size * (4 * shape.hidden + 2 * shape.intermediate // parallel)
    return Part("activations", batch + 256 * shape.vocabulary * 8, f"{BATCHED_TOKENS} tokens, and logits of 256 calls")

"""How fast a GPU of the table would be, from its data sheet: the roofline formulas of docs/plan.md, "Speeds". Pure.

Every figure is a bound times an assumed share of it; a measured run is better and is asked first.
"""

from __future__ import annotations

import math

from harness_trainer.config import RunConfig
from harness_trainer.plan.amounts import Number
from harness_trainer.plan.engine_memory import cache_of, engine_size
from harness_trainer.plan.learner_memory import trained
from harness_trainer.plan.shape import ModelShape
from harness_trainer.plan.sizes import Gpu

DECODE, PREFILL = 0.6, 0.4  # shares of bandwidth and of FLOP/s that an engine reaches
UTILISATION = 0.35  # of FLOP/s in a training pass (MFU)
TRANSFER = 5e9  # bytes/s of a weight update through shared memory
OPTIMIZER = 0.5  # share of bandwidth


def speeds(config: RunConfig, shape: ModelShape, gpu: Gpu, *, context: float | None) -> dict[str, Number]:
    """`context`: tokens of a rollout's last call. Names as in `Workload`; what cannot be computed is left out."""
    found: dict[str, Number] = {}
    replicas = config.engine.replicas
    at_once = math.ceil(config.rollouts.max_concurrent / replicas)  # of one replica's calls
    one, all_calls = (_step_s(config, shape, gpu, calls, context) for calls in (1, at_once))
    why = f"data sheet of {gpu.name}: weights and cache / bandwidth x {DECODE}"
    if one is not None and all_calls is not None:
        found["call_tokens_s"] = Number(1 / all_calls, "computed", why)
        found["engine_tokens_s"] = Number(at_once * replicas / all_calls, "computed", why)
    if shape.matmul is not None:
        parallel = config.engine.tensor_parallel_size
        prefill = replicas * PREFILL * gpu.half * parallel / (2 * shape.matmul)
        found["prefill_tokens_s"] = Number(prefill, "computed", f"{gpu.name}: FLOP/s x {PREFILL} / 2 parameters")
        found["learner_tokens_s"] = _learner(config, shape, gpu, context)
    step = _step_rest_s(config, shape, gpu)
    if step is not None:
        found["step_s"] = Number(step, "computed", f"optimizer by bandwidth, {TRANSFER / 1e9:g} GB/s of weights")
    return found


def _step_s(config: RunConfig, shape: ModelShape, gpu: Gpu, calls: int, context: float | None) -> float | None:
    """Seconds of one decoding step: it reads the weights once and each call's cache, half full on average."""
    size, parallel = engine_size(config, "cuda"), config.engine.tensor_parallel_size
    if shape.active is None or shape.parameters is None or context is None:
        return None
    cache = cache_of(shape, round(context / 2), size)
    if cache is None:
        return None
    # A large batch meets every expert, a single call only its own.
    read = shape.active if calls == 1 else shape.parameters
    return (read * size + calls * cache) / (gpu.bandwidth * parallel * DECODE)


def _learner(config: RunConfig, shape: ModelShape, gpu: Gpu, context: float | None) -> Number:
    assert shape.matmul is not None
    learner = config.learner
    forward = flops(shape, context)
    # Backward costs two forwards; an adapter's needs no gradient of the weights below it.
    passes = 1 + (2 if learner.lora is None else 1) + learner.gradient_checkpointing + bool(learner.objective.kl_coef)
    peak = gpu.single if learner.dtype == "float32" else gpu.half
    speed = UTILISATION * peak * learner.num_processes / (forward * passes)
    return Number(speed, "computed", f"{gpu.name}: {learner.dtype} FLOP/s x {UTILISATION} / {passes} passes")


def flops(shape: ModelShape, context: float | None) -> float:
    """FLOPs of one token's forward pass: two per multiplied parameter, and attention to half of the context."""
    attention = 0.0
    if shape.num_layers and shape.query and context:
        attention = 4 * shape.num_layers * shape.query * context / 2
    return 2.0 * (shape.matmul or 0) + attention


def _step_rest_s(config: RunConfig, shape: ModelShape, gpu: Gpu) -> float | None:
    number, size = trained(config.learner, shape)
    if number is None or shape.parameters is None:
        return None
    # AdamW reads weight, gradient and two moments, and writes all but the gradient.
    optimizer = 7 * number * size / (gpu.bandwidth * OPTIMIZER * config.learner.num_processes)
    if config.learner.weight_sync.type == "lora":
        return optimizer + number * size / TRANSFER
    return optimizer + shape.parameters * (4 if config.learner.weights_dtype == "float32" else 2) / TRANSFER

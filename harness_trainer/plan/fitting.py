"""Does it fit? What the engine and the learner need, beside what each GPU has (or this machine, on a CPU). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness_trainer.config import RunConfig
from harness_trainer.plan.amounts import total
from harness_trainer.plan.engine_memory import CPU_CACHE, SHARE, EngineMemory
from harness_trainer.plan.learner_memory import LearnerMemory
from harness_trainer.plan.sizes import GIB, gib

# Left free on a GPU that engine and learner share: neither knows of the other's peak.
SPARE = 0.03


@dataclass(frozen=True, slots=True)
class Fit:
    """`fits` None = something that decides it is not known. `notes`: what to know or to do, one line each."""

    fits: bool | None
    notes: list[str]


def fit(
    config: RunConfig,
    engine: EngineMemory,
    learner: LearnerMemory,
    *,
    device: Literal["cuda", "cpu"],
    memory: int | None,
    gpus: int | None,
) -> Fit:
    """`memory`: bytes of each GPU, or of the machine; `gpus`: how many there are, None = as many as are asked for."""
    if memory is None:
        return Fit(None, ["how much memory there is: give --gpu or --gpu-memory"])
    if device == "cpu":
        return _on_cpu(config, engine, learner, memory)
    wanted = config.engine.replicas * config.engine.tensor_parallel_size + config.learner.num_processes
    if gpus is not None and gpus < wanted:
        if gpus == 1 and wanted == 2:
            return _shared(config, engine, learner, memory)
        return Fit(False, [f"engine and learner want {wanted} GPUs, there are {gpus}: lower one, or give --gpus"])
    taken = int(memory * (config.engine.gpu_memory_utilization or SHARE))
    return _both(_engine(engine, taken), _learner(learner, memory))


def _engine(engine: EngineMemory, taken: int) -> Fit:
    room = engine.room(taken)
    if room is None:
        return Fit(None, ["the engine's need is not known"])
    if room == 0:
        more = "a larger GPU, engine.tensor_parallel_size, or a shorter engine.max_model_len"
        return Fit(False, [f"the engine has no room for one context of {engine.context} tokens: {more}"])
    if room < engine.num_calls:
        note = f"the engine holds {room} whole contexts and the run makes {engine.num_calls} calls: some will wait"
        return Fit(True, [f"{note}, or are computed again"])
    return Fit(True, [f"the engine holds {room} whole contexts, the run makes {engine.num_calls} calls at a time"])


def _learner(learner: LearnerMemory, memory: int) -> Fit:
    if learner.peak is None:
        return Fit(None, ["the learner's need is not known"])
    if learner.peak <= memory:
        return Fit(True, [f"the learner leaves {gib(memory - learner.peak)} of its GPU free"])
    ways = "learner.gradient_checkpointing, a smaller learner.token_budget, fsdp2, learner.lora with dtype bfloat16"
    return Fit(False, [f"the learner lacks {gib(learner.peak - memory)}: try {ways}"])


def _shared(config: RunConfig, engine: EngineMemory, learner: LearnerMemory, memory: int) -> Fit:
    """One GPU for both: what the learner leaves is the engine's share."""
    alone = _learner(learner, memory)
    if learner.peak is None or not alone.fits:
        return alone
    share = (memory - learner.peak) / memory - SPARE
    asked = config.engine.gpu_memory_utilization
    if asked is None or asked > share:
        held = _engine(engine, int(memory * max(0.0, share)))
        advice = f"one GPU for both: set engine.gpu_memory_utilization to {max(0.0, share):.2f} or less"
        if asked is not None:
            return Fit(False, [f"{advice} (it is {asked})"])
        return Fit(held.fits, [advice, *held.notes])
    return _both(_engine(engine, int(memory * asked)), alone)


def _on_cpu(config: RunConfig, engine: EngineMemory, learner: LearnerMemory, memory: int) -> Fit:
    cache = int((config.engine.kv_cache_gib or CPU_CACHE / GIB) * GIB)
    fixed, peak = total(engine.fixed), learner.peak
    if fixed is None or peak is None:
        return Fit(None, ["what engine and learner need together is not known"])
    together = (fixed + cache) * config.engine.replicas + peak * config.learner.num_processes
    room = engine.room(fixed + cache) or 0
    notes = [f"engine and learner need {gib(together)} of {gib(memory)}; the cache holds {room} whole contexts"]
    if room == 0:
        notes.append("not one whole context fits into the cache: raise engine.kv_cache_gib, or lower max_model_len")
    return Fit(together <= memory and room > 0, notes)


def _both(*fits: Fit) -> Fit:
    verdicts = [f.fits for f in fits]
    verdict = False if False in verdicts else None if None in verdicts else True
    return Fit(verdict, [note for f in fits for note in f.notes])

"""Bytes of engine and learner, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness_trainer.config import RunConfig
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.launch import is_sharded
from harness_trainer.plan.amounts import total
from harness_trainer.plan.engine_memory import OVERHEAD, cache_of, engine_memory
from harness_trainer.plan.fitting import fit
from harness_trainer.plan.learner_memory import CONTEXT, LearnerMemory, kept_by_layer, learner_memory
from harness_trainer.plan.shape import ModelShape


def memory_of(shape: ModelShape, *, device: str = "cuda", **settings: object) -> LearnerMemory:
    config = LearnerConfig.model_validate(settings)
    return learner_memory(config, shape, device=device, sharded=is_sharded(config), tokens=100)


def bytes_of(memory: LearnerMemory) -> dict[str, int | None]:
    return {part.name: part.bytes for part in (*memory.resident, *memory.backward, *memory.update)}


def test_full_training_in_float32(shape: ModelShape) -> None:
    found = bytes_of(memory_of(shape))
    assert (found["weights"], found["gradients"], found["optimizer"]) == (4800, 4800, 9600)
    assert found["CUDA"] == CONTEXT
    # Two norms of 3 x 4 B, attention 2 x (4 + 2) and an MLP of 4 x 8 elements of 4 B.
    assert kept_by_layer(shape, 4) == 2 * 4 * 12 + 4 * (2 * 4 + 2 * 2 + 4 * 8)
    assert found["activations"] == 100 * 10 * 272
    assert found["logits"] == 100 * 50 * 4
    assert found["head"] == 100 * 4 * 12 + 200 * 4
    assert found["optimizer step"] == 4800


def test_the_peak_counts_the_larger_of_backward_and_optimizer(shape: ModelShape) -> None:
    memory = memory_of(shape)
    resident, backward, update = (total(p) or 0 for p in (memory.resident, memory.backward, memory.update))
    assert memory.peak == resident + max(backward, update)
    small = replace(shape, head=0, parameters=10**9)
    assert memory_of(small).peak == total(memory_of(small).resident) + 4 * 10**9  # type: ignore[operator]


def test_checkpointing_keeps_inputs_only(shape: ModelShape) -> None:
    recomputed = bytes_of(memory_of(shape, gradient_checkpointing=True))
    assert recomputed["activations"] == 100 * (4 * 10 * 4 + 272)


def test_bfloat16_is_a_copy_for_the_products_beside_float32(shape: ModelShape) -> None:
    mixed = bytes_of(memory_of(shape, dtype="bfloat16", objective={"kl_coef": 0.1}))
    assert (mixed["weights"], mixed["gradients"], mixed["optimizer"]) == (4800, 4800, 9600)
    assert mixed["reference"] == 4800 and mixed["weights in bfloat16"] == (1200 - 200) * 2
    # Norms: two forms each in float32, and five copies in bfloat16.
    layer = 4 * 26 + 2 * (2 * 4 + 2 * 2 + 4 * 8)
    assert mixed["activations"] == 100 * 10 * layer
    assert mixed["logits"] == 100 * 50 * 2 and mixed["head"] == 100 * 4 * 12 + 200 * 4
    recomputed = bytes_of(memory_of(shape, dtype="bfloat16", gradient_checkpointing=True))
    assert recomputed["activations"] == 100 * (4 * 10 * 4 + layer)


def test_shards_are_put_together_in_bfloat16(shape: ModelShape) -> None:
    settings = {"dtype": "bfloat16", "num_processes": 4, "accelerate_config": "fsdp2", "objective": {"kl_coef": 0.1}}
    found = bytes_of(memory_of(shape, **settings))
    assert (found["weights"], found["gradients"], found["optimizer"]) == (1200, 1200, 2400)
    assert found["reference"] == 2400 and "weights in bfloat16" not in found
    assert found["activations"] == 100 * 10 * kept_by_layer(shape, 2)  # type: ignore[operator]
    assert found["layers put together"] == 100 * (3 * 2 + 4) + 200 * 2


def test_an_adapter_is_trained_in_float32_beside_frozen_weights(shape: ModelShape) -> None:
    found = bytes_of(memory_of(shape, dtype="bfloat16", lora={"rank": 2}))
    adapter = 2 * 200
    assert found["weights"] == 2400 and found["adapter"] == found["gradients"] == adapter * 4
    assert found["optimizer"] == adapter * 8
    assert found["head"] == 100 * 4 * (4 + 2 * 2)  # no gradient of the head


def test_a_reference_is_a_whole_copy_unless_there_is_an_adapter(shape: ModelShape) -> None:
    assert bytes_of(memory_of(shape, objective={"kl_coef": 0.1}))["reference"] == 4800
    assert "reference" not in bytes_of(memory_of(shape, objective={"kl_coef": 0.1}, lora={"rank": 2}))


def test_processes_share_or_copy(shape: ModelShape) -> None:
    copies = bytes_of(memory_of(shape, num_processes=4))
    assert copies["weights"] == 4800 and copies["exchange of gradients"] == 4800
    shards = bytes_of(memory_of(shape, num_processes=4, accelerate_config="fsdp2"))
    assert (shards["weights"], shards["gradients"], shards["optimizer"]) == (1200, 1200, 2400)
    assert shards["layers put together"] == 3 * 100 * 4 + 200 * 4
    assert "exchange of gradients" not in shards


@pytest.mark.parametrize(("optimizer", "state"), [("adamw_torch", 9600), ("adafactor", 360), ("sgd", 0)])
def test_what_each_optimizer_keeps(shape: ModelShape, optimizer: str, state: int) -> None:
    assert bytes_of(memory_of(shape, optimizer=optimizer))["optimizer"] == state


def test_an_unknown_part_makes_the_whole_unknown_and_never_zero(shape: ModelShape) -> None:
    memory = memory_of(replace(shape, intermediate=None))
    assert bytes_of(memory)["activations"] is None and memory.peak is None
    assert memory_of(replace(shape, parameters=None)).peak is None


def test_the_engines_cache(shape: ModelShape) -> None:
    config = RunConfig.model_validate({"rollouts": {"max_concurrent": 3}, "engine": {"tensor_parallel_size": 2}})
    memory = engine_memory(config, shape, device="cuda", context=100)
    assert memory.per_call == 100 * 10 * 4 * 2 // 2
    assert memory.cache.bytes == 3 * memory.per_call
    parts = {part.name: part.bytes for part in memory.fixed}
    assert parts["weights"] == 1200 and parts["CUDA"] == OVERHEAD
    assert engine_memory(config, shape, device="cuda", context=None).context == 128  # the model's window
    fixed = total(memory.fixed)
    assert fixed is not None
    assert memory.room(fixed + 2 * memory.per_call + 1) == 2 and memory.room(fixed - 1) == 0


def test_sliding_layers_keep_no_more_than_their_window(shape: ModelShape) -> None:
    mixed = replace(shape, full_layers=4, sliding_layers=6, sliding_window=10)
    assert cache_of(mixed, 100, 2) == 2 * 4 * (4 * 100 + 6 * 10)
    assert cache_of(replace(shape, full_layers=None), 100, 2) is None


def test_what_fits(shape: ModelShape) -> None:
    config = RunConfig()
    engine = engine_memory(config, shape, device="cuda", context=100)
    learner = learner_memory(config.learner, shape, device="cuda", sharded=False)
    big, small = 80 * 2**30, 2**30
    assert fit(config, engine, learner, device="cuda", memory=big, gpus=2).fits
    assert fit(config, engine, learner, device="cuda", memory=None, gpus=2).fits is None
    refused = fit(config, engine, learner, device="cuda", memory=small, gpus=2)
    assert refused.fits is False and any("engine has no room" in note for note in refused.notes)
    assert any("learner lacks" in note for note in refused.notes)
    unknown = replace(learner, backward=[replace(learner.backward[0], bytes=None)])
    assert fit(config, engine, unknown, device="cuda", memory=big, gpus=2).fits is None


def test_one_gpu_for_both_says_what_the_engine_may_take(shape: ModelShape) -> None:
    config = RunConfig()
    engine = engine_memory(config, shape, device="cuda", context=100)
    learner = learner_memory(config.learner, replace(shape, parameters=2 * 10**9), device="cuda", sharded=False)
    found = fit(config, engine, learner, device="cuda", memory=80 * 2**30, gpus=1)
    assert found.fits and "set engine.gpu_memory_utilization to 0.4" in found.notes[0]
    greedy = config.model_copy(update={"engine": config.engine.model_copy(update={"gpu_memory_utilization": 0.9})})
    assert fit(greedy, engine, learner, device="cuda", memory=80 * 2**30, gpus=1).fits is False
    many = config.model_copy(update={"learner": config.learner.model_copy(update={"num_processes": 4})})
    assert fit(many, engine, learner, device="cuda", memory=80 * 2**30, gpus=2).fits is False


def test_a_machine_without_a_gpu_holds_both(shape: ModelShape) -> None:
    config = RunConfig.model_validate({"learner": {"device": "cpu"}})
    engine = engine_memory(config, shape, device="cpu", context=100)
    learner = learner_memory(config.learner, shape, device="cpu", sharded=False)
    assert fit(config, engine, learner, device="cpu", memory=8 * 2**30, gpus=None).fits
    assert fit(config, engine, learner, device="cpu", memory=2**30, gpus=None).fits is False


def test_replicas_share_the_calls_and_each_takes_its_own_memory(shape: ModelShape) -> None:
    engine = {"replicas": 3, "tensor_parallel_size": 2}
    config = RunConfig.model_validate({"rollouts": {"max_concurrent": 7}, "engine": engine})
    memory = engine_memory(config, shape, device="cuda", context=100)
    assert memory.num_calls == 3, "of one replica"
    learner = learner_memory(config.learner, shape, device="cuda", sharded=False)
    few = fit(config, memory, learner, device="cuda", memory=80 * 2**30, gpus=6)
    assert few.fits is False and "want 7 GPUs, there are 6" in few.notes[0]
    assert fit(config, memory, learner, device="cuda", memory=80 * 2**30, gpus=7).fits
    here = {"learner": {"device": "cpu"}}
    one, three = (RunConfig.model_validate({**here, "engine": {"replicas": number}}) for number in (1, 3))
    engine_of = engine_memory(one, shape, device="cpu", context=100)
    on_cpu = learner_memory(one.learner, shape, device="cpu", sharded=False)
    assert fit(one, engine_of, on_cpu, device="cpu", memory=3 * 2**30, gpus=None).fits
    assert fit(three, engine_of, on_cpu, device="cpu", memory=3 * 2**30, gpus=None).fits is False

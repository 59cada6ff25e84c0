"""The real engine tells which weights it holds: as loaded, also in packed layers and tied heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness_trainer.engine.digests import sample_names
from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.weight_transfer import ShmWeightTransfer


@pytest.fixture
def transfer(tiny_engine: Any, tmp_path: Path) -> Iterator[ShmWeightTransfer]:
    transfer = ShmWeightTransfer(tiny_engine.base_url, directory=tmp_path, verify="always")
    transfer.init_weight_transfer()
    yield transfer
    transfer.destroy()


def weights(tiny_engine: Any, seed: int) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(tiny_engine.model_path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: p.detach() + 0.05 * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()
    }
    if tiny_engine.model.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def publish(transfer: ShmWeightTransfer, tensors: dict[str, torch.Tensor], version: int) -> None:
    transfer.next_version(version)
    transfer.pause()
    transfer.send_weights(tensors.items())
    transfer.resume()


def test_every_kind_of_weight_is_found_as_loaded_after_each_update(tiny_engine: Any, transfer: Any) -> None:
    for version in (1, 2):
        tensors = weights(tiny_engine, version)
        publish(transfer, tensors, version)
        assert transfer.check.run() == {"loaded": len(sample_names(tensors))}
    print(f"\n{transfer.last_timings['verify'] * 1000:.0f} ms for {len(sample_names(tensors))} tensors")


@pytest.mark.parametrize(
    "kind", ["embed_tokens", "lm_head", "layers.1.self_attn.v_proj", "layers.0.mlp.up_proj", "model.norm"]
)
def test_a_weight_that_differs_is_named(tiny_engine: Any, transfer: Any, tmp_path: Path, kind: str) -> None:
    tensors = weights(tiny_engine, 3)
    publish(transfer, tensors, 3)
    (name,) = [name for name in tensors if kind in name]
    changed = tensors[name].clone()
    changed.view(-1)[0] += 1e-4
    other = ShmWeightTransfer(tiny_engine.base_url, directory=tmp_path)
    other.check.remember({**tensors, name: changed})
    with pytest.raises(TrainingFailed, match=rf"'{name}' \(loaded\) differs"):
        other.check.run()
    other.destroy()

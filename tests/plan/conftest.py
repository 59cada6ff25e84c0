"""Model shapes and numbers that the tests of `plan` reckon with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness_trainer.plan.amounts import Number
from harness_trainer.plan.shape import ModelShape

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    """A model folder that holds a config and nothing else."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def numbers(**values: float) -> dict[str, Number]:
    return {name: Number(value, "given") for name, value in values.items()}


@pytest.fixture
def shape() -> ModelShape:
    """Round numbers: 100 parameters in each of 10 layers, 200 in the head."""
    return ModelShape(
        name="round",
        parameters=1200,
        active=1200,
        embedding=200,
        head=200,
        tied=True,
        largest_layer=100,
        factored=90,
        num_layers=10,
        hidden=4,
        vocabulary=50,
        query=4,
        key_value=2,
        intermediate=8,
        window=128,
        full_layers=10,
        cached=4,
        linear={"q_proj": (80, 10), "up_proj": (120, 10)},
    )

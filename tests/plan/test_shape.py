"""Sizes from config.json: the same as the built model's, and None for what nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.plan.shape import read_shape
from tests.plan.conftest import LLAMA, folder_of


def test_the_counts_are_those_of_the_model_that_is_trained(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = folder_of(tmp_path / "m", LLAMA)
    shape = read_shape(str(folder))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert shape.parameters == model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert shape.tied and shape.head == shape.embedding == 64 * 1000
    assert shape.matmul == shape.parameters  # the tied head is multiplied with
    assert (shape.query, shape.key_value, shape.cached, shape.full_layers) == (64, 32, 64, 4)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert shape.largest_layer == layer
    linear = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert shape.adapter(8, "all-linear") == 8 * sum(m.in_features + m.out_features for m in linear)
    assert shape.adapter(8, ["q_proj"]) == 8 * 4 * 128
    assert shape.unknown == ()


def test_a_head_of_its_own_is_counted_and_the_embedding_is_not_multiplied(tmp_path: Path) -> None:
    tied = read_shape(str(folder_of(tmp_path / "tied", LLAMA)))
    shape = read_shape(str(folder_of(tmp_path / "own", {**LLAMA, "tie_word_embeddings": False})))
    assert tied.parameters is not None and shape.parameters == tied.parameters + 64 * 1000
    assert shape.matmul == tied.matmul


def test_a_mixture_of_experts_has_fewer_parameters_for_one_token(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    }
    shape = read_shape(str(folder_of(tmp_path / "moe", config)))
    experts = 4 * 8 * 3 * 64 * 32
    assert shape.parameters is not None and shape.active == shape.parameters - experts * 6 // 8
    assert shape.intermediate == 2 * 32
    assert shape.normed_heads


def test_an_unknown_architecture_says_what_is_unknown(tmp_path: Path) -> None:
    shape = read_shape(str(folder_of(tmp_path / "m", {**LLAMA, "model_type": "not_yet_invented"})))
    assert shape.parameters is None and shape.intermediate is None and shape.adapter(8, "all-linear") is None
    assert shape.num_layers == 4 and shape.head == 64_000
    assert "not_yet_invented" in shape.unknown[0]
    assert any("number of parameters" in what for what in shape.unknown)


def test_layers_of_another_kind_leave_the_cache_unknown(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    shape = read_shape(str(folder_of(tmp_path / "hybrid", config)))
    assert shape.full_layers is None and shape.parameters is not None
    assert any("keeps of a token" in what for what in shape.unknown)


def test_what_is_no_model_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no.* JSON object|not a JSON object"):
        read_shape(str(tmp_path))
    with pytest.raises(SetupError, match="give a folder with its"):
        read_shape(str(tmp_path / "nothing" / "here"))

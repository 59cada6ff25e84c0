"""Digests of weights: equal exactly when the numbers are, whatever layout the engine keeps them in."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from harness_trainer.engine.digests import columns_of, digest, loaded_part, sample_names, take_sample


class UnquantizedLinearMethod:
    """vLLM's on a CPU: the layer multiplies by a packed copy, and its parameter is empty."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.packed, bias)


class Fp8LinearMethod(UnquantizedLinearMethod):
    pass


class Linear(torch.nn.Module):
    """A linear layer as vLLM builds it; `sizes` are the rows of each part of a fused one."""

    def __init__(self, weight: torch.Tensor, sizes: list[int], *, keep: bool = False, method: Any = None) -> None:
        super().__init__()
        self.packed, self.output_sizes, self.params_dtype = weight, sizes, weight.dtype
        self.weight = torch.nn.Parameter(weight.clone() if keep else torch.empty(0), requires_grad=False)
        self.quant_method = method or UnquantizedLinearMethod()


class VocabParallelEmbedding(torch.nn.Module):
    """Padded to a multiple of something; has a packed copy too, which look-ups never use."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.cat([weight, torch.zeros(4, weight.shape[1])]), requires_grad=False)
        self.packed = torch.zeros_like(self.weight)
        self.quant_method = UnquantizedLinearMethod()


class Model(torch.nn.Module):
    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


Q, K, V = (torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows)) for rows in (12, 4, 5))


def found(model: Model, name: str, tensor: torch.Tensor) -> bool:
    part = loaded_part(model, name, tuple(tensor.shape))
    assert part is not None
    return digest(part, tensor.dtype) == digest(take_sample(tensor).part, tensor.dtype)


def test_the_first_and_the_last_layer_of_each_kind_are_looked_at() -> None:
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(12) for kind in ("q_proj", "norm")]
    assert sample_names([*names, "model.norm.weight", "lm_head.weight"]) == [
        "lm_head.weight",
        "model.layers.0.norm.weight",
        "model.layers.0.q_proj.weight",
        "model.layers.11.norm.weight",
        "model.layers.11.q_proj.weight",
        "model.norm.weight",
    ]


def test_columns_are_spread_over_the_whole_width() -> None:
    assert columns_of(1) == [0]
    assert columns_of(5) == [0, 1, 2, 3, 4]
    assert columns_of(4096)[0] == 0 and columns_of(4096)[-1] == 4095 and len(columns_of(4096)) == 8


def test_one_number_in_the_last_bit_is_another_digest() -> None:
    tensor = torch.randn(64)
    changed = tensor.clone()
    changed[17] = torch.nextafter(changed[17], torch.tensor(9.0))
    assert digest(tensor, torch.float32) != digest(changed, torch.float32)
    assert digest(tensor, torch.float32) == digest(tensor.clone(), torch.float32)


def test_both_sides_round_to_the_engines_precision() -> None:
    tensor = torch.randn(64)
    assert digest(tensor, torch.bfloat16) == digest(tensor.to(torch.bfloat16), torch.bfloat16)
    assert digest(tensor, torch.bfloat16) != digest(tensor, torch.float32)


def test_minus_zero_is_zero_because_a_product_cannot_tell_them_apart() -> None:
    assert digest(torch.tensor([-0.0]), torch.float32) == digest(torch.tensor([0.0]), torch.float32)


@pytest.mark.parametrize(("name", "tensor"), [("q_proj", Q), ("k_proj", K), ("v_proj", V)])
def test_parts_of_a_fused_and_packed_layer_are_found_by_their_own_names(name: str, tensor: torch.Tensor) -> None:
    attention = Model({"qkv_proj": Linear(torch.cat([Q, K, V]), [12, 4, 5])})
    assert found(Model({"attn": attention}), f"attn.{name}.weight", tensor)


def test_a_stale_packed_copy_is_seen_though_the_parameter_is_new() -> None:
    head = Linear(Q, [12], keep=True)
    assert found(Model({"lm_head": head}), "lm_head.weight", Q)
    head.packed = Q + 1e-6
    assert not found(Model({"lm_head": head}), "lm_head.weight", Q)


def test_an_embedding_is_read_where_it_is_looked_up_without_its_padding() -> None:
    assert found(Model({"embed_tokens": VocabParallelEmbedding(Q)}), "embed_tokens.weight", Q)


def test_a_norm_is_compared_whole() -> None:
    norm = torch.nn.LayerNorm(16, bias=False)
    assert found(Model({"norm": norm}), "norm.weight", torch.ones(16))
    assert not found(Model({"norm": norm}), "norm.weight", torch.ones(16) * 1.001)


@pytest.mark.parametrize(
    "modules",
    [
        {},
        {"q_proj": Linear(Q, [12], method=Fp8LinearMethod())},
        {"q_proj": Linear(Q[:6], [6])},  # a shard
    ],
    ids=["not-there", "quantised", "a-part-of-it"],
)
def test_what_is_not_held_in_one_piece_is_not_claimed(modules: dict[str, torch.nn.Module]) -> None:
    assert loaded_part(Model(modules), "q_proj.weight", (12, 16)) is None

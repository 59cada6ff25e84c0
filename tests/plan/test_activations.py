"""The formula for activations, beside what autograd really keeps of a forward pass with our own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness_trainer.plan.learner_memory import kept_by_layer
from harness_trainer.plan.shape import read_shape
from tests.plan.conftest import LLAMA, folder_of

TOKENS = 256
QWEN = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=["llama", "qwen3"])
def test_what_a_layer_keeps_of_a_token(config: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    import torch
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    from harness_trainer.learner.tree_attention import sdpa_tree_attention

    AttentionInterface.register("plan_test_tree", sdpa_tree_attention)
    folder = folder_of(tmp_path / "model", config)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="plan_test_tree")
    autocast = dtype == "autocast"
    model = model.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32).model
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    matrices = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    kept: dict[int, int] = {}
    copies: dict[int, int] = {}  # of weights
    alive = []  # an address is to be one tensor's

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            (copies if tensor.shape in matrices else kept)[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    bounds = torch.tensor([0, TOKENS])
    in_mixed_precision = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), in_mixed_precision:
        model(
            input_ids=torch.zeros(1, TOKENS, dtype=torch.long),
            use_cache=False,
            tree_kv_index=torch.arange(TOKENS),
            tree_cu_seqlens_q=bounds,
            tree_cu_seqlens_k=bounds,
        )
    shape = read_shape(str(folder))
    foretold = kept_by_layer(shape, 4 if dtype == "float32" else 2, autocast=autocast)
    assert foretold is not None and shape.parameters is not None and shape.embedding is not None
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert sum(copies.values()) == (2 * (shape.parameters - shape.embedding - norms) if autocast else 0)
    # The rest (the last norm, rotary tables) is of no layer, and small in a model of usual depth.
    assert sum(kept.values()) / TOKENS / LLAMA["num_hidden_layers"] == pytest.approx(foretold, rel=0.15)

"""A whole model on packed trees equals the same model on each row alone: logits and gradients of every weight."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, AutoModelForCausalLM

from harness_trainer.learner.tree_attention import sdpa_tree_attention
from harness_trainer.learner.trl_compat import pack_micro_batches

FAMILIES = {
    "llama_gqa": {"family": "llama"},
    "llama_mha_untied": {"family": "llama", "num_key_value_heads": 4, "tie": False},
    "qwen3_mqa": {"family": "qwen3", "num_key_value_heads": 1},
    "qwen3_window": {"family": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory, build_model):
    """The same weights twice: with tree attention and with Transformers' own SDPA, in float64."""
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("tree_under_test", sdpa_tree_attention)
    AttentionMaskInterface.register("tree_under_test", lambda **kwargs: None)
    folder = build_model(tmp_path_factory.mktemp("model"), **FAMILIES[request.param])
    return [
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float64)
        for attention in ("tree_under_test", "sdpa")
    ]


def sample(ids, group_id=0):
    return {
        "input_ids": np.asarray(ids),
        "completion_mask": np.asarray([0] + [1] * (len(ids) - 1)),
        "old_log_probs": np.zeros(len(ids), dtype=np.float32),
        "advantage": 1.0,
        "group_id": group_id,
        "metrics": {},
    }


def packed_logits(model, tree):
    batch = tree.pack()
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    longest_q, longest_k = batch["tree_max_seqlens"].tolist()
    return batch, model(
        input_ids=batch["input_ids"][None],
        position_ids=batch["position_ids"][None],
        use_cache=False,
        tree_max_seqlen_q=longest_q,
        tree_max_seqlen_k=longest_k,
        **{name: batch[name] for name in names},
    ).logits[0]


rows_strategy = st.lists(st.lists(st.integers(3, 5), min_size=2, max_size=12), min_size=1, max_size=5)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows_strategy)
def test_packed_rows_equal_rows_alone(models, rows):
    # Not 1e-12: Transformers' norms compute in float32 even here.
    tree_model, dense_model = models
    (tree,) = pack_micro_batches([sample(ids) for ids in rows], token_budget=1000)
    batch, logits = packed_logits(tree_model, tree)
    picked = logits[batch["token_index"]].log_softmax(-1)
    targets = torch.tensor([token for ids in rows for token in ids[1:]])
    alone = torch.cat([dense_model(input_ids=torch.tensor([ids])).logits[0, :-1] for ids in rows]).log_softmax(-1)
    torch.testing.assert_close(picked, alone, atol=1e-6, rtol=0)
    losses = [p.gather(1, targets[:, None]).sum() for p in (picked, alone)]
    for model, loss in zip(models, losses, strict=True):
        model.zero_grad()
        loss.backward()
    for (name, got), expected in zip(tree_model.named_parameters(), dense_model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_float32_stays_within_rounding(models):
    tree_model, dense_model = (model.float() for model in models)
    generator = np.random.default_rng(0)
    trunk = generator.integers(3, 100, 60).tolist()
    rows = [trunk[:cut] + generator.integers(3, 100, 20).tolist() for cut in (60, 60, 40, 20, 0)]
    (tree,) = pack_micro_batches([sample(ids) for ids in rows], token_budget=1000)
    with torch.no_grad():
        batch, logits = packed_logits(tree_model, tree)
        picked = logits[batch["token_index"]].log_softmax(-1)
        alone = torch.cat([dense_model(input_ids=torch.tensor([ids])).logits[0, :-1] for ids in rows]).log_softmax(-1)
    for model in models:
        model.double()
    torch.testing.assert_close(picked, alone, atol=1e-4, rtol=0)


def test_samples_are_split_by_budget_and_groups_stay_together():
    rows = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 9], [5, 6, 7, 9]]
    trees = pack_micro_batches([sample(ids, group_id=i % 2) for i, ids in enumerate(rows)], token_budget=7)
    assert [len(tree.tokens) for tree in trees] == [6, 6]
    assert [tree.groups for tree in trees] == [{0}, {1}]
    assert all(tree.trained <= 7 for tree in trees)

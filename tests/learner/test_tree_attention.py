"""SDPA tree attention equals a dense forward pass of each row alone: values and gradients, any tree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_trainer.errors import SetupError
from harness_trainer.learner.tree_attention import flash_attention_3_available, sdpa_tree_attention


def pack(rows):
    """Rows of token ids as a prefix trie in depth-first order, in the layout of TRL's `TreeRow.pack`.

    Returns the tree tensors and, for each row, the packed position of each of its tokens.
    """
    children = [{}]
    for row in rows:
        node = 0
        for token in row:
            if token not in children[node]:
                children[node][token] = len(children)
                children.append({})
            node = children[node][token]
    ends = set()
    for row in rows:
        node = 0
        for token in row:
            node = children[node][token]
        ends.add(node)
    order, paths, cu_q = {}, [], [0]
    stack = [(child, []) for child in reversed(children[0].values())]
    while stack:
        node, path = stack.pop()
        path = list(path)
        while True:
            order[node] = len(order)
            path.append(order[node])
            if len(children[node]) != 1 or node in ends:
                break
            node = next(iter(children[node].values()))
        cu_q.append(len(order))
        paths.append(path)
        stack.extend((child, path) for child in reversed(children[node].values()))
    cu_k = [0]
    for path in paths:
        cu_k.append(cu_k[-1] + len(path))
    positions = []
    for row in rows:
        node, row_positions = 0, []
        for token in row:
            node = children[node][token]
            row_positions.append(order[node])
        positions.append(row_positions)
    tree = {
        "tree_kv_index": torch.tensor([p for path in paths for p in path]),
        "tree_cu_seqlens_q": torch.tensor(cu_q, dtype=torch.int32),
        "tree_cu_seqlens_k": torch.tensor(cu_k, dtype=torch.int32),
    }
    return tree, positions


def dense(query, key, value, window, scaling):
    """Plain causal attention with an explicit softmax, grouped heads repeated."""
    n, repeats = query.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def check_equal_to_dense(rows, *, heads, kv_heads, window=None, scaling=None, block=1024, dim=4, value_dim=4):
    tree, positions = pack(rows)
    num = int(tree["tree_cu_seqlens_q"][-1])
    generator = torch.Generator().manual_seed(num)
    packed = [
        torch.randn(1, h, num, size, dtype=torch.float64, generator=generator).requires_grad_()
        for h, size in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    ]
    out, _ = sdpa_tree_attention(None, *packed, None, scaling=scaling, sliding_window=window, block=block, **tree)
    assert out.shape == (1, num, heads, value_dim)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    loss = expected_loss = 0.0
    for row_positions in positions:
        alone = dense(*(t[:, :, row_positions] for t in packed), window, scaling)
        torch.testing.assert_close(out[:, row_positions], alone, atol=1e-10, rtol=0)
        loss = loss + (out[:, row_positions] * weights[:, row_positions]).sum()
        expected_loss = expected_loss + (alone * weights[:, row_positions]).sum()
    for got, expected in zip(
        torch.autograd.grad(loss, packed), torch.autograd.grad(expected_loss, packed), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny tensors: starting threads costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


rows_strategy = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(
    rows_strategy,
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.sampled_from([None, 1, 2, 3, 20]),
    st.sampled_from([None, 0.3]),
    st.sampled_from([1, 2, 1024]),
    st.sampled_from([4, 3, 6]),
)
def test_values_and_gradients_equal_a_dense_pass_of_each_row(rows, heads, window, scaling, block, value_dim):
    check_equal_to_dense(
        rows, heads=heads[0], kv_heads=heads[1], window=window, scaling=scaling, block=block, value_dim=value_dim
    )


def test_a_segment_longer_than_a_block_with_a_window_across_its_border():
    long = [1] * 1500
    check_equal_to_dense([long, [*long[:1200], 2, 3], [*long[:700], 4]], heads=2, kv_heads=1, window=900)


def test_soft_capping_is_refused_with_advice():
    tree, _ = pack([[1, 2]])
    packed = [torch.zeros(1, 1, 2, 4)] * 3
    with pytest.raises(SetupError, match="soft-caps"):
        sdpa_tree_attention(None, *packed, None, softcap=30.0, **tree)


def test_without_a_hopper_gpu_the_kernel_is_not_even_loaded():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")

    def load():
        raise AssertionError("must not be called")

    assert flash_attention_3_available(load) is False


@pytest.mark.parametrize(("is_float32", "ours"), [(True, True), (False, False)])
def test_a_hopper_gpu_computes_float32_by_sdpa_as_its_kernel_cannot(monkeypatch, is_float32, ours):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from trl.experimental.async_grpo.packing import TREE_ATTENTION, register_tree_attention

    from harness_trainer.learner import trl_compat

    monkeypatch.setattr(trl_compat, "flash_attention_3_available", lambda load_kernel: True)
    register_tree_attention()
    try:
        trl_compat.use_attention_that_runs_here(is_float32=is_float32)
        assert (ALL_ATTENTION_FUNCTIONS[TREE_ATTENTION] is sdpa_tree_attention) is ours
    finally:
        trl_compat.use_attention_that_runs_here()  # for the tests of this process that train

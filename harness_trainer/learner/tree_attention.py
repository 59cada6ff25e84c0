"""Attention over a prefix tree with torch's own SDPA, for where FlashAttention 3 is absent.

TRL packs the rows of a step into a trie laid out in depth-first order: a token that several rows share is forwarded
once. The packed sequence is cut into segments; the queries of a segment attend causally to the keys on the path from
the root to the segment. TRL computes that with one FlashAttention 3 call, which needs a Hopper GPU. Here it is a loop
over segments on any device, equal to a dense forward pass of each row alone. `trl_compat` registers it.

No N x N mask is built: keys are taken per path, and long segments go in blocks of queries. The backward pass
recomputes each block, so that what stays in memory between the passes is the packed query, key and value only, not a
copy of every path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from harness_trainer.errors import SetupError

# Queries per SDPA call: bounds the mask to block x path and skips the keys that a block cannot see anyway.
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries at packed positions [q_start, q_end) attend to `keys`; the last key is the last query's own."""

    q_start: int
    q_end: int
    keys: slice | torch.Tensor  # packed positions, ascending; a slice where the path is contiguous
    num_keys: int


def sdpa_tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    block: int = BLOCK,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of N packed tokens in S segments, in the signature of TRL's `tree_attention`.

    query (1, Hq, N, D), key (1, Hkv, N, D), value (1, Hkv, N, Dv) with Hq a multiple of Hkv; tree_kv_index (K) the
    packed positions of all paths end to end; tree_cu_seqlens_q, tree_cu_seqlens_k (S + 1) the segments' bounds in the
    packed row and the paths' bounds in tree_kv_index. `scaling` None = 1/sqrt(D). `sliding_window` w: a query sees
    itself and the w - 1 keys before it on its path. Returns (1, N, Hq, Dv). Dropout is ignored, as TRL does. `block` is
    the number of queries per SDPA call; it changes speed and memory only.

    Raises SetupError for `softcap`, which SDPA cannot do.
    """
    if softcap:
        raise SetupError(
            "this model soft-caps its attention, which needs FlashAttention 3: use a Hopper GPU with"
            " `pip install kernels` and learner.dtype bfloat16, or another model"
        )
    window = sliding_window or None
    # Under autocast the rotary embedding may leave query and key in float32 beside a bfloat16 value.
    query, key = query.to(value.dtype), key.to(value.dtype)
    blocks = tuple(_blocks(tree_kv_index, tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist(), window, block))
    out: torch.Tensor = _TreeAttention.apply(query[0], key[0], value[0], blocks, scaling, window)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1).unsqueeze(0), None


def flash_attention_3_available(load_kernel: Callable[[], object]) -> bool:
    """Whether TRL's own kernel can be used: a Hopper GPU, and `load_kernel` (which may download it) succeeds."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        load_kernel()
    except Exception:  # any failure to import, download or load means: the slower way, which needs nothing
        return False
    return True


def _blocks(
    kv_index: torch.Tensor, cu_q: list[int], cu_k: list[int], window: int | None, block: int
) -> Iterator[_Block]:
    # Both ends of every path at once: on a GPU each read of a single element would wait for the device.
    firsts = kv_index[cu_k[:-1]].tolist()
    lasts = kv_index[[end - 1 for end in cu_k[1:]]].tolist()
    for segment, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        path = kv_index[cu_k[segment] : cu_k[segment + 1]]
        num_path, q_start, q_end = len(path), cu_q[segment], cu_q[segment + 1]
        # The segment's own tokens end its path, so query i has `offset + i` keys before it.
        offset = num_path - (q_end - q_start)
        # Depth-first order makes a path ascending: it is contiguous exactly when its ends are that far apart.
        contiguous = last - first + 1 == num_path
        # A whole root needs no mask at all, however long it is.
        step = q_end - q_start if offset == 0 and window is None else block
        for start in range(0, q_end - q_start, step):
            end = min(start + step, q_end - q_start)
            k_start = 0 if window is None else max(0, offset + start - window + 1)
            k_end = offset + end
            keys = slice(first + k_start, first + k_end) if contiguous else path[k_start:k_end]
            yield _Block(q_start + start, q_start + end, keys, k_end - k_start)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """SDPA of (H, q, D) on (Hkv, k, D), aligned at the end: query i sees keys up to k - q + i."""
    num_heads, num_queries, num_keys = query.shape[0], query.shape[1], key.shape[1]
    repeats = num_heads // key.shape[0]
    if num_queries == num_keys and (window is None or window >= num_keys):
        # `enable_gqa` falls back to the slow path on the CPU; nothing of this copy outlives the block.
        key, value = key.repeat_interleave(repeats, dim=0), value.repeat_interleave(repeats, dim=0)
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=num_queries > 1, scale=scaling
        )[0]
    mask = None
    if num_queries > 1 or (window is not None and window < num_keys):
        positions = torch.arange(num_keys, device=query.device)
        ahead = positions - positions[-num_queries:, None]
        mask = ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)
        mask = mask.repeat(repeats, 1)
    # The query heads that share a key head become more queries of that head: no copy of keys, and a faster backward.
    folded = query.reshape(1, key.shape[0], repeats * num_queries, -1)
    out = F.scaled_dot_product_attention(folded, key[None], value[None], attn_mask=mask, scale=scaling)
    return out.reshape(num_heads, num_queries, -1)


class _TreeAttention(torch.autograd.Function):
    """Loops over the blocks; saves only the packed inputs and recomputes each block in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: tuple[_Block, ...],
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[2])  # values may have heads of another size
        with torch.autocast(query.device.type, enabled=False):
            for block in blocks:
                q = query[:, block.q_start : block.q_end]
                out[:, block.q_start : block.q_end] = _attend(
                    q, key[:, block.keys], value[:, block.keys], scaling, window
                )
        ctx.save_for_backward(query, key, value)
        ctx.blocks, ctx.scaling, ctx.window = blocks, scaling, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        # Shared ancestors collect gradients from every block below them.
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for block in ctx.blocks:
            rows = slice(block.q_start, block.q_end)
            inputs = [t.detach().requires_grad_() for t in (query[:, rows], key[:, block.keys], value[:, block.keys])]
            with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
                out = _attend(inputs[0], inputs[1], inputs[2], ctx.scaling, ctx.window)
            grad_query[:, rows], grad_k, grad_v = torch.autograd.grad(out, inputs, grads[0][:, rows])
            for total, part in ((grad_key, grad_k), (grad_value, grad_v)):
                if isinstance(block.keys, slice):
                    total[:, block.keys] += part
                else:
                    total.index_add_(1, block.keys, part)
        return grad_query, grad_key, grad_value, None, None, None

"""Base weights under an adapter stay what they are, bit by bit, whatever is folded into them for a moment.

Owns nothing but that. `trl_compat` uses it around every merged weight update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def base_weights_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put the weights that PEFT merges into (`*.base_layer.weight`) back as they were; sharded ones too.

    Merging is not undone exactly by unmerging: (w + d) - d rounds, and the errors add up, update after update; in
    bfloat16 they are as large as a small d. The copies wait in host memory. Without an adapter there are none.
    """
    bases = [
        parameter.data
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name.endswith(".base_layer.weight")
    ]
    kept = [_local(weight).to("cpu", copy=True) for weight in bases]
    try:
        yield
    finally:
        for weight, copy in zip(bases, kept, strict=True):
            _local(weight).copy_(copy)


def _local(weight: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this process holds."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()

"""What the engine is sent of a model, name by name: its parameters, and a tied output head by its own name too.

Owns that name, and the manifest of what a stream will hold. Parameters and their names are TRL's, gathering and sending
are the trainer's: `trl_compat` calls this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from harness_trainer.learner.nccl_transfer import Manifest


def with_tied_head(model: Any, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """`named`, then the head that shares the embedding's weight: an engine may keep a packed copy of it."""
    names = set()
    for name, tensor in named:
        names.add(name)
        yield name, tensor
    head = _tied_head(model)
    if head is not None and head[0] not in names:
        yield head


def manifest(named: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
    """Of what will be sent; a sharded tensor has the shape of the whole, so nothing is gathered for it."""
    tensors = dict(named)
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def _tied_head(model: Any) -> tuple[str, torch.Tensor] | None:
    """Name and weight of an output head that shares the embedding's; None = it has weights of its own, or none."""
    head = model.get_output_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return None
    name = next(f"{name}.weight" for name, module in model.named_modules() if module is head)
    return name.removeprefix("base_model.model."), head.weight

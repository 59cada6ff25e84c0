"""Whether trainer and engine hold the same weights: which tensors are looked at, and the digest of each.

Owns the rule that both sides follow: the same names and the same columns give the same digest exactly when the numbers
are the same, bit for bit, in the engine's precision. The trainer calls it in `learner.weight_transfer`, the engine in
`worker_extension`; it runs in both environments, so it needs nothing but torch.

What a digest proves is said by its `of`. LOADED: the model that samples has these numbers. They are read from the
parameter, or, where the layer keeps only a packed copy, found by multiplying with unit vectors, which is the very
product that sampling makes. RECEIVED: they arrived and were given to the model's loader; what it made of them is not
looked at (layers split over several workers, fused experts, quantised layers). UNSEEN is no proof: such a layer, where
what arrived is not kept either (vLLM's own NCCL engine). Of a matrix some columns are compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

LOADED, RECEIVED, UNSEEN = "loaded", "received", "unseen"
_NUM_COLUMNS = 8
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Sample:
    """What is compared of one tensor. Example: the columns 0, 18, 36, ... of a (512, 128) embedding."""

    shape: tuple[int, ...]  # of the whole tensor
    part: torch.Tensor  # (rows, columns), or the whole vector


def sample_names(names: Iterable[str]) -> list[str]:
    """The first and the last tensor of each kind; a kind is a name whatever its layer's number. In sorted order."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: [int(number) for number in _NUMBER.findall(name)]):
        kinds.setdefault(_NUMBER.sub("#", name), []).append(name)
    return sorted({name for found in kinds.values() for name in (found[0], found[-1])})


def columns_of(width: int) -> list[int]:
    """Which columns of a matrix `width` wide are compared: the first, the last and some between."""
    return sorted({index * (width - 1) // (_NUM_COLUMNS - 1) for index in range(_NUM_COLUMNS)})


def take_sample(tensor: torch.Tensor) -> Sample:
    """A copy of what is compared of `tensor`; it shares no memory with it."""
    shape, plain = tuple(tensor.shape), tensor.detach()
    if plain.dim() >= 2:
        plain = plain.reshape(shape[0], -1)
        plain = plain[:, columns_of(plain.shape[1])]
    return Sample(shape, plain.clone().cpu())


def digest(part: torch.Tensor, dtype: torch.dtype) -> str:
    """Of the numbers in `dtype`, rounded as the engine does. -0.0 counts as 0.0: a product cannot tell them apart."""
    data = (part.detach().cpu().to(dtype) + 0).contiguous()
    return hashlib.blake2b(data.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def loaded_part(model: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """What the live model holds of checkpoint tensor `name`; None = it cannot be found there in one piece."""
    path, _, kind = name.rpartition(".")
    module, rows = _find(model, path)
    if module is None:
        return None
    rows = rows or slice(0, shape[0])
    held = getattr(module, kind, None)
    # An embedding is looked up in its parameter; whatever multiplies may have packed a copy of its own, and stale ones
    # were seen, so there the product decides.
    if kind == "weight" and len(shape) == 2 and _multiplies(module):
        return _columns_by_product(module, held, rows, shape)
    if not isinstance(held, torch.Tensor) or not held.numel():
        return None
    part = held.detach()[rows]
    return take_sample(part).part if tuple(part.shape) == shape else None


def _columns_by_product(module: Any, held: Any, rows: slice, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Columns of a weight: W e_i is column i, exactly, because every other product is with zero."""
    columns = columns_of(shape[1])
    device = held.device if isinstance(held, torch.Tensor) else None
    dtype = getattr(module, "params_dtype", torch.float32)
    units = torch.zeros(len(columns), shape[1], device=device, dtype=dtype)
    units[range(len(columns)), columns] = 1
    with torch.inference_mode():
        part = module.quant_method.apply(module, units).T[rows].clone().cpu()
    return part if tuple(part.shape) == (shape[0], len(columns)) else None


def _find(model: Any, path: str) -> tuple[Any, slice | None]:
    """The module of a checkpoint's path, and its rows there (None = all): `q_proj` is a part of `qkv_proj`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if path in modules:
        return modules[path], None
    above, _, last = path.rpartition(".")
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        module = modules.get(f"{above}.{fused}")
        sizes = getattr(module, "output_sizes", None)
        if module is not None and last in parts and sizes is not None and len(sizes) == len(parts):
            start = sum(sizes[: parts.index(last)])
            return module, slice(start, start + sizes[parts.index(last)])
    return None, None


def _multiplies(module: Any) -> bool:
    """Whether it is a plain linear layer or head; quantised ones do not hold the numbers they were sent."""
    looked_up = type(module).__name__ == "VocabParallelEmbedding"
    return not looked_up and type(getattr(module, "quant_method", None)).__name__.startswith("Unquantized")

"""What the engine is sent of a model, name by name: what its checkpoint holds, and a tied output head too.

Transformers renames, joins and stacks weights when it loads them (the experts of a mixture, the parts of a model that
sees); the engine and every checkpoint know them as they are on the disk. Owns the way back for tensors that arrive one
by one, the buffers that are part of a checkpoint, the tied head's own name, and the manifest of what a stream will
hold. Parameters and their names are TRL's, gathering and sending are the trainer's: `trl_compat` calls this.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from harness_trainer.errors import SetupError
from harness_trainer.learner.nccl_transfer import Manifest
from harness_trainer.learner.sharded_state import whole

Named = tuple[str, torch.Tensor]


class SentWeights:
    """The stream of one model, which is described once and sent many times, in the same order."""

    def __init__(self, model: Any, parameters: Iterable[Named], on_disk: Collection[str]) -> None:
        """Before sharding. `parameters` by TRL's names; `on_disk` the names in the checkpoint that the engine loaded.

        Raises SetupError when the checkpoint's tensors cannot be made from the model's one after the other.
        """
        loaded = _loaded(model)
        self._tied_head = _tied_head(model)
        shapes = {name: _shape_of(tensor) for name, tensor in parameters}
        buffers = ((name, _shape_of(tensor)) for name, tensor in _persistent_buffers(loaded))
        # The engine refuses a name that it does not know; a buffer that the checkpoint lacks never changes anyway.
        self._buffers = {
            name: shape
            for name, shape in buffers
            if all(saved in on_disk for saved in revert_weight_conversion(loaded, {name: shape}))
        }
        self._shapes = shapes
        self._together = _together(loaded, {**shapes, **self._buffers})

    def stream(self, model: Any, parameters: Iterable[Named]) -> Iterator[Named]:
        """The checkpoint's tensors, made of gathered `parameters` as these come; a tied head may be sharded."""
        buffers = ((n, whole(b)) for n, b in _persistent_buffers(_loaded(model)) if n in self._buffers)
        return self._with_tied_head(model, self._as_saved(model, itertools.chain(parameters, buffers)))

    def manifest(self, model: Any) -> Manifest:
        """Of what `stream` will give; nothing is gathered or copied for it."""
        shapes = itertools.chain(self._shapes.items(), self._buffers.items())
        return manifest(self._with_tied_head(model, self._as_saved(model, shapes)))

    def _with_tied_head(self, model: Any, named: Iterable[Named]) -> Iterator[Named]:
        """`named`, then the head that shares the embedding's weight: an engine may keep a packed copy of it."""
        names = set()
        for name, tensor in named:
            names.add(name)
            yield name, tensor
        if self._tied_head is not None and self._tied_head not in names:
            yield self._tied_head, model.get_output_embeddings().weight

    def _as_saved(self, model: Any, named: Iterable[Named]) -> Iterator[Named]:
        loaded, waiting = _loaded(model), dict[str, dict[str, torch.Tensor]]()
        for name, tensor in named:
            first, number = self._together[name]
            parts = waiting.setdefault(first, {})
            parts[name] = tensor
            if len(parts) == number:
                yield from revert_weight_conversion(loaded, waiting.pop(first)).items()


def manifest(named: Iterable[Named]) -> Manifest:
    """Of what will be sent; a sharded tensor has the shape of the whole, so nothing is gathered for it."""
    tensors = dict(named)
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def _together(loaded: Any, shapes: dict[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """For each tensor in memory those that make the same tensors on the disk: the first one's name, and how many.

    Nearly always each is alone. Where a checkpoint holds one matrix for several (`query_key_value`), all of them give
    its name when each is converted by itself.
    """
    try:
        saved = {name: set(revert_weight_conversion(loaded, {name: shape})) for name, shape in shapes.items()}
        first_with: dict[str, str] = {}
        first = {name: next(first_with.setdefault(one, name) for one in sorted(made)) for name, made in saved.items()}
        members: dict[str, dict[str, torch.Tensor]] = {}
        for name, leader in first.items():
            members.setdefault(leader, {})[name] = shapes[name]
        made_in_parts = {
            name: tuple(tensor.shape)
            for parts in members.values()
            for name, tensor in revert_weight_conversion(loaded, parts).items()
        }
        made_at_once = {name: tuple(t.shape) for name, t in revert_weight_conversion(loaded, shapes).items()}
    except Exception as error:  # a conversion of Transformers that one tensor, or one without numbers, breaks
        raise SetupError(f"the weights of this model cannot be sent one by one ({error}): {_ADVICE}") from error
    if made_in_parts != made_at_once:
        differing = sorted(made_in_parts.items() ^ made_at_once.items())[0][0]
        raise SetupError(f"the weights of this model cannot be sent one by one, e.g. {differing!r}: {_ADVICE}")
    return {name: (leader, len(members[leader])) for name, leader in first.items()}


_ADVICE = "use weight_sync lora, or another model"


def _loaded(model: Any) -> Any:
    """The model that Transformers loaded, under an adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _persistent_buffers(loaded: Any) -> Iterator[Named]:
    """What a checkpoint holds beside parameters, e.g. `gate.e_score_correction_bias`."""
    kept = loaded.state_dict().keys()
    for name, buffer in loaded.named_buffers():
        name = name.replace("_checkpoint_wrapped_module.", "")
        if name in kept:
            yield name.replace(".base_layer", ""), buffer


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A stand-in without numbers, of the whole where the tensor is sharded."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _tied_head(model: Any) -> str | None:
    """Name of an output head that shares the embedding's weight; None = it has a weight of its own, or there is none.

    The weights are asked: where a model that sees says it in its config, and whether it means it, differs by family.
    """
    head = model.get_output_embeddings()
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return None
    name = next(f"{name}.weight" for name, module in model.named_modules() if module is head)
    return name.removeprefix("base_model.model.")

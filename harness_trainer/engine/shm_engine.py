"""Weight transfer by file, on the engine's side: the trainer writes a safetensors file, every worker loads it.

Owns checking the file, loading it into the live model, and leaving the model whole whatever goes wrong. Does not own
the file: the trainer's `learner.weight_transfer` writes and removes it. vLLM builds the class when `vllm_plugin` has
registered it; it runs inside vLLM's workers, where only the standard library, vLLM, torch and safetensors exist
(and `digests`, which needs no more).

An update is `start_weight_update` / `update_weights({"path", "names"})` / `finish_weight_update`. All work is done in
the middle call, so that an update that a dying trainer left half open holds a whole model and is closed by a bare
`finish_weight_update`. Error texts say whether the weights are unchanged: `WEIGHTS_UNCHANGED` is part of the protocol.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from harness_trainer.engine.digests import Sample, sample_names, take_sample

WEIGHTS_UNCHANGED = "the weights are unchanged"
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


class WeightFileError(ValueError):
    """The file does not fit the model; nothing was loaded."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"weight update refused: {reason}; {WEIGHTS_UNCHANGED}")


@dataclass
class ShmInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One whole update. Example: {"path": "/dev/shm/ht-1a2b.safetensors", "names": ["model.norm.weight", ...]}.

    `names` is what the trainer meant to send; a file that holds anything else is refused.
    """

    path: str
    names: list[str]


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):  # type: ignore[misc]
    """Loads checkpoint-format weights from a file into a running model; packed CPU layers and tied heads included."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: dict[
            str, Sample
        ] = {}  # of the latest update, as read from the file; `worker_extension` reads it

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to join: the file is the whole channel."""

    def start_weight_update(self) -> None:
        """Nothing yet: the model stays whole until the file has been checked."""

    def finish_weight_update(self) -> None:
        """Nothing left to do; also what closes an update that was never sent."""

    def shutdown(self) -> None:
        """No connection to release."""

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Check the file, then load it.

        Raises WeightFileError before anything was touched, RuntimeError when loading itself failed and the model may
        hold weights of both policies until a later update succeeds.
        """
        with _open(update_info.path) as file:
            self._check(file, update_info.names)
            self.received = {name: take_sample(file.get_tensor(name)) for name in sample_names(file.keys())}
            try:
                self._load(file)
            except Exception as error:
                raise RuntimeError(
                    f"weight update failed while loading: {error}; the engine may hold weights of two policies until "
                    "a whole update succeeds"
                ) from error

    def _check(self, file: Any, sent: list[str]) -> None:
        held = set(file.keys())
        if held != set(sent):
            differing = sorted(held ^ set(sent))
            raise WeightFileError(
                f"the file holds {len(held)} tensors where {len(set(sent))} were announced, e.g. {differing[0]!r}"
            )
        # Frozen parameters are never sent, so a name may be missing; one that the checkpoint does not know is a
        # model of another kind.
        expected = _checkpoint_shapes(Path(self.model_config.model))
        # The trainer knows of its own weights whether the head is tied; here only configs tell, which may leave it out.
        has_no_head = self._tied or not any(name.endswith(_HEAD) for name in expected)
        for name in sorted(held) if expected else []:
            shape = list(file.get_slice(name).get_shape())
            if name not in expected and not (name == _HEAD and has_no_head):
                raise WeightFileError(f"the model has no weight named {name!r}")
            if shape != expected.get(name, shape):
                raise WeightFileError(f"{name!r} has shape {shape}, the model's is {expected[name]}")

    def _load(self, file: Any) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        # CPU linear layers keep only a packed copy; the layerwise reload gives them back loadable weights meanwhile.
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(self._weights(file))
            incomplete = _partly_loaded(self.model)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        if incomplete:
            raise ValueError(f"{incomplete[0]} received only a part of its weights")
        self._check_head(file)

    def _weights(self, file: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The file's tensors, plus the head of a tied model, which the trainer has no name for.

        The engine packs its own copy of a tied head, so the embedding's new values would never reach it.
        """
        names = list(file.keys())
        without_head = self._tied and not any(name.endswith(_HEAD) for name in names)
        for name in names:
            tensor = file.get_tensor(name).to(self.device)
            yield name, tensor
            if name.endswith(_EMBEDDING) and without_head:
                yield _HEAD, tensor

    @property
    def _tied(self) -> bool:
        # Of a model that sees, either config may say so, while the other one has its default.
        configs = (self.model_config.hf_text_config, self.model_config.hf_config)
        return any(getattr(config, "tie_word_embeddings", False) for config in configs)

    def _check_head(self, file: Any) -> None:
        """Multiply by the head the sampler will use and by the head that was sent: a stale packed copy shows here."""
        head: Any = getattr(self.model, "lm_head", None)
        names = list(file.keys())
        name = _HEAD if _HEAD in names else next((n for n in names if self._tied and n.endswith(_EMBEDDING)), None)
        if (
            name is None
            or getattr(head, "quant_method", None) is None
            or self.parallel_config.tensor_parallel_size != 1
        ):
            return
        sent = file.get_tensor(name).to(self.device)
        dtype = self.model_config.dtype
        probe = torch.linspace(-1.0, 1.0, sent.shape[1], device=self.device, dtype=dtype).unsqueeze(0)
        with torch.inference_mode():
            got = head.quant_method.apply(head, probe)[0, : sent.shape[0]].float()
            want = (probe @ sent.to(dtype).T)[0].float()
        scale = want.abs().max().clamp(min=1e-6)
        difference = ((got - want).abs().max() / scale).item()
        if not difference < (1e-3 if dtype == torch.float32 else 5e-2):
            raise ValueError(f"the output head did not take the new weights (relative difference {difference:.2g})")


def _open(path: str) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise WeightFileError(f"{path} does not exist on the engine's machine") from None
    except Exception as error:  # safetensors raises its own type for every kind of broken file
        raise WeightFileError(f"{path} is no complete safetensors file ({error})") from None


def _checkpoint_shapes(folder: Path) -> dict[str, list[int]]:
    """Name to shape in the checkpoint the engine was started from; {} when that is no local safetensors folder."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        with file.open("rb") as stream:
            header = json.loads(os.read(stream.fileno(), int.from_bytes(os.read(stream.fileno(), 8), "little")))
        header.pop("__metadata__", None)
        shapes.update({name: entry["shape"] for name, entry in header.items()})
    return shapes


def _partly_loaded(model: torch.nn.Module) -> list[str]:
    """Layers that got some of their elements but not all: they would be finished with uninitialised memory."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    partly = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0):
            partly.append(name)
    return partly

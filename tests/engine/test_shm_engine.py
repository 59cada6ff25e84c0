"""What of a weight file the engine's side takes and adds, without an engine: vLLM's base classes are stood in for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

NAMES = ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo")
EMBEDDING = {"model.embed_tokens.weight": torch.ones(2, 2)}
HEAD = {"lm_head.weight": torch.ones(2, 2)}


@pytest.fixture
def shm_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    base = ModuleType("base")
    for name in NAMES:
        setattr(base, name, type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)}))
    parts = ["vllm", "distributed", "weight_transfer", "base"]
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    monkeypatch.setitem(sys.modules, ".".join(parts), base)
    name = "harness_trainer.engine.shm_engine"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)


def engine_of(module: Any, folder: Path, text: dict[str, Any], whole: dict[str, Any]) -> Any:
    engine = object.__new__(module.ShmWeightTransferEngine)
    engine.device = "cpu"
    configs = {"hf_text_config": SimpleNamespace(**text), "hf_config": SimpleNamespace(**whole)}
    engine.model_config = SimpleNamespace(model=str(folder), **configs)
    return engine


def taken(engine: Any, module: Any, weights: dict[str, torch.Tensor], path: Path) -> list[str]:
    save_file(weights, path)
    with safe_open(path, "pt") as file:
        engine._check(file, list(weights))
        return [name for name, _ in engine._weights(file)]


SAYS, DENIES = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


@pytest.mark.parametrize(("text", "whole"), [(SAYS, DENIES), (DENIES, SAYS), ({}, SAYS), (SAYS, {})])
def test_either_config_may_say_that_the_head_is_tied(
    shm_engine: Any, tmp_path: Path, text: dict[str, Any], whole: dict[str, Any]
) -> None:
    save_file(EMBEDDING, tmp_path / "model.safetensors")
    engine = engine_of(shm_engine, tmp_path, text, whole)
    assert set(taken(engine, shm_engine, EMBEDDING, tmp_path / "sent")) == {*EMBEDDING, *HEAD}


def test_a_head_that_the_checkpoint_has_not_is_taken_and_one_of_another_name_is_not(
    shm_engine: Any, tmp_path: Path
) -> None:
    save_file(EMBEDDING, tmp_path / "model.safetensors")
    engine = engine_of(shm_engine, tmp_path, DENIES, DENIES)
    assert set(taken(engine, shm_engine, EMBEDDING, tmp_path / "sent")) == set(EMBEDDING)
    assert set(taken(engine, shm_engine, {**EMBEDDING, **HEAD}, tmp_path / "sent")) == {*EMBEDDING, *HEAD}
    save_file({**EMBEDDING, "language_model.lm_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(shm_engine.WeightFileError, match="no weight named 'lm_head.weight'"):
        taken(engine, shm_engine, {**EMBEDDING, **HEAD}, tmp_path / "sent")

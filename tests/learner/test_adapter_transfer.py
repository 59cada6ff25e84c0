"""LoRA: adapters reach the engine by name, old ones are taken back when no call uses them, and training continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stub_engine import StubEngine, serving
from test_train import Run
from transformers import AutoModelForCausalLM

from harness_trainer.errors import ConfigError, TrainingFailed
from harness_trainer.learner.adapter_transfer import AdapterTransfer
from harness_trainer.learner.checkpoints import last_checkpoint
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.sync_config import LoraConfig
from harness_trainer.learner.transfers import make_transfer

LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "up_proj"]}


@dataclass
class AdapterEngine(StubEngine):
    """vLLM's adapter endpoints. `busy` are the adapters that calls are using."""

    adapters: dict[str, str] = field(default_factory=dict)
    weights: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    busy: list[str] = field(default_factory=list)

    def _behave(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "v1/load_lora_adapter":
            name, folder = body["lora_name"], Path(body["lora_path"])
            if name in self.adapters:
                return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
            json.loads((folder / "adapter_config.json").read_text())
            self.weights[name] = load_file(folder / "adapter_model.safetensors")
            self.adapters[name] = str(folder)
            return 200, b"Success: LoRA adapter added successfully."
        if path == "v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, b"Success: removed."
        if path == "v1/models":
            own = [{"id": "tiny", "parent": None, "root": "/model"}, {"id": "other", "parent": "tiny", "root": "/x"}]
            return 200, {"data": own + [{"id": n, "parent": "tiny", "root": r} for n, r in self.adapters.items()]}
        if path == "metrics":
            line = 'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{}",waiting_lora_adapters=""}} {}'
            return 200, "\n".join([line.format("v1", 1.7e9), line.format(",".join(self.busy), 1.8e9)]).encode()
        return super()._behave(path, body)


@pytest.fixture
def engine() -> Iterator[AdapterEngine]:
    engine = AdapterEngine()
    with serving(engine):
        yield engine


@pytest.fixture
def transfer(engine: AdapterEngine, tmp_path: Path) -> Iterator[AdapterTransfer]:
    transfer = AdapterTransfer(engine.url, directory=tmp_path / "shm", control_timeout_s=1.5, load_timeout_s=1.5)
    transfer.init_weight_transfer()
    yield transfer
    transfer.destroy()


def publish(transfer: AdapterTransfer, version: int) -> None:
    folder = transfer.folder_of(version)
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    from safetensors.torch import save_file

    save_file({"a": torch.full((2,), float(version))}, folder / "adapter_model.safetensors")
    transfer.next_version(version)
    transfer.publish(version)


def test_each_version_is_served_by_its_name_and_the_engine_never_pauses(
    engine: AdapterEngine, transfer: AdapterTransfer
) -> None:
    publish(transfer, 1)
    publish(transfer, 2)
    assert list(engine.adapters) == ["v1", "v2"]
    assert engine.weights["v2"]["a"].tolist() == [2.0, 2.0]
    assert "pause" not in engine.calls


def test_an_old_adapter_goes_when_no_call_uses_it_and_its_files_one_version_later(
    engine: AdapterEngine, transfer: AdapterTransfer
) -> None:
    engine.busy = ["v1", "v2"]
    for version in (1, 2, 3, 4):
        publish(transfer, version)
    assert list(engine.adapters) == ["v1", "v2", "v3", "v4"]
    engine.busy = ["v2"]
    publish(transfer, 5)
    assert list(engine.adapters) == ["v2", "v4", "v5"]
    assert transfer.folder_of(1).is_dir()
    publish(transfer, 6)
    assert list(engine.adapters) == ["v2", "v5", "v6"]
    assert not transfer.folder_of(1).exists() and transfer.folder_of(2).is_dir()


def test_an_engine_that_was_started_again_gets_the_newest_adapter_again_by_its_name(
    engine: AdapterEngine, transfer: AdapterTransfer
) -> None:
    publish(transfer, 1)
    publish(transfer, 2)
    engine.adapters.clear()
    engine.weights.clear()
    transfer.init_weight_transfer()
    transfer.next_version(2)
    transfer.publish(2)
    assert list(engine.adapters) == ["v2"], "no call can ask for an older one"
    assert engine.weights["v2"]["a"][0] == 2
    publish(transfer, 3)
    assert list(engine.adapters) == ["v2", "v3"]


@pytest.mark.parametrize(
    ("path", "fault", "text"),
    [
        ("v1/load_lora_adapter", (404, {"detail": "Not Found"}), "Not Found.*--enable-lora"),
        ("v1/load_lora_adapter", (400, {"error": {"message": "rank 64 > max 16"}}), "adapter v1 failed.*rank 64"),
        ("v1/load_lora_adapter", "hang", r"did not answer /v1/load_lora_adapter within 1\.5 s"),
        ("v1/models", (200, {"data": []}), "does not serve adapter v1"),
    ],
)
def test_an_adapter_that_is_not_served_is_an_error_with_the_engines_text(
    engine: AdapterEngine, transfer: AdapterTransfer, path: str, fault: Any, text: str
) -> None:
    engine.faults[path] = [fault]
    with pytest.raises(TrainingFailed, match=text):
        publish(transfer, 1)


def test_what_cannot_be_unloaded_stays_until_the_next_version(
    engine: AdapterEngine, transfer: AdapterTransfer, caplog: pytest.LogCaptureFixture
) -> None:
    publish(transfer, 1)
    publish(transfer, 2)
    engine.faults["v1/unload_lora_adapter"] = [(500, {"error": "busy"})]
    publish(transfer, 3)
    assert "old adapters stay loaded" in caplog.text and "v1" in engine.adapters
    publish(transfer, 4)
    assert list(engine.adapters) == ["v3", "v4"]


def run_lora(tiny_model: Path, folder: Path, engine: AdapterEngine, **options: Any) -> Run:
    run = Run(tiny_model, folder / "checkpoints")
    run.transfer = AdapterTransfer(engine.url, directory=folder / "shm")
    run.source.policy_changed = run.source.versions.append  # its model stays the base: the adapter starts as nothing
    return run.go(lora=LoraConfig(**LORA), weight_sync={"type": "lora"}, save_steps=1, **options)


def test_an_adapter_is_trained_published_saved_and_continued(
    tiny_model: Path, tmp_path: Path, engine: AdapterEngine
) -> None:
    run = run_lora(tiny_model, tmp_path, engine, max_steps=2)
    assert run.source.versions == [1, 2, 3] and sorted(engine.weights) == ["v1", "v2", "v3"]
    assert run.reports[0].ratio_mean == pytest.approx(1.0, abs=1e-4)
    factors = {name.split(".self_attn.")[-1].split(".mlp.")[-1] for name in engine.weights["v1"]}
    assert factors == {f"{target}.lora_{x}.weight" for target in LORA["targets"] for x in "AB"}
    assert all(not tensor.any() for name, tensor in engine.weights["v1"].items() if "lora_B" in name)
    assert any(tensor.any() for name, tensor in engine.weights["v2"].items() if "lora_B" in name)
    checkpoint = last_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.name == "checkpoint-2"
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in engine.weights["v3"].items())

    continued = run_lora(tiny_model, tmp_path, engine, max_steps=3, resume_from=checkpoint, base_version=5)
    assert continued.source.versions == [6, 7]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in engine.weights["v6"].items())


def test_with_another_transfer_the_merged_weights_go_to_the_engine_by_their_own_names(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = Run(tiny_model, tmp_path).go(lora=LoraConfig(**LORA), max_steps=2, save_steps=1)
    base = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert set(run.transfer.weights) == set(base)  # the tied head included
    changed = {name.split(".")[-2] for name in base if not torch.equal(base[name], run.transfer.weights[name])}
    assert changed == set(LORA["targets"])
    assert [report.ratio_mean for report in run.reports] == pytest.approx([1.0, 1.0], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "Shm"),
        ({"weight_sync": {"type": "nccl"}}, "Nccl"),
        ({"weight_sync": {"type": "lora"}, "lora": LORA}, "Adapter"),
    ],
)
def test_the_config_chooses_the_transfer(tmp_path: Path, settings: dict[str, Any], kind: str) -> None:
    config = LearnerConfig.model_validate(settings)
    make: Callable[..., Any] = make_transfer
    transfer = make(config, "http://127.0.0.1:1", directory=tmp_path, keep_weights=None, announce=print)
    assert type(transfer).__name__.startswith(kind)
    transfer.compare_next()
    transfer.destroy()
    if kind != "Shm":
        with pytest.raises(ConfigError, match="keep_weights"):
            make(config, "http://127.0.0.1:1", directory=tmp_path, keep_weights=tmp_path, announce=print)


def test_an_adapter_to_send_must_be_one_to_train() -> None:
    with pytest.raises(ValueError, match="learner.lora"):
        LearnerConfig.model_validate({"weight_sync": {"type": "lora"}})


def test_a_rank_is_served_with_the_next_one_that_vllm_knows() -> None:
    assert [LoraConfig(rank=rank).served_rank for rank in (1, 4, 16, 100, 512)] == [1, 8, 16, 128, 512]

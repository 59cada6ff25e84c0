"""The transfer as the learner process makes it: compared when a person asks; what it falls back on is cleaned."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stub_engine import StubEngine, serving

from harness_trainer.learner.__main__ import LearnerSpec, _go_on, _transfer
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.rollouts.store import RolloutStore

if TYPE_CHECKING:
    from harness_trainer.learner.__main__ import Transfer

WEIGHTS = {"model.norm.weight": torch.ones(3)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    store = RolloutStore(tmp_path / "store.sqlite")
    yield store
    store.close()


@pytest.fixture
def engine() -> Iterator[StubEngine]:
    with serving(StubEngine()) as engine:
        yield engine


def spec(run: Path, **changes: Any) -> LearnerSpec:
    return LearnerSpec(
        config=LearnerConfig(**{"verify_sync": "never", **changes}), model_path=run, store=run / "store.sqlite",
        checkpoints=run / "checkpoints", metrics=run / "metrics.jsonl", engine_url_file=run / "url",
        transfer_dir=run / "no such folder", keep_weights=None, temperature=1.0, starved_after_s=60,
    )  # fmt: skip


def made(run: Path, store: RolloutStore, engine: StubEngine, **changes: Any) -> Transfer:
    presence: Any = SimpleNamespace(reach=lambda: engine.url)
    return _transfer(spec(run, **changes), store, presence)


def send(transfer: Transfer, version: int) -> None:
    transfer.next_version(version)
    transfer.pause()
    transfer.send_weights(iter(WEIGHTS.items()))
    transfer.resume()


def test_a_file_in_the_run_folder_has_the_next_update_compared(
    tmp_path: Path, store: RolloutStore, engine: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "harness_trainer")
    transfer = made(tmp_path, store, engine)
    send(transfer, 1)
    assert "collective_rpc" not in engine.calls
    (tmp_path / "verify-now").touch()
    send(transfer, 2)
    send(transfer, 3)
    assert engine.calls.count("collective_rpc") == 1 and not (tmp_path / "verify-now").exists()
    assert "weights compared with the engine's: {'loaded': 1}" in caplog.text


def test_weights_that_memory_has_no_room_for_go_where_the_next_start_cleans(
    tmp_path: Path, store: RolloutStore, engine: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = made(tmp_path, store, engine)
    send(transfer, 1)
    assert engine.version == "v1" and f"using {tmp_path / 'internal'}" in caplog.text
    left = tmp_path / "internal" / "weights-0123456789abcdef.safetensors"  # by one that was killed
    left.touch()
    other = tmp_path / "internal" / "learner.json"
    other.touch()
    _go_on(spec(tmp_path), store)
    assert not left.exists() and other.exists()

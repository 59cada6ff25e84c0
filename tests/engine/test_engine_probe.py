"""The capability probe accepts the engine that we start."""

from __future__ import annotations

from typing import Any

from harness_trainer.engine.check import require_trainable


def test_the_engine_we_start_can_be_trained_from(tiny_engine: Any) -> None:
    capabilities = require_trainable(tiny_engine.base_url)
    assert capabilities.trainable
    assert capabilities.missing == []
    assert capabilities.model == tiny_engine.model.model_id
    assert capabilities.max_model_len == 4096

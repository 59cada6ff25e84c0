"""One real vLLM per kind of embedding for the whole session, on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import ModelInfo
from harness_trainer.errors import SetupError


@dataclass(frozen=True, slots=True)
class TinyEngine:
    """A running engine. `base_url` e.g. "http://127.0.0.1:40123"; the model folder holds the tokenizer too."""

    base_url: str
    model: ModelInfo
    log_path: Path

    @property
    def model_path(self) -> Path:
        return self.model.path

    @property
    def tokenizer_path(self) -> Path:
        return self.model.path


@pytest.fixture(scope="session")
def engine_environment() -> None:
    try:
        find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(("llama", True), id="tied", marks=pytest.mark.engine),
        pytest.param(("qwen3", False), id="untied", marks=pytest.mark.engine),
    ],
)
def tiny_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine_environment: None
) -> Iterator[TinyEngine]:
    family, tied = request.param
    folder = tmp_path_factory.mktemp("engine")
    model = make_tiny_model(folder / "model", family=family, tied=tied)
    config = EngineConfig(kv_cache_gib=0.25, cpu_threads=1)
    engine = Engine(config, model=model, log_path=folder / "engine.log", registry=folder / "owned")
    with engine:
        yield TinyEngine(engine.base_url, model, folder / "engine.log")

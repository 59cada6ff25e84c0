"""A real model as the player: vLLM, started for the qualification and ended after it. Called by `cli.qualify`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from capture_proxy.engines.vllm import VllmEngine
from harness_trainer.cache import cache_dir
from harness_trainer.engine.check import require_trainable
from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import prepare_model
from harness_trainer.qualify.bench import Setting, with_model

_DEFAULT_WINDOW = 8192  # tokens, where the engine does not say


@asynccontextmanager
async def playing(setting: Setting, model: str, say: Callable[[str], None]) -> AsyncIterator[Setting]:
    """The setting with the model in it. Raises ConfigError, SetupError, EngineFailed."""
    prepared = await asyncio.to_thread(prepare_model, model, cache_dir(), progress=say)
    engine = Engine(
        EngineConfig(),
        model=prepared,
        log_path=setting.logs / "engine.log",
        registry=setting.registry,
        run_id=setting.run_id,
    )
    try:
        url = await asyncio.to_thread(engine.start, say)
        capabilities = await asyncio.to_thread(require_trainable, url)
        say(f"engine at {url}: {capabilities.model}, window {capabilities.max_model_len} tokens")
        window = capabilities.max_model_len or _DEFAULT_WINDOW
        yield with_model(setting, lambda: VllmEngine(url, model=capabilities.model), capabilities.model, window)
    finally:
        await asyncio.to_thread(engine.stop)

"""A real model as the player: vLLM and a learner beside it, started for the qualification and ended after it.

Owns which parts there are and their order. What one step takes is `step`'s. Called by `cli.qualify`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.rendering import Bridging
from harness_trainer.cache import cache_dir
from harness_trainer.engine.check import require_trainable
from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import prepare_model
from harness_trainer.qualify.bench import Setting, with_model
from harness_trainer.qualify.step import learner_for
from harness_trainer.rundir import write_atomically

_DEFAULT_WINDOW = 8192  # tokens, where neither the engine nor the model says


@asynccontextmanager
async def playing(setting: Setting, model: str, say: Callable[[str], None]) -> AsyncIterator[Setting]:
    """The setting with the model in it. Raises ConfigError, SetupError, EngineFailed, TrainingFailed."""
    prepared = await asyncio.to_thread(prepare_model, model, cache_dir(), progress=say)
    engine = Engine(
        EngineConfig(),
        model=prepared,
        log_path=setting.logs / "engine.log",
        registry=setting.registry,
        run_id=setting.run_id,
    )
    url_file = (setting.logs / "engine_url").absolute()
    url_file.unlink(missing_ok=True)
    window = prepared.max_len or _DEFAULT_WINDOW
    # The learner first, because it imports for ten seconds while the engine loads.
    async with learner_for(
        prepared, window, setting.logs / "learner", url_file, setting.registry, setting.run_id
    ) as learner:
        try:
            url = await asyncio.to_thread(engine.start, say)
            capabilities = await asyncio.to_thread(require_trainable, url)
            say(f"engine at {url}: {capabilities.model}, window {capabilities.max_model_len} tokens")
            write_atomically(url_file, url)
            await learner.ready()
            yield with_model(
                setting,
                lambda: VllmEngine(url, transport="generate", model=capabilities.model),
                capabilities.model,
                capabilities.max_model_len or window,
                Bridging(tokenizer=prepared.path),
                learner.step,
            )
        finally:
            await asyncio.shield(asyncio.to_thread(engine.stop))

"""`harness-trainer serve engine|gateway`: one part alone, in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="harness-trainer serve")
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("engine", add_help=False, help="vLLM with every flag that capture and weight updates need")
    parts.add_parser("gateway", add_help=False, help="the capture proxy between agents and an engine")
    part = parser.parse_args(list(argv[:1])).part
    return _engine(argv[1:]) if part == "engine" else _gateway(argv[1:])


def _engine(argv: Sequence[str]) -> int:
    from harness_trainer.cache import cache_dir
    from harness_trainer.cli.flags import add_flags, resolve
    from harness_trainer.display import Display
    from harness_trainer.engine.check import require_trainable
    from harness_trainer.engine.config import EngineConfig
    from harness_trainer.engine.launch import Engine
    from harness_trainer.engine.prepare import prepare_model
    from harness_trainer.errors import ConfigError
    from sandboxes.lifecycle import default_registry, reap

    usage = "harness-trainer serve engine [options]"
    parser = argparse.ArgumentParser(prog="harness-trainer serve engine", usage=usage)
    parser.add_argument("--model", default="smollm2", help="smollm2, a Hugging Face id, or a model folder")
    parser.add_argument("--log", type=Path, default=Path("engine.log"), help="file for the engine's own log")
    parser.add_argument("--config", type=Path, help="YAML file with any of the settings below")
    add_flags(parser, EngineConfig, {"port": 8000})
    options = parser.parse_args(argv)
    config = resolve(EngineConfig, options, {"port": 8000}, options.config)
    if config.replicas > 1:
        raise ConfigError(
            "replicas are of a run (`train --engine.replicas`): here, start each with a --port of its own"
        )
    registry = default_registry()
    with Display() as display:
        reap(registry)
        model = prepare_model(options.model, cache_dir(), progress=display.phase)
        engine = Engine(config, model=model, log_path=options.log, registry=registry)
        try:
            url = engine.start(progress=lambda text: display.status(f"engine: {text}"))
            capabilities = require_trainable(url)
            display.phase(f"engine at {url}: {capabilities.model}, window {capabilities.max_model_len} tokens")
            code = engine.process.wait()
        finally:
            engine.stop()
    return code or 0


def _gateway(argv: Sequence[str]) -> int:
    """The gateway is a program of its own, without our heavier imports: become it."""
    os.execv(sys.executable, [sys.executable, "-m", "capture_proxy", *argv])

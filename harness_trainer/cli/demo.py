"""`harness-trainer demo`: the whole loop on this machine with settings that need nothing and end in minutes.

Owns the preset only: SmolLM2-135M inside opencode on the example tasks. Every flag of `train` works here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness_trainer.cli.train import run_with_preset

PRESET: dict[str, Any] = {
    "model": "smollm2",
    "tasks": "examples",
    "harness": "opencode-small",
    "sandbox": {"type": "local"},
    "rollouts": {"group_size": 6, "max_concurrent": 4, "max_turns": 4, "max_tokens": 64, "timeout_s": 240},
    "learner": {"max_steps": 5, "groups_per_step": 1, "token_budget": 4096, "save_steps": 1},
    "engine": {"max_model_len": 4096},
}


def run(argv: Sequence[str]) -> int:
    return run_with_preset(argv, name="demo", preset=PRESET, default_run_dir="runs/demo")

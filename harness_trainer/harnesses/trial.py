"""Tries an adapter out before there is a rollout, so that what every rollout would fail of is told when it is loaded.

Called by `load_harness`; whether the agent can be installed and starts, `install` finds out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from harness_trainer.errors import ConfigError
from harness_trainer.harnesses.base import PLACEHOLDERS, Harness, NpmInstall, render, render_env, render_files

TYPICAL: Mapping[str, str | int] = {
    name: 1000 if name in ("context", "max_tokens", "max_turns") else name for name in PLACEHOLDERS
}


def try_rendering(harness: Harness) -> None:
    """Fill in everything once. Raises ConfigError."""
    options = {} if harness.harbor is None else harness.harbor.options
    try:
        render([*harness.argv, harness.stdin], TYPICAL)
        render_env(harness, TYPICAL)
        render_files(harness, TYPICAL)
        json.dumps(render(options, TYPICAL))
    except TypeError as error:  # YAML has dates and more
        raise ConfigError(f"env_json, files and Harbor's options must be data that JSON has: {error}") from error
    if isinstance(harness.install, NpmInstall):
        render(harness.install.env, {"bin": TYPICAL["bin"]})

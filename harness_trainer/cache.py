"""Where slow things are kept between runs (prepared models, installed agents). Owns the folder's place only."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$HARNESS_TRAINER_CACHE`, else `$XDG_CACHE_HOME/harness-trainer`, else `~/.cache/harness-trainer`."""
    own = os.environ.get("HARNESS_TRAINER_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness-trainer"

"""Experiment trackers by name: what each needs installed. Owns the check at the start of a run, no tracking.

Transformers' integrations do the tracking. The supervisor calls `require_trackers` before anything slow is started.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence

from harness_trainer.errors import ConfigError, SetupError

# Name for `learner.report_to` (Transformers' own) -> modules of which one is enough; the first is also what to install.
TRACKERS = {
    "clearml": ("clearml",),
    "comet_ml": ("comet_ml",),
    "dvclive": ("dvclive",),
    "mlflow": ("mlflow",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


def is_installed(module: str) -> bool:
    """Whether it could be imported here, without importing it."""
    return importlib.util.find_spec(module) is not None


def require_trackers(names: Sequence[str], installed: Callable[[str], bool] = is_installed) -> None:
    """Raises ConfigError for a name that is none, SetupError with the install command for what is not installed."""
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ConfigError(
            f"learner.report_to: {', '.join(unknown)} is no tracker that can be used here, choose from"
            f" {', '.join(TRACKERS)} (metrics.jsonl is always written)"
        )
    missing = [TRACKERS[name][0] for name in names if not any(map(installed, TRACKERS[name]))]
    if missing:
        raise SetupError(
            f"learner.report_to names {', '.join(missing)}, which is not installed: run"
            f" `{sys.executable} -m pip install {' '.join(missing)}`, or leave it out"
        )

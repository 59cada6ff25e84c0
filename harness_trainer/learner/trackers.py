"""Experiment trackers by name: what each needs installed, and that a continued run goes on in the same tracker run.

Owns the check at the start of a run, and what a tracker is told of the run's identity; no tracking: Transformers'
integrations do that. The supervisor calls `require_trackers` before anything slow is started, the learner process
`go_on` before it builds its trainer.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import secrets
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.rollouts.store import RolloutStore

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
# The releases that are tested; our package's extra `trackers` pins the same.
TESTED = {"tensorboard": "2.21.0", "trackio": "0.43.0", "wandb": "0.31.0"}
PROJECT = "harness-trainer"
_RUN = "tracker_run"  # run-state key: the run's name for trackers


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
        pins = [f"{name}=={TESTED[name]}" if name in TESTED else name for name in missing]
        raise SetupError(
            f"learner.report_to names {', '.join(missing)}, which is not installed: run"
            f" `{sys.executable} -m pip install {' '.join(pins)}`, or leave it out"
        )


def go_on(
    names: Sequence[str],
    store: RolloutStore,
    folder: Path,
    *,
    after_step: int,
    environ: MutableMapping[str, str] = os.environ,
) -> str:
    """The run's name for its trackers, the same at every start of the run; what they read from elsewhere is set too.

    `folder` is the run's; `after_step` the step that it goes on after. What a person has set in the environment stays.
    """
    name = store.state(_RUN)
    if name is None:  # a folder's name alone may be that of many runs, and some trackers know a run by its name
        name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', folder.name)}-{secrets.token_hex(3)}"
        store.set_state(_RUN, name)
    if "wandb" in names:
        environ.setdefault("WANDB_PROJECT", PROJECT)
        environ.setdefault("WANDB_DIR", str(folder))
        environ.setdefault("WANDB_RUN_ID", name)
        environ.setdefault("WANDB_RESUME", "allow")
    if "tensorboard" in names:
        events = Path(environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))).expanduser()
        if any(events.glob("events.out.tfevents.*")):
            _take_back(events, after_step)
    return name


def _take_back(events: Path, after_step: int) -> None:
    """Steps that are taken again replace what TensorBoard was sent of them before."""
    library = importlib.import_module("torch.utils.tensorboard" if is_installed("tensorboard") else "tensorboardX")
    library.SummaryWriter(log_dir=str(events), purge_step=after_step + 1).close()

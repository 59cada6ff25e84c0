"""What our part of a checkpoint holds, and which checkpoint of a folder a run may continue from.

A checkpoint is Transformers' folder `checkpoint-<step>` (model, optimizer, scheduler, random state, trainer state) plus
`harness_state.json` (policy version, groups, position in the tasks). The trainer state is written last, so a folder
without a readable one was cut off. Groups that are not trained yet live in the run's store, which outlives a learner;
`continuing` brings the two together. `train` and the learner process call this; nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness_trainer.errors import TrainingFailed
from harness_trainer.rundir import write_atomically

STATE_NAME = "harness_state.json"
_TRAINER_STATE = "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")
# Written before the trainer state; a save that was killed lacks at least one of them or the trainer state itself.
_PARTS = ("optimizer.pt", "scheduler.pt")
_RANDOM_STATE = "rng_state*.pth"  # one per process
# A whole model's, split or not, or an adapter's: weights and their description.
_WEIGHTS = (
    ("model.safetensors", "config.json"),
    ("model.safetensors.index.json", "config.json"),
    ("adapter_model.safetensors", "adapter_config.json"),
)


@dataclass(slots=True)
class HarnessState:
    """Example: HarnessState(step=2, policy_version=3, trained_groups={1: [0, 1], 2: [3, 2]}, next_group=6)."""

    step: int  # optimizer steps taken
    policy_version: int  # the version that was published after that step
    trained_groups: dict[int, list[int]] = field(default_factory=dict)  # group ids of each step, from step 1
    # Position in the tasks: the first group that was not opened yet. A group's id alone says which task it is of.
    next_group: int = 0
    group_counts: dict[str, int] = field(default_factory=dict)  # groups by state (running, ready, trained, dropped)


def write_state(checkpoint: Path, state: HarnessState) -> None:
    """Raises OSError when the folder cannot be written."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_atomically(checkpoint / STATE_NAME, json.dumps(asdict(state), indent=1) + "\n")


def read_state(checkpoint: Path) -> HarnessState:
    """Raises TrainingFailed when the checkpoint is not complete."""
    state = _complete_state(checkpoint)
    if state is None:
        raise TrainingFailed(f"{checkpoint} is not a complete checkpoint: remove it and run the same command again")
    return state


def last_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step below `folder`; what was cut off while saving is passed over."""
    found = []
    for path in folder.glob("checkpoint-*"):
        match = _FOLDER.fullmatch(path.name)
        state = _complete_state(path) if match else None
        if match and state is not None and state.step == int(match[1]):
            found.append((state.step, path))
    return max(found)[1] if found else None


def _complete_state(checkpoint: Path) -> HarnessState | None:
    ours, trainers = _json(checkpoint / STATE_NAME), _json(checkpoint / _TRAINER_STATE)
    if ours is None or trainers is None or trainers.get("global_step") != ours.get("step"):
        return None
    if not all((checkpoint / name).is_file() for name in _PARTS):
        return None
    if not any(all((checkpoint / name).is_file() for name in names) for names in _WEIGHTS):
        return None
    if not any(checkpoint.glob(_RANDOM_STATE)):
        return None
    try:
        groups = {int(step): [int(group) for group in ids] for step, ids in ours["trained_groups"].items()}
        counts = {str(state): int(count) for state, count in ours.get("group_counts", {}).items()}
        next_group = int(ours.get("next_group", 0))  # checkpoints of older versions lack it
        return HarnessState(int(ours["step"]), int(ours["policy_version"]), groups, next_group, counts)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None

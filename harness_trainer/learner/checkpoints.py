"""What our part of a checkpoint holds, and which checkpoint of a folder a run may continue from.

A checkpoint is Transformers' folder `checkpoint-<step>` (model, optimizer, scheduler, random state, trainer state) plus
`harness_state.json` (policy version, groups, position in the tasks), the mark of completeness: it is written when all
the rest is on the disk, so neither a kill nor a power cut leaves a folder that looks whole and is not; older ones are
removed after that. Groups that are not trained yet live in the run's store, which outlives a learner; `continuing`
brings the two together. `trl_compat` and the learner process call this; nothing here imports torch.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness_trainer.errors import TrainingFailed
from harness_trainer.rundir import sync, sync_tree, write_atomically

STATE_NAME = "harness_state.json"
_TRAINER_STATE = "trainer_state.json"
_WANTED = "save-now"  # beside the checkpoints: somebody wants one of what is learnt so far
_FOLDER = re.compile(r"checkpoint-(\d+)")
# Releases that wrote the mark first had the trainer state last: there a save that was killed lacks one of these.
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


def begin(checkpoint: Path) -> None:
    """Before anything is written to the folder: what an earlier life left there is no checkpoint from here on."""
    mark = checkpoint / STATE_NAME
    if mark.exists():
        mark.unlink()
        sync(checkpoint)


def complete(checkpoint: Path, state: HarnessState, *, keep: int | None) -> None:
    """All else of the checkpoint is written: put it on the disk, mark it, and remove all older ones but `keep` - 1.

    Of those that a kill cut off (they have no mark) none is kept: they would take the place of whole ones. One that a
    person has taken something from, the optimizer say, counts as it is. `keep` None = none is removed.
    Raises OSError when the disk does not take it.
    """
    sync_tree(checkpoint)
    sync(checkpoint.parent)
    write_state(checkpoint, state)
    if keep is not None:
        older = sorted(item for item in _by_step(checkpoint.parent).items() if item[0] < state.step)
        whole = [path for _, path in older if (path / STATE_NAME).exists()]
        kept = whole[max(0, len(whole) - (keep - 1)) :]
        for path in (path for _, path in older if path not in kept):
            begin(path)  # a half removed one is none
            shutil.rmtree(path)


def request(folder: Path) -> str | None:
    """Ask the run's learner for a checkpoint as soon as it can: at once while it waits, else when its step is over.

    Why it cannot be asked, as on a full disk; None = it was. Whoever asks ends a run, and must get to the end of that.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _WANTED).touch()
    except OSError as error:
        return error.strerror or str(error)
    return None


def is_requested(folder: Path) -> bool:
    """Until the learner has written one, or has found that there is nothing new to write."""
    return (folder / _WANTED).exists()


def answered(folder: Path) -> None:
    """What was asked for is there."""
    (folder / _WANTED).unlink(missing_ok=True)


def read_state(checkpoint: Path) -> HarnessState:
    """Raises TrainingFailed when the checkpoint is not complete."""
    state = _complete_state(checkpoint)
    if state is None:
        raise TrainingFailed(f"{checkpoint} is not a complete checkpoint: remove it and run the same command again")
    return state


def last_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step below `folder`; what was cut off while saving is passed over."""
    for step, path in sorted(_by_step(folder).items(), reverse=True):
        if _is_complete(path, step):
            return path
    return None


def _is_complete(checkpoint: Path, step: int) -> bool:
    state = _complete_state(checkpoint)
    return state is not None and state.step == step


def _by_step(folder: Path) -> dict[int, Path]:
    """Folders that are named like a checkpoint."""
    named = ((_FOLDER.fullmatch(path.name), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return {int(match[1]): path for match, path in named if match}


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

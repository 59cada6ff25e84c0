"""Whether the run's model can fit at all: a lower bound, so that what it refuses would surely have failed.

`harness-trainer plan` estimates what a run really needs; that takes longer and can be wrong in either direction.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from pathlib import Path

from harness_trainer.cache import cache_dir
from harness_trainer.config import RunConfig
from harness_trainer.doctor.base import Check
from harness_trainer.engine.prepare import checkpoint_shapes
from harness_trainer.errors import ConfigError
from harness_trainer.learner.sync_config import ShmSync
from harness_trainer.rundir import RunDir

_NAME = "memory for the model"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def local_folder(config: RunConfig) -> Path | None:
    """Where its weights are, None = not on this machine yet. Downloads nothing."""
    given = Path(config.model).expanduser()
    if (given / "config.json").is_file():
        return given
    # The cache's names are `engine.prepare`'s; preparing is what this must not do.
    demo = sorted(cache_dir().glob("smollm2-135m-instruct-*/config.json")) if config.model.startswith("smollm2") else []
    return demo[-1].parent if demo else None


def fits(config: RunConfig, model: Path | None) -> Check:
    """Weights for the engine, weights and gradients for the learner; caches, optimizer and activations come on top."""
    if model is None:
        return Check(_NAME, True, f"not known: {config.model} is not on this machine yet", required=False)
    if unreadable := [file.name for file in model.iterdir() if file.is_file() and not os.access(file, os.R_OK)]:
        fix = f"let user {os.getuid()} read it: chmod -R a+rX {model} (of a container's /input, the folder on the host)"
        return Check(_NAME, False, f"{', '.join(sorted(unreadable))} in {model} cannot be read", fix)
    try:
        number = _parameters(model)
    except (ConfigError, OSError) as error:
        return Check(_NAME, False, "not known", str(error))
    gpus = None if config.learner.device == "cpu" else gpu_memory()
    if gpus is None:
        engines = _engine(config, number, 4) * config.engine.replicas
        return _judged(engines + _learner(config, number), _memory(), "this machine")
    engine = _engine(config, number, 2) // config.engine.tensor_parallel_size
    learner = _learner(config, number) // config.learner.num_processes  # if it is sharded: else more
    if len(gpus) == 1:
        return _judged(engine + learner, gpus[0], "the one GPU")
    return _judged(max(engine, learner), max(gpus), "the largest GPU")


def sent(config: RunConfig, model: Path | None) -> int | None:
    """Bytes of a weight update that goes through memory whole; None = not known."""
    number = _known(model)
    if number is None:
        return None
    if not isinstance(config.learner.weight_sync, ShmSync):
        return 0
    return number * _BYTES[config.learner.weights_dtype]


def kept(config: RunConfig, model: Path | None, run_dir: Path) -> int | None:
    """Bytes that checkpoints and the final model will take beside the checkpoints that are there; None = not known.

    A checkpoint is written before an older one goes. Of an adapter it is next to nothing; its final model is whole.
    """
    number, learner = _known(model), config.learner
    if number is None:
        return None
    final = number * _BYTES[learner.weights_dtype]
    if learner.lora is not None:
        return final if learner.lora.merge else 0
    saved = math.ceil(learner.max_steps / learner.save_steps)
    at_once = saved if learner.save_total_limit is None else min(saved, learner.save_total_limit + 1)
    there = len(list(RunDir(run_dir).checkpoints.glob("checkpoint-*")))
    moments = 2 * 4 * number if learner.optimizer == "adamw_torch" else 0  # the others keep next to nothing
    return final + max(1, at_once - there) * (final + moments)


def _known(model: Path | None) -> int | None:
    try:
        return None if model is None else _parameters(model)
    except (ConfigError, OSError):
        return None  # `fits` says what is wrong with it


def _parameters(model: Path) -> int:
    return sum(math.prod(shape) for shape in checkpoint_shapes(model).values())


def _engine(config: RunConfig, number: int, usual: int) -> int:
    return number * _BYTES.get(config.engine.dtype, usual)


def _learner(config: RunConfig, number: int) -> int:
    """An adapter's own gradients are next to nothing."""
    of_one = _BYTES[config.learner.weights_dtype]
    return number * of_one * (1 if config.learner.lora is not None else 2)


def _judged(least: int, memory: int, where: str) -> Check:
    found = f"at least {least / 1e9:.1f} GB of the {memory / 1e9:.1f} GB of {where}"
    fix = "a smaller model, --learner.lora, or a machine with more memory; `harness-trainer plan` shows what takes what"
    return Check(_NAME, least < memory, found, fix)


def _memory() -> int:
    """Bytes this machine has, or this container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        return min(total, int(text)) if text.isdecimal() else total
    return total


def gpu_memory() -> list[int] | None:
    """Bytes of each GPU that is seen here; None = there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [int(line) * 2**20 for line in done.stdout.split() if line.isdigit()] or None

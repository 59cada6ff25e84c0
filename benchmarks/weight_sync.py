"""What a weight update through shared memory costs, beside moving the same bytes without any of our code: one engine.

    python -m benchmarks.weight_sync [--model smollm2] [--runs 9]

A real vLLM serves the model; three things are timed in turn, so that a busy moment hits all of them:

- copy: the bytes of all tensors, written once into a new file in /dev/shm;
- load: the same tensors, which lie in /dev/shm already, put into the running model by vLLM's own `reload_weights`;
- ours: `ShmWeightTransfer` from `pause` to `resume`, as the learner calls it: write, pause, check, load, resume.

The goal is for ours over copy plus load. A tied output head is sent by a name of its own (see ARCHITECTURE.md), so it
is among the bytes of all three. Weights are compared with the engine's once, before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import random_model
from harness_trainer.cache import cache_dir
from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.launch import Engine
from harness_trainer.engine.prepare import ModelInfo, describe_model, prepare_model
from harness_trainer.errors import SetupError
from harness_trainer.learner.engine_calls import EngineCalls
from harness_trainer.learner.weight_transfer import ShmWeightTransfer

GOAL = 2.0
COPY, LOAD, OURS = "copy", "load", "ours"
PHASES = ("write", "pause", "load", "resume")  # of ours
_SHM = Path("/dev/shm")


def weights_of(model: ModelInfo) -> dict[str, Any]:
    """Every tensor of the checkpoint in memory of this process, and a tied head by its own name."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(model.path.glob("*.safetensors")):
        tensors |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    if model.tied:
        embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
        tensors["lm_head.weight"] = tensors[embedding]
    return tensors


def as_folder(model: ModelInfo, tensors: dict[str, Any], folder: Path) -> None:
    """The model with these tensors, as vLLM reads one."""
    from safetensors.torch import save_file

    shutil.copytree(model.path, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def copy(tensors: dict[str, Any], file: Path) -> float:
    views = [memoryview(tensor.numpy()).cast("B") for tensor in tensors.values()]
    began = time.perf_counter()
    with file.open("wb", buffering=0) as stream:
        for view in views:
            done = 0
            while done < len(view):
                done += stream.write(view[done:])
    taken = time.perf_counter() - began
    file.unlink()
    return taken


def load(calls: EngineCalls, folder: Path) -> float:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": 600}
    began = time.perf_counter()
    calls.post("collective_rpc", body, 600)
    return time.perf_counter() - began


def ours(transfer: ShmWeightTransfer, tensors: dict[str, Any], version: int) -> float:
    began = time.perf_counter()
    transfer.next_version(version)
    transfer.pause()
    transfer.send_weights(iter(tensors.items()))
    transfer.resume()
    return time.perf_counter() - began


def measure(url: str, model: ModelInfo, shm: Path, runs: int) -> tuple[int, list[dict[str, float]]]:
    """The bytes, and of each round the seconds of each way; of ours also those of its phases."""
    tensors = weights_of(model)
    as_folder(model, tensors, shm / "reload")
    calls = EngineCalls(url, control_timeout_s=60, cleanup_timeout_s=10)
    transfer = ShmWeightTransfer(url, directory=shm, verify="start")
    transfer.init_weight_transfer()
    ways: list[tuple[str, Callable[[int], float]]] = [
        (COPY, lambda round_: copy(tensors, shm / "copy")),
        (LOAD, lambda round_: load(calls, shm / "reload")),
        (OURS, lambda round_: ours(transfer, tensors, round_ + 1)),
    ]
    rounds = []
    for round_ in range(runs + 1):
        start = round_ % len(ways)
        taken = {name: way(round_) for name, way in (*ways[start:], *ways[:start])}
        if round_:  # the first is for warming up, and for comparing weights
            rounds.append(taken | {_phase(name): transfer.last_timings[name] for name in PHASES})
    transfer.destroy()
    calls.close()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()), rounds


def _phase(name: str) -> str:
    return f"phase {name}"


def report(size: int, rounds: list[dict[str, float]]) -> bool:
    """Print the table; whether the goal is met."""

    def row(title: str, values: list[float]) -> float:
        median = statistics.median(values)
        print(f"{title:<38}{median:>9.3f}{min(values):>9.3f}{max(values):>9.3f}")
        return median

    print(f"{size / 2**20:.0f} MiB, {len(rounds)} rounds\n\n{'seconds':<38}{'median':>9}{'least':>9}{'most':>9}")
    row("copied once into /dev/shm", [taken[COPY] for taken in rounds])
    row("loaded once by vLLM's own reload", [taken[LOAD] for taken in rounds])
    row("ours, whole", [taken[OURS] for taken in rounds])
    for name in PHASES:
        row(f"  {name}", [taken[_phase(name)] for taken in rounds])
    ratio = statistics.median(taken[OURS] / (taken[COPY] + taken[LOAD]) for taken in rounds)
    met = ratio <= GOAL
    print(f"\nours / (copy + load), median of the rounds: {ratio:.2f}, goal {GOAL}, met: {'yes' if met else 'NO'}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a Hugging Face id, or a model folder")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="the smallest run that goes through everything")
    options = parser.parse_args()
    if not os.access(_SHM, os.W_OK):
        print("benchmarks.weight_sync: skipped, there is no /dev/shm", file=sys.stderr)
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="bench-weight-sync-") as text,
        tempfile.TemporaryDirectory(prefix="bench-weight-sync-", dir=_SHM) as in_memory,
    ):
        folder = Path(text)
        if options.quick:
            options.runs = 2
            random_model.build(folder / "model", hidden=128, layers=2)
            model = describe_model(folder / "model", "random")
        else:
            model = prepare_model(options.model, cache_dir())
        config = EngineConfig(max_model_len=1024, kv_cache_gib=0.25)
        try:
            with Engine(config, model=model, log_path=folder / "engine.log", registry=folder / "owned") as engine:
                size, rounds = measure(engine.base_url, model, Path(in_memory), options.runs)
        except SetupError as error:
            print(f"benchmarks.weight_sync: skipped, {error}", file=sys.stderr)
            return 0
    print(json.dumps({"model": model.model_id, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}))
    return 0 if report(size, rounds) or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())

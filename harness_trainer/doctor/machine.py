"""Checks of this computer: system, memory, disk, GPU, programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness_trainer.doctor.base import Check

PROFILE = "HARNESS_TRAINER_PROFILE"  # variable: compose.yaml's profile; other than "cpu" = a GPU is there, or should be
DEMO_FREE_GB = 12
DEMO_MEMORY_GB = 8
MIN_FREE_GB = 2.0  # of a run, beside its checkpoints
MIN_NODE = 20


def platform() -> Check:
    return Check("Linux", sys.platform == "linux", sys.platform, "sandboxes and process clean-up need Linux")


def python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(
        "Python 3.11 or newer",
        sys.version_info >= (3, 11),
        version,
        "install Python 3.11 or newer and make the environment anew with it",
    )


def gpu(*, wanted: bool) -> Check:
    found = (
        _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
        if shutil.which("nvidia-smi")
        else None
    )
    fix = (
        "install the NVIDIA container toolkit and restart Docker (`docker info` then lists the runtime nvidia), or set "
        "COMPOSE_PROFILES=cpu"
    )
    return Check("GPU", found is not None, found or "none: everything runs on the CPU", fix if wanted else "", wanted)


def node() -> Check:
    found = _output("node", "--version")
    new_enough = (
        found is not None and found.lstrip("v").split(".")[0].isdigit() and int(found[1:].split(".")[0]) >= MIN_NODE
    )
    ok = new_enough and shutil.which("npm") is not None
    fix = f"install Node.js {MIN_NODE} or newer with npm, or use --harness pyagent"
    return Check("npm, for agents such as opencode", ok, found or "no node", fix, required=False)


def memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Check(
        f"memory, {DEMO_MEMORY_GB} GB for the demo", total >= DEMO_MEMORY_GB, f"{total:.0f} GB", "a larger machine"
    )


def disk_for_demo() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    fix = "free space here, or give --run-dir on another disk"
    return Check(f"free disk, {DEMO_FREE_GB} GB for the demo", free >= DEMO_FREE_GB, f"{free:.0f} GB", fix)


def disk(run_dir: Path, kept: int | None) -> Check:
    """`kept` = bytes of the run's checkpoints and its model; None = not known yet."""
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free / 1e9
    needed = MIN_FREE_GB + (kept or 0) / 1e9
    fix = "free space there (`docker system df` shows what Docker holds), or give --run-dir on another disk"
    return Check(f"free disk for {run_dir}, {needed:.1f} GB", free >= needed, f"{free:.1f} GB", fix)


def shared_memory(sent: int | None) -> Check:
    """Weights go to the engine through it, all `sent` bytes at once; None = not known."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        return Check("/dev/shm for weights", False, "not there", "weights go through the disk instead", required=False)
    free = shutil.disk_usage(shm).free / 1e9
    needed = 1.0 if sent is None else max(0.2, 1.1 * sent / 1e9)
    fix = "WEIGHTS_SIZE in .env (compose: `docker compose down`, then remove its volume of weights), or --shm-size"
    return Check(f"/dev/shm for weights, {needed:.1f} GB", free >= needed, f"{free:.1f} GB free", fix, sent is not None)


def leftovers() -> Check:
    from sandboxes.lifecycle import default_registry

    registry = default_registry()
    count = len(list(registry.glob("*.json"))) if registry.is_dir() else 0
    return Check("owned processes and folders on record", True, f"{count} (live runs and left-overs)", required=False)


def _output(*argv: str) -> str | None:
    """First line a program prints, or None if it cannot be run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip().splitlines() or [""])[0] if done.returncode == 0 else None

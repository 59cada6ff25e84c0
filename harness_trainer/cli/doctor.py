"""`harness-trainer doctor`: what this machine has, what it lacks, and the command that mends it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_FREE_GB = 12
MIN_MEMORY_GB = 8
MIN_NODE = 20


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `fix` is what to do; "" when there is nothing to mend."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    required: bool = True


def run(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(
        prog="harness-trainer doctor", description="Check this machine. Exit code 0: everything required is here."
    ).parse_args(argv)
    from rich.console import Console
    from rich.table import Table

    checks = [check() for check in CHECKS]
    table = Table(box=None)
    for title in ("", "what", "found", "what to do"):
        table.add_column(title)
    for check in checks:
        mark = "ok" if check.ok else ("MISSING" if check.required else "none")
        table.add_row(mark, check.name, check.found, "" if check.ok else check.fix)
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)
    return 0 if all(check.ok or not check.required for check in checks) else 3


def _output(*argv: str) -> str | None:
    """First line a program prints, or None if it cannot be run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip().splitlines() or [""])[0] if done.returncode == 0 else None


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("Python 3.11 or newer", sys.version_info >= (3, 11), version, "make PYTHON=python3.11 setup")


def _platform() -> Check:
    return Check("Linux", sys.platform == "linux", sys.platform, "sandboxes and process clean-up need Linux")


def _engine() -> Check:
    from harness_trainer.engine.config import EngineConfig, find_environment
    from harness_trainer.errors import SetupError

    try:
        environment = find_environment(EngineConfig())
    except SetupError as error:
        return Check("engine environment with vLLM", False, "none", str(error))
    return Check("engine environment with vLLM", True, f"{environment.kind} build, {environment.python}")


def _gpu() -> Check:
    found = (
        _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
        if shutil.which("nvidia-smi")
        else None
    )
    return Check("GPU", found is not None, found or "none: everything runs on the CPU", "", required=False)


def _node() -> Check:
    found = _output("node", "--version")
    new_enough = (
        found is not None and found.lstrip("v").split(".")[0].isdigit() and int(found[1:].split(".")[0]) >= MIN_NODE
    )
    ok = new_enough and shutil.which("npm") is not None
    fix = f"install Node.js {MIN_NODE} or newer with npm, or use --harness pyagent"
    return Check("npm, for agents such as opencode", ok, found or "no node", fix, required=False)


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Check(
        f"memory, {MIN_MEMORY_GB} GB for the demo", total >= MIN_MEMORY_GB, f"{total:.0f} GB", "a larger machine"
    )


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    fix = "free space here, or give --run-dir on another disk"
    return Check(f"free disk, {MIN_FREE_GB} GB for the demo", free >= MIN_FREE_GB, f"{free:.0f} GB", fix)


def _shared_memory() -> Check:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Check("/dev/shm for weights", False, "absent", "weights go through the disk instead", required=False)
    free = shutil.disk_usage(shm).free / 1e9
    return Check("/dev/shm for weights", free >= 1, f"{free:.1f} GB free", "docker run --shm-size=8g", required=False)


def _docker() -> Check:
    from sandboxes.docker_labels import engine_address

    address = engine_address()
    name = "Docker engine, for --sandbox docker"
    fix = "start Docker and let your user use it (group docker), or set DOCKER_HOST"
    if address.startswith("unix://") and not Path(address.removeprefix("unix://")).exists():
        return Check(name, False, f"none at {address}", fix, required=False)
    from sandboxes.docker_api import ENGINE_ERRORS, connect, reason

    try:
        api = connect(address, timeout_s=10.0)
        version = api.version()
        api.close()
    except ENGINE_ERRORS as error:
        return Check(name, False, f"{address}: {reason(error)}", fix, required=False)
    return Check(name, True, f"{version['Version']} at {address}", required=False)


def _leftovers() -> Check:
    from sandboxes.lifecycle import default_registry

    registry = default_registry()
    count = len(list(registry.glob("*.json"))) if registry.is_dir() else 0
    return Check("owned processes and folders on record", True, f"{count} (live runs and left-overs)", required=False)


CHECKS: Sequence[Callable[[], Check]] = (
    _platform,
    _python,
    _engine,
    _gpu,
    _node,
    _memory,
    _disk,
    _shared_memory,
    _docker,
    _leftovers,
)

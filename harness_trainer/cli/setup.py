"""`harness-trainer setup`: make the environments that cannot share the project's. Owns arguments only."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence

from harness_trainer.side_environments import ENVIRONMENTS, make


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="harness-trainer setup",
        description="Make the environments for what cannot share the project's: "
        + "; ".join(f"{each.name} ({each.about})" for each in ENVIRONMENTS.values()),
    )
    parser.add_argument("names", nargs="+", choices=list(ENVIRONMENTS), metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--kind", choices=["cpu", "cuda"], help="vLLM's build (default: cuda where there is a GPU)")
    options = parser.parse_args(argv)
    for name in options.names:
        python = make(ENVIRONMENTS[name], kind=options.kind or _kind(), say=lambda text: print(text, file=sys.stderr))
        print(f"{name}: {python}")
    return 0


def _kind() -> str:
    program = shutil.which("nvidia-smi")
    has_gpu = program is not None and subprocess.run([program, "-L"], capture_output=True, check=False).returncode == 0
    return "cuda" if has_gpu else "cpu"

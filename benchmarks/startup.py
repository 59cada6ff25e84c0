"""How long `harness-trainer --help` takes: whole processes, five runs after a warm-up, the median and the worst."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [str(Path(sys.executable).with_name("harness-trainer"))]


def measure(*arguments: str, runs: int = 5) -> list[float]:
    """Wall seconds of each counted run."""
    taken = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        subprocess.run([*COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - started)
    return taken[1:]


def main() -> None:
    for arguments in (("--help",), ("train", "--help"), ("demo", "--dry-run"), ("traces", "ls", "--help")):
        taken = measure(*arguments)
        median, worst = statistics.median(taken), max(taken)
        print(f"harness-trainer {' '.join(arguments):<16} median {median:.3f} s, worst {worst:.3f} s")


if __name__ == "__main__":
    main()

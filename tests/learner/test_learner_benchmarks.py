"""The learner's benchmarks go through everything they do, in their smallest form. What they measure is no test's."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("packing", "TRL's packing of those"),
        ("step_overhead", "ours beyond TRL's step:"),
        ("asynchrony", "steps per hour, asynchronous / max_staleness=0:"),
        pytest.param("weight_sync", "ours / (copy + load)", marks=pytest.mark.engine),
    ],
)
def test_a_benchmark_runs_in_its_smallest_form(name: str, says: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
    done = subprocess.run(argv, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    if "skipped" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert says in done.stdout, done.stdout + done.stderr

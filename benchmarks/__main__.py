"""`make bench`: every benchmark in turn, with its own defaults."""

import subprocess
import sys

MODULES = (
    "benchmarks.startup",
    "benchmarks.capture",
    "benchmarks.traces",
    "benchmarks.bridging",
    "benchmarks.sandboxes",
    "benchmarks.agent_start",
    "benchmarks.learning",
)

if __name__ == "__main__":
    sys.exit(max(subprocess.run([sys.executable, "-m", module], check=False).returncode for module in MODULES))

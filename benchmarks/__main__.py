"""`make bench`: every benchmark in turn, with its own defaults."""

import subprocess
import sys

MODULES = (
    "benchmarks.startup",
    "benchmarks.capture",
    "benchmarks.traces",
    "benchmarks.bridging",
    "benchmarks.sandboxes",
    "benchmarks.scale",
    "benchmarks.agent_start",
    "benchmarks.loops",
    "benchmarks.openenv_sessions",
    "benchmarks.packing",
    "benchmarks.step_overhead",
    "benchmarks.weight_sync",
    "benchmarks.asynchrony",
    "benchmarks.plan_check",
    "benchmarks.view_pages",
    "benchmarks.echo",
    "benchmarks.learning",
)

if __name__ == "__main__":
    sys.exit(max(subprocess.run([sys.executable, "-m", module], check=False).returncode for module in MODULES))

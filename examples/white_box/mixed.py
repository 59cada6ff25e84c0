# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-trainer[ors]", "openenv==0.10.0", "uvicorn"]
# ///
"""Three sources in one run: opencode on a task in a sandbox, the Echo environment as a class, an ORS echo server.

    python examples/white_box/mixed.py --local --two-cores --model smollm2 --run-dir runs/mixed

It writes `mixed-sources.yaml` and trains with it; that file is all that a mixed run takes, so this does the same while
the servers are there:

    harness-trainer train --sources mixed-sources.yaml --model smollm2 --run-dir runs/mixed

Weights are of groups: of five groups two are opencode's, two Echo's, one the ORS server's. Metrics are told for each
source (`source/<name>/reward`, ...), and `harness-trainer audit runs/mixed` accounts for each. Without --local Echo is
played in its Space; the ORS server is this folder's `ors_echo.py` and always runs here. `--agent pyagent` trains a
small agent of the project's own instead of opencode, which comes from npm. With --two-cores Echo's rows show the model
how to call its tool, as `echo.py` does for a small one; SmolLM2 hardly ever calls the ORS tool, and groups without a
score are dropped, which the audit tells.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import echo
import ors_echo
import yaml

TRAIN = [sys.executable, "-m", "harness_trainer.cli", "train"]
HERE = Path(__file__).resolve().parent


def sources(agent: str, rows: Path, ors_url: str) -> list[dict[str, Any]]:
    return [
        {"name": "words", "weight": 2, "tasks": "twelve-words", "harness": agent, "timeout_s": 300},
        {
            "name": "echo",
            "weight": 2,
            "tasks": str(rows),
            "env": {
                "type": f"class:{HERE / 'echo.py'}:EchoEnv",
                "rewards": [f"{HERE / 'echo.py'}:reward_length"],
                "stop_when_done": True,
            },
            "max_turns": 4,
        },
        {"name": "ors", "weight": 1, "tasks": f"ors:{ors_url}", "max_turns": 4},
    ]


def main() -> int:
    """Write the rows and the sources, and train on them with the rest of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="serve Echo here, not in the Space")
    parser.add_argument("--two-cores", action="store_true", help="for a small model: it is shown calls of Echo's tool")
    parser.add_argument("--agent", default="opencode", help="who works on the task, as --harness names agents")
    parser.add_argument("--file", type=Path, default=Path("mixed-sources.yaml"), help="where to write the sources")
    args, rest = parser.parse_known_args()
    rows = args.file.resolve().with_suffix(".jsonl")
    rows.write_text("".join(json.dumps(row) + "\n" for row in echo.rows(shown=args.two_cores)))
    with contextlib.ExitStack() as stack:
        echo_url = stack.enter_context(echo.local_server()) if args.local else echo.ECHO_URL
        ors_url = stack.enter_context(ors_echo.local_server())
        args.file.write_text(yaml.safe_dump(sources(args.agent, rows, ors_url), sort_keys=False))
        command = [*TRAIN, "--sources", str(args.file), *rest]
        return subprocess.run(command, env={**os.environ, "ECHO_URL": echo_url}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

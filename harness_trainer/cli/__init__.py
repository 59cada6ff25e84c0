"""The command line. Owns argument parsing, exit codes and how errors look; every command lives in a module of its own.

Nothing heavy is imported before a command is known: `harness-trainer --help` must answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from harness_trainer.cli import sigterm
from harness_trainer.errors import HarnessTrainerError, SetupError, Terminated
from harness_trainer.side_environments import DISTRIBUTION, announce

COMMANDS = {
    "demo": "train a small real model inside the real opencode on this machine, from nothing",
    "train": "train a model inside an agent",
    "launch": "train on somebody else's machines: one job on Hugging Face Jobs or a SLURM cluster",
    "plan": "what a run will need and come to: memory, pace, hours, cost, bottleneck",
    "rollout": "the same without learning: evaluate a model, collect what it does",
    "serve": "run one part alone: the capture gateway or the engine",
    "tasks": "list tasks, or check that they can be built, solved and scored",
    "qualify": "run the real agents on scripted tasks and show which can be trained",
    "model": "write a checkpoint as a model folder in Hugging Face format, with its card",
    "traces": "list, show or export what a run captured",
    "view": "the trace viewer and live dashboard in a browser",
    "audit": "account for every attempt, group, step and trained token of a run",
    "setup": "make the environments that cannot share this one: engine, intercept, harbor",
    "doctor": "check what this machine has and what it lacks",
    "clean": "end and remove what dead runs left behind",
}

# Libraries that only some commands and settings need, and the extra that brings each.
_EXTRAS = {
    "aiohttp": "ors",
    "docker": "docker",
    "e2b": "e2b",
    "jinja2": "view",
    "openreward": "ors",
    "ray": "ray",
    "submitit": "slurm",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises for what a person did wrong."""
    parser = argparse.ArgumentParser(
        prog="harness-trainer",
        description="Train an open language model inside the coding agent you really use.",
        epilog="`harness-trainer COMMAND --help` shows a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        subparsers.add_parser(name, help=about, description=about, add_help=False)
    arguments = list(sys.argv[1:] if argv is None else argv)
    known, rest = parser.parse_args(arguments[:1]), arguments[1:]
    try:
        with sigterm.heeded():
            module = importlib.import_module(f"harness_trainer.cli.{known.command}")
            announce(os.environ)
            return int(module.run(rest))
    except HarnessTrainerError as error:
        print(f"harness-trainer: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        advice = _install_command(error.name or "")
        if advice is None:
            raise
        print(f"harness-trainer: {error.name} is not installed here: {advice}", file=sys.stderr)
        return SetupError.exit_code
    except KeyboardInterrupt as error:
        continues = "; the same command continues the run" if known.command in ("demo", "train", "rollout") else ""
        print(f"harness-trainer: stopped{continues}", file=sys.stderr)
        return sigterm.EXIT_CODE if isinstance(error, Terminated) else 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; nothing more to say
        return 0


def _version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"of a source tree that is not installed: {os.path.dirname(os.path.dirname(os.path.dirname(__file__)))}"


def _install_command(module: str) -> str | None:
    """Of the extra that brings a library; None = none does, and its absence is a bug."""
    extra = _EXTRAS.get(module.partition(".")[0])
    return None if extra is None else f"pip install 'harness-trainer[{extra}]'"

"""`harness-trainer launch KIND`: the same training on somebody else's machines. Owns the choice of the kind only."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

KINDS = {
    "hf-jobs": ("launch_hf", "one job on Hugging Face Jobs, with sandboxes elsewhere"),
    "slurm": ("launch_slurm", "one job on a SLURM cluster"),
    "inside": ("launch_inside", "what a job on Hugging Face runs; not for people"),
    "inside-slurm": ("launch_slurm_inside", "what a job on SLURM runs; not for people"),
}


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="harness-trainer launch", epilog="`harness-trainer launch KIND --help` shows a kind's options."
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, (_, about) in KINDS.items():
        kinds.add_parser(name, help=about, add_help=False)
    kind = parser.parse_args(list(argv[:1])).kind
    module = importlib.import_module(f"harness_trainer.cli.{KINDS[kind][0]}")
    return int(module.run(argv[1:]))

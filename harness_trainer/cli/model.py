"""`harness-trainer model`: write a checkpoint of a run as a model folder that other programs load, with its card."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="harness-trainer model",
        description="Write a checkpoint of a run as a model in Hugging Face format, with a card that says how it was "
        "trained.",
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint; the newest if left out")
    parser.add_argument("--out", type=Path, help="folder to write; `model` in the run folder if left out")
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run: the adapter alone, not merged")
    options = parser.parse_args(argv)

    import yaml

    from harness_trainer.cache import cache_dir
    from harness_trainer.engine.prepare import prepare_model
    from harness_trainer.errors import RunDirError
    from harness_trainer.learner.final_model import write_final_model
    from harness_trainer.rundir import RunDir

    folder = RunDir(options.run_dir)
    try:
        name = str(yaml.safe_load(folder.config.read_text(encoding="utf-8"))["model"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise RunDirError(f"{options.run_dir} is no run folder ({error}): give the --run-dir of a run") from error
    base = prepare_model(name, cache_dir(), progress=lambda text: print(text, file=sys.stderr))
    print(write_final_model(folder, base.path, step=options.step, target=options.out, merge=not options.adapter))
    return 0

"""`harness-trainer plan`: what the run of the same `train` arguments will need and come to. Owns its own flags only."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from harness_trainer.cli.flags import add_flags, resolve
from harness_trainer.config import RunConfig
from harness_trainer.errors import ConfigError
from harness_trainer.plan.amounts import Number
from harness_trainer.plan.workload import NAMES


def run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    config = resolve(RunConfig, options, {}, options.config)
    from harness_trainer.plan import Machine, make_plan
    from harness_trainer.plan.measured import read_run
    from harness_trainer.plan.on_nodes import on_nodes
    from harness_trainer.plan.prices import read_prices
    from harness_trainer.plan.report import as_json, lines
    from harness_trainer.plan.shape import read_shape
    from harness_trainer.plan.sizes import find_gpu, parse_bytes

    # What can be wrong is looked at before the model's config, which takes seconds.
    prices = None if options.prices is None else read_prices(options.prices)
    gpu = None if options.gpu is None else find_gpu(options.gpu)
    memory = parse_bytes(options.gpu_memory) if options.gpu_memory else None if gpu is None else gpu.memory
    measured = {} if options.from_run is None else read_run(options.from_run)
    given = {name: Number(_amount(name, getattr(options, name)), "given") for name in NAMES if getattr(options, name)}
    shape = read_shape(_model_of(config))
    machine = Machine(gpu, memory, options.gpus)
    nodes = on_nodes(config)
    plan = make_plan(config, shape, machine, given=given, measured=measured, prices=prices, nodes=nodes)
    print(json.dumps(as_json(plan), indent=1) if options.json else "\n".join(lines(plan)))
    return 1 if plan.fit.fits is False else 0


def _parser() -> argparse.ArgumentParser:
    from harness_trainer.plan.report import ABOUT
    from harness_trainer.plan.sizes import GPUS

    parser = argparse.ArgumentParser(
        prog="harness-trainer plan",
        usage="harness-trainer plan [options]",
        description="Memory, pace, hours and cost of the run that `train` would make of the same settings. "
        "Ends with 1 where it does not fit.",
    )
    parser.add_argument("--config", type=Path, help="YAML file with any of the run's settings")
    parser.add_argument("--gpu", help=f"of engine and learner: {', '.join(GPUS)}")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of each GPU, e.g. 80GiB (a CPU run: of the machine)")
    parser.add_argument("--gpus", type=_count, metavar="N", help="GPUs there are; 1 = engine and learner share it")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="YAML price list; docs/plan.md shows the form")
    parser.add_argument("--from-run", type=Path, metavar="DIR", help="a run that was made: its numbers are taken")
    parser.add_argument("--json", action="store_true", help="for programs")
    for name, (unit, about) in ABOUT.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar="X", help=f"{about}, in {unit}")
    add_flags(parser, RunConfig, {})
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError("give a whole number from 1")
    return int(text)


def _amount(name: str, text: str) -> float:
    flag = f"--{name.replace('_', '-')}"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0 or (name == "kept" and value > 1):
        raise ConfigError(f"{flag} {text!r}: give a number above 0" + (" and at most 1" if name == "kept" else ""))
    return value


def _model_of(config: RunConfig) -> str:
    """The demo model is a folder of the cache; other names are read as they are."""
    from harness_trainer.cache import cache_dir
    from harness_trainer.engine.prepare import DEMO_ALIASES, prepare_model

    if config.model.lower() in DEMO_ALIASES:
        return str(prepare_model(config.model, cache_dir(), progress=_say).path)
    return config.model


def _say(text: str) -> None:
    print(text, file=sys.stderr)

"""`harness-trainer launch inside-slurm ORDER`: in a SLURM job, what `in_job` does with the order's file.

Owns what is different there: secrets from files, the run on the shared disk or on the machine's own, SLURM's warning,
and several nodes. Started by `jobs.slurm_step`.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from harness_trainer.cli.launch_inside import CHECK, TRAIN
from harness_trainer.cli.launch_slurm_order import SlurmOrder, missing_secrets, read_order
from harness_trainer.doctor.secrets import value_in
from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.job_order import JobOrder

WARNING = signal.SIGUSR2


def run(argv: Sequence[str], *, train: Sequence[str] = TRAIN, check: Sequence[str] = CHECK) -> int:
    parser = argparse.ArgumentParser(prog="harness-trainer launch inside-slurm")
    parser.add_argument("order", type=Path, help="file that `harness-trainer launch slurm` has written")
    options = parser.parse_args(argv)
    from harness_trainer.in_job import JobRun, Pace
    from harness_trainer.rundir import RunDir
    from jobs.copies import FolderCopy
    from jobs.errors import JobsError
    from jobs.masking import Mask
    from jobs.slurm_step import NODES

    order = read_order(options.order)
    take_secrets(order, os.environ)
    names = [*order.secrets, *order.secret_files]
    mask = Mask(os.environ[name] for name in names)
    kept = Path(order.runs) / order.run
    nodes = [name for name in os.environ.get(NODES, "").split(",") if name]
    inside = JobOrder(
        config=on_nodes(order, nodes),
        run=order.run,
        runs=order.runs,
        timeout_s=math.inf,  # SLURM holds it, and it may be changed while the job runs
        margin_s=order.margin_s,
        secrets=names,
    )
    try:
        return JobRun(
            inside,
            None if order.scratch is None else FolderCopy(kept),
            RunDir(kept if order.scratch is None else scratch_of(order.scratch, os.environ) / order.run),
            train=train,
            check=check,
            mask=mask,
            warning=WARNING,
            again=order.again,
            pace=Pace(save=10.0, end=15.0),  # SLURM kills 30 s (KillWait) after SIGTERM, unless it is set otherwise
        ).go()
    except JobsError as error:
        raise SetupError(mask(str(error))) from error


def take_secrets(order: SlurmOrder, environ: MutableMapping[str, str]) -> None:
    """Those in files become variables. Raises SetupError when the job lacks one."""
    missing = missing_secrets(order, environ)
    if missing:
        raise SetupError(
            f"in the job: {'; '.join(missing)} (SLURM hands the environment on unless SBATCH_EXPORT says otherwise)"
        )
    for name, path in order.secret_files.items():
        try:
            content = value_in(Path(path), name)
        except OSError as error:
            raise SetupError(f"--secret-file {name}={path}: {error.strerror}") from error
        except ValueError as error:
            raise SetupError(f"--secret-file {name}={path} {error}: is it the right file?") from error
        if not content:
            raise SetupError(f"--secret-file {name}={path} is empty: is it the right file?")
        environ[name] = os.fsdecode(content)


def scratch_of(text: str, environ: Mapping[str, str]) -> Path:
    """Raises ConfigError when it names a variable that this machine does not have."""
    path = os.path.expanduser(Template(text).safe_substitute(environ))
    if "$" in path or not os.path.isabs(path):
        known = (
            ", ".join(name for name in ("SLURM_TMPDIR", "TMPDIR", "SCRATCH") if name in environ) or "none of the usual"
        )
        raise ConfigError(f"--scratch {text}: {path} is no absolute path on this machine; set here: {known}")
    return Path(path)


def on_nodes(order: SlurmOrder, nodes: Sequence[str]) -> dict[str, Any]:
    """The run's config, with accelerate's configuration for these machines. Raises ConfigError."""
    if len(nodes) < 2:
        return order.config
    import yaml

    from harness_trainer.learner.launch import config_file
    from harness_trainer.rundir import write_atomically

    learner = dict(order.config["learner"])
    chosen = config_file(learner["accelerate_config"])
    settings = yaml.safe_load(chosen.read_text(encoding="utf-8"))
    settings |= {"num_machines": len(nodes), "main_process_ip": nodes[0], "machine_rank": 0}
    settings = {"main_process_port": 29500, "rdzv_backend": "static", **settings}
    path = order.folder / "accelerate.yaml"
    write_atomically(path, yaml.safe_dump(settings, sort_keys=False))
    print(f"[job] the learner is on {', '.join(nodes)}, by {chosen.name}", file=sys.stdout, flush=True)
    return {**order.config, "learner": {**learner, "accelerate_config": str(path)}}

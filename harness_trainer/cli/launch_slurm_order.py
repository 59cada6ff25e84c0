"""From the arguments of `launch slurm` to what is sent: one run's config, and the job around it.

Owns the options, what must go together, and the order's file on the shared disk; asks nobody and starts nothing. Called
by `launch_slurm`, and by `launch_slurm_inside` for the file's form.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness_trainer.cli.flags import add_flags, resolve
from harness_trainer.config import RunConfig
from harness_trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.slurm import Order

NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
# The environment that this process is in, which is on a shared disk, usually.
INSIDE = (sys.executable, "-m", "harness_trainer.cli", "launch", "inside-slurm")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXTRA = "--slurm."


class SlurmOrder(BaseModel):
    """What a run's jobs are told; holds no secret.

    Example: SlurmOrder(config={...}, run="math", runs="/shared/runs", minutes=360, margin_s=600, partition="a100").
    """

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any]  # of the run, resolved
    run: str  # its name, and that of its folder
    runs: str  # folder of all runs, on a disk that login node and machines share
    scratch: str | None = None  # disk of the job's machine for the run, variables in it; None = it lives in `runs`
    minutes: int
    margin_s: int
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    nodes: int = 1
    gpus: int | None = None
    cpus: int | None = None
    extra: dict[str, str | bool] = Field(default_factory=dict)  # sbatch's own
    setup: list[str] = Field(default_factory=list)
    requeues: int = 3
    secrets: list[str] = Field(default_factory=list)  # names of variables that the job must have
    secret_files: dict[str, str] = Field(default_factory=dict)  # variable -> file that the job reads

    @property
    def folder(self) -> Path:
        """Of logs and orders."""
        return jobs_folder(Path(self.runs), self.run)

    @property
    def again(self) -> str:
        return self.call("resume")

    def call(self, action: str) -> str:
        """The command that asks for it, to be copied."""
        return f"harness-trainer launch slurm {action} --runs {shlex.quote(self.runs)} --run {self.run}"


def jobs_folder(runs: Path, run: str) -> Path:
    """Beside the run's folder, which is the run's own. No run can have this name."""
    return runs.expanduser().absolute() / f"{run}.slurm"


def add_place(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--runs", required=True, type=Path, help="folder of all runs, on a disk that login node and machines share"
    )
    parser.add_argument("--run", default="train", help="name of the run; launched again, it goes on (default: train)")


def add_resources(job: argparse.ArgumentParser | argparse._ArgumentGroup, *, time_required: bool) -> None:
    job.add_argument("--time", required=time_required, help="the job's limit: 90m, 6h, 2d, 1-12:00:00")
    job.add_argument("--partition")
    job.add_argument("--account")
    job.add_argument("--constraint", help="features that the nodes must have")
    job.add_argument("--gpus", type=int, help="on each node")
    job.add_argument("--cpus", type=int, help="on each node")
    job.add_argument("--nodes", type=int, help="more than one: the learner's processes are on all (default: 1)")


def add_options(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("the job")
    add_place(job)
    add_resources(job, time_required=True)
    job.add_argument(
        "--slurm.KEY",
        dest="extra_help",
        metavar="VALUE",
        help="any other option of sbatch: --slurm.mem 64G; repeatable",
    )
    job.add_argument(
        "--scratch",
        metavar="DIR",
        help="disk of the job's own machine for the run, e.g. '$SLURM_TMPDIR'; copies go to --runs "
        "(default: the run lives in --runs)",
    )
    job.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="shell line before all, e.g. 'module load cuda'"
    )
    job.add_argument(
        "--margin",
        help="before the limit, for a last checkpoint: SLURM's warning (default: a tenth of it, 2 to 15 minutes)",
    )
    job.add_argument(
        "--requeue", type=int, default=3, help="times that the job is queued again at its limit (default: 3)"
    )
    job.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="variable of this shell that the job must get; SLURM hands the environment on; repeatable",
    )
    job.add_argument(
        "--secret-file",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="variable whose value the job reads from a file, byte for byte; repeatable",
    )
    job.add_argument("--detach", action="store_true", help="do not follow the job")
    job.add_argument("--dry-run", action="store_true", help="print the script that sbatch would get, and stop")
    run = parser.add_argument_group("the run, as `harness-trainer train` takes it")
    run.add_argument("--config", type=Path, help="YAML file with any of the settings below")
    add_flags(run, RunConfig, {})


def split_extra(argv: Sequence[str]) -> tuple[list[str], dict[str, str | bool]]:
    """All but `--slurm.KEY VALUE` and `--slurm.KEY=VALUE`, and these. Raises ConfigError."""
    rest: list[str] = []
    extra: dict[str, str | bool] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith(_EXTRA):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix(_EXTRA).partition("=")
        given = value if equals else next(words, None)
        if given is None or (not equals and given.startswith("--")):
            raise ConfigError(f"{_EXTRA}{name} needs a value; of an option without one, true")
        extra[name.replace("_", "-")] = True if given == "true" else given
    return rest, extra


def order_of(options: argparse.Namespace, extra: Mapping[str, str | bool]) -> SlurmOrder:
    """Raises ConfigError, JobsError."""
    from jobs.slurm import checked_extra, minutes_of

    check_name(options.run)
    config = resolve(RunConfig, options, {}, options.config)
    minutes = minutes_of(options.time)
    files = dict(_secret_file(text) for text in options.secret_file)
    order = SlurmOrder(
        config=config.model_dump(mode="json"),
        run=options.run,
        runs=str(options.runs.expanduser().absolute()),
        scratch=options.scratch,
        minutes=minutes,
        margin_s=margin_of(minutes, options.margin),
        partition=options.partition,
        account=options.account,
        constraint=options.constraint,
        nodes=1 if options.nodes is None else options.nodes,
        gpus=options.gpus,
        cpus=options.cpus,
        extra=checked_extra(extra),
        setup=options.setup,
        requeues=options.requeue,
        secrets=[name for name in _secret_names(options.secret, config) if name not in files],
        secret_files=files,
    )
    _check(order, config)
    return order


def check_name(run: str) -> None:
    if not NAME.fullmatch(run):
        raise ConfigError(f"--run {run!r}: use letters, digits, - and _")


def margin_of(minutes: int, given: str | None) -> int:
    """Seconds. Raises ConfigError when nothing is left to train in."""
    from jobs.slurm import minutes_of

    margin_s = min(900, max(120, minutes * 6)) if given is None else minutes_of(given) * 60
    if minutes * 60 <= 2 * margin_s:
        raise ConfigError(f"--time of {minutes} minutes leaves no time to train before the --margin of {margin_s} s")
    return margin_s


def make(order: SlurmOrder, file: Path, inside: Sequence[str] = INSIDE) -> Order:
    """What is sent; `file` is where the job, which is the command `inside`, reads the order."""
    from jobs.slurm import Order
    from jobs.slurm_step import RANK, Step

    spec = Path(order.runs) / order.run / "internal" / "learner.json"
    worker = (sys.executable, "-m", "harness_trainer.learner.launch", "--spec", str(spec), "--machine-rank", RANK)
    return Order(
        run=order.run,
        folder=order.folder,
        step=Step((*inside, str(file)), worker if order.nodes > 1 else (), spec if order.nodes > 1 else None),
        minutes=order.minutes,
        margin_s=order.margin_s,
        partition=order.partition,
        account=order.account,
        constraint=order.constraint,
        nodes=order.nodes,
        gpus=order.gpus,
        cpus=order.cpus,
        extra=order.extra,
        setup=tuple(order.setup),
        requeues=order.requeues,
    )


def write_order(order: SlurmOrder) -> Path:
    """A file of its own for each job: one that is queued again reads what it was sent with. Raises ConfigError."""
    from harness_trainer.rundir import write_atomically

    try:
        order.folder.mkdir(parents=True, exist_ok=True)
        path = next_file(order.folder)
        write_atomically(path, order.model_dump_json(indent=1))
    except OSError as error:
        raise ConfigError(f"--runs {order.runs}: {error.strerror}: give a folder that you may write to") from error
    return path


def next_file(folder: Path) -> Path:
    return folder / f"order-{len(_order_files(folder)) + 1}.json"


def last_order(folder: Path) -> SlurmOrder:
    """Raises ConfigError."""
    files = _order_files(folder)
    if not files:
        raise ConfigError(f"no job was launched from {folder}: check --runs and --run")
    return read_order(files[-1])


def read_order(file: Path) -> SlurmOrder:
    """Raises ConfigError."""
    try:
        return SlurmOrder.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}: is the folder of --runs on a disk that all machines see?"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file} is of another version ({where}: {first['msg']}): launch the run again") from error


def missing_secrets(order: SlurmOrder, environ: Mapping[str, str]) -> list[str]:
    """Each with what to do."""
    missing = [
        f"{name} is not set: export it, or give --secret-file {name}=FILE"
        for name in order.secrets
        if not environ.get(name, "").strip()
    ]
    unreadable = [
        f"--secret-file {name}={path} cannot be read: give a file on the shared disk"
        for name, path in order.secret_files.items()
        if not os.access(path, os.R_OK)
    ]
    return missing + unreadable


def _order_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("order-*.json"), key=lambda path: int(path.stem.partition("-")[2]))


def _secret_names(given: Sequence[str], config: RunConfig) -> list[str]:
    for name in given:
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"--secret {name.partition('=')[0]!r}: give the name alone; its value is taken from this shell"
            )
    has_sandboxes = any(source.env.type == "own" for source in config.each_source)
    own = ["E2B_API_KEY"] if has_sandboxes and config.sandbox.type == "e2b" else []
    return list(dict.fromkeys([*own, *given]))


def _secret_file(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not _VARIABLE.fullmatch(name) or not path:
        raise ConfigError(f"--secret-file {name!r}: write NAME=FILE")
    return name, str(Path(path).expanduser().absolute())


def _check(order: SlurmOrder, config: RunConfig) -> None:
    """What does not go together. Raises ConfigError."""
    for name, number, least in (
        ("nodes", order.nodes, 1),
        ("gpus", order.gpus, 0),
        ("cpus", order.cpus, 1),
        ("requeue", order.requeues, 0),
    ):
        if number is not None and number < least:
            raise ConfigError(f"--{name} {number}: give {least} or more")
    _check_gpus(order, config)
    if order.nodes == 1:
        return
    if order.scratch is not None:
        raise ConfigError("--nodes with --scratch: a learner over several nodes reads the run folder from all of them")
    if config.learner.num_processes % order.nodes or config.learner.num_processes < order.nodes:
        raise ConfigError(
            f"--nodes {order.nodes}: learner.num_processes {config.learner.num_processes} must be a multiple of it, "
            "because every node has as many of the learner's processes"
        )


def _check_gpus(order: SlurmOrder, config: RunConfig) -> None:
    """Every replica of the engine is on the first node, beside that node's share of the learner. Raises ConfigError."""
    engine, learner = config.engine, config.learner
    if order.gpus is None or engine.replicas == 1 or engine.gpus is not None or learner.device == "cpu":
        return
    wanted = engine.replicas * engine.tensor_parallel_size + max(1, learner.num_processes // max(1, order.nodes))
    if order.gpus < wanted:
        raise ConfigError(
            f"--gpus {order.gpus}: the engine's {engine.replicas} replicas and the learner take {wanted} on the first"
            " node, where all replicas run: give more, or lower engine.replicas"
        )

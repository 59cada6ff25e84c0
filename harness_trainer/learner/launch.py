"""Starts one machine's processes of a learner that has several: `python -m harness_trainer.learner.launch --spec FILE`.

It is `accelerate launch` with the configuration that the run's learner names, ours or a person's own, and one line for
the log when a process ends badly. The supervisor starts it on the machine of the run; a person does with
`--machine-rank` on each other one. Owns what `accelerate` is told; nothing heavy is imported before it is launched.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from harness_trainer.errors import ConfigError
from harness_trainer.learner.config import LearnerConfig

_SHIPPED = Path(__file__).with_name("accelerate")


def config_file(name: str) -> Path:
    """Of one of ours by its name (ddp, fsdp2, multi_node), or the path itself. Raises ConfigError."""
    for path in (_SHIPPED / f"{name}.yaml", Path(name).expanduser().absolute()):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(path.stem for path in _SHIPPED.glob("*.yaml")))
    raise ConfigError(f"learner.accelerate_config {name!r} is neither a file nor one of {shipped}")


def module_of(config: LearnerConfig) -> str:
    """What the supervisor runs with `--spec`."""
    return "harness_trainer.learner" if config.num_processes == 1 else "harness_trainer.learner.launch"


def pinned(config: LearnerConfig) -> LearnerConfig:
    """The same for a process with another working directory. Raises ConfigError when it cannot be launched."""
    if config.num_processes == 1:
        return config
    accelerate_arguments(config, Path(), 0)
    return config.model_copy(update={"accelerate_config": str(config_file(config.accelerate_config))})


def on_other_machines(config: LearnerConfig, spec: Path) -> str | None:
    """What a person is to run there, with the number of each; None = there are none."""
    num_machines = 1 if config.num_processes == 1 else _num_machines(config_file(config.accelerate_config))
    if num_machines == 1:
        return None
    numbers = "1" if num_machines == 2 else f"1 to {num_machines - 1}"
    return f"python -m harness_trainer.learner.launch --spec {spec} --machine-rank N  (N = {numbers})"


def num_gpus_here(config: LearnerConfig) -> int:
    """That the learner's processes take on the machine of the run: the first ones. Raises ConfigError."""
    if config.device == "cpu":
        return 0
    if config.num_processes == 1:
        return 1
    return config.num_processes // _num_machines(config_file(config.accelerate_config))


def accelerate_arguments(config: LearnerConfig, spec: Path, machine_rank: int) -> list[str]:
    """Those of `accelerate launch`. Raises ConfigError when its configuration does not fit."""
    file = config_file(config.accelerate_config)
    num_machines = _num_machines(file)
    if config.num_processes % num_machines:
        raise ConfigError(
            f"learner.num_processes {config.num_processes} is no multiple of the {num_machines} machines in {file}"
        )
    argv = ["--config_file", str(file), "--num_processes", str(config.num_processes)]
    if num_machines == 1:
        argv += ["--main_process_port", "0"]  # a free one
    else:
        argv += ["--machine_rank", str(machine_rank)]
    here = config.num_processes // num_machines
    if "OMP_NUM_THREADS" not in os.environ:
        argv += ["--num_cpu_threads_per_process", str(max(1, (os.cpu_count() or 1) // here))]
    return [*argv, "-m", "harness_trainer.learner", "--spec", str(spec)]


def is_sharded(config: LearnerConfig) -> bool:
    """Whether its processes each hold a shard of the model. Raises ConfigError for a file that cannot be read."""
    if config.num_processes == 1:
        return False
    return bool(_settings(config_file(config.accelerate_config)).get("distributed_type") == "FSDP")


def _num_machines(file: Path) -> int:
    try:
        return int(_settings(file).get("num_machines") or 1)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as a configuration of accelerate's: {error}") from error


def _settings(file: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read as a configuration of accelerate's: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} cannot be read as a configuration of accelerate's: it is no mapping")
    return settings


def main() -> int:
    from harness_trainer.learner.__main__ import LearnerSpec

    parser = argparse.ArgumentParser(prog="harness_trainer.learner.launch", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="learner.json in the run folder, seen by all machines")
    parser.add_argument("--machine-rank", type=int, default=0, help="number of this machine; 0 is that of the run")
    chosen = parser.parse_args()
    spec = LearnerSpec.model_validate_json(chosen.spec.read_text(encoding="utf-8"))
    try:
        argv = accelerate_arguments(spec.config, chosen.spec, chosen.machine_rank)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(argv))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ended = f"with exit code {failure.exitcode}" if failure.exitcode >= 0 else f"by signal {-failure.exitcode}"
        print(f"process {rank} of the learner (pid {failure.pid}) ended {ended}", file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())

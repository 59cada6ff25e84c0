"""The trainer's container in compose.yaml: `python -m harness_trainer.cli.in_compose COMMAND ...`.

Owns what is different in a container: secrets come as files, `docker stop` must end a run as Ctrl-C does, the machine
is checked before a run, the other containers are told when it is over, and settings come as variables: those that
somebody set in .env win over a `--config` file, and the stack's own defaults are for what nobody said. Every command
but `train` and `rollout` is only passed on, with the secrets. No command of its own in `harness-trainer`: people call
compose.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness_trainer.cli import main as harness_trainer
from harness_trainer.doctor.machine import PROFILE
from harness_trainer.doctor.secrets import SECRETS, take_over
from harness_trainer.errors import HarnessTrainerError, SetupError
from harness_trainer.supervision.remote import RemoteHost
from sandboxes.namespaces import hold

RUNS = ("train", "rollout")
PARTS = ("engine", "gateway")
# Variables of compose.yaml, empty where .env does not set them, and the flag that each stands for.
SETTINGS = {
    "HARNESS_TRAINER_RUN_MODEL": "--model",
    "HARNESS_TRAINER_RUN_TASKS": "--tasks",
    "HARNESS_TRAINER_RUN_HARNESS": "--harness",
    "HARNESS_TRAINER_RUN_SANDBOX": "--sandbox",
    "HARNESS_TRAINER_RUN_GPU_SHARE": "--engine.gpu-memory-utilization",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes are those of `harness-trainer`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_run = bool(arguments) and arguments[0] in RUNS
    try:
        take_over(SECRETS)
        return _run(arguments) if is_run else harness_trainer(arguments)
    except HarnessTrainerError as error:
        print(f"harness-trainer: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    finally:
        if is_run:
            _finish()


def with_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """A run's command with what .env says, and with the stack's defaults for what neither that nor a file says.

    A default is no flag where something else decides: a flag would win over the file. Raises ConfigError.
    """
    command, *rest = arguments
    told = [f"{flag}={value}" for name, flag in SETTINGS.items() if (value := environ.get(name))]
    return [command, *_defaults(_given(command, [*told, *rest]), environ), *told, *rest]


def _given(command: str, argv: Sequence[str]) -> dict[str, Any]:
    """The settings in the arguments and their file, not validated: the command does that, and has the words for it."""
    from harness_trainer.cli.flags import add_flags, merged
    from harness_trainer.config import CollectConfig, RunConfig

    model: type[RunConfig] | type[CollectConfig] = RunConfig if command == "train" else CollectConfig
    parser = argparse.ArgumentParser(prog=f"harness-trainer {command}", usage="%(prog)s [options]", add_help=False)
    parser.add_argument("--config", type=Path)
    add_flags(parser, model, {})
    options, _of_the_command = parser.parse_known_args(argv)
    return merged(model, options, {}, options.config, say=lambda text: None)


def _defaults(given: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[str]:
    """Those that differ from the command line's own."""
    from harness_trainer.environments import as_env

    env, sandbox, engine = (given.get(name) or {} for name in ("env", "sandbox", "engine"))
    named = as_env(env)
    is_own = isinstance(named, dict) and named["type"] == "own"
    has_agents = is_own and not str(given.get("tasks")).startswith("ors:")
    if has_agents and given.get("sources") is None and given.get("harness") is None:
        yield "--harness=pyagent"
    # A file may set something of the sandbox and not say which: beside the trainer's secrets it must not be.
    if has_agents and isinstance(sandbox, dict) and sandbox.get("type") is None:
        yield "--sandbox=docker"
    share = engine.get("gpu_memory_utilization") if isinstance(engine, dict) else None
    if environ.get(PROFILE) == "gpu-shared" and share is None:
        yield "--engine.gpu-memory-utilization=0.4"


def _run(arguments: Sequence[str]) -> int:
    """Raises SetupError, ConfigError."""
    arguments = with_settings(arguments, os.environ)
    try:
        held = hold()
    except OSError as error:
        fix = "the volume of caches must be writable for user 10001"
        raise SetupError(f"cannot note that this container lives: {error}; {fix}") from None
    with held or contextlib.nullcontext():  # for as long as this process lives
        code = harness_trainer(["doctor", "--before-run", *arguments])
        if code == 0:
            _say_where_to_look(arguments)
            code = harness_trainer(arguments)
        return code


def _finish() -> None:
    """The other containers end with this one. One that works for another run does not listen, and goes on."""
    for name in PARTS:
        host = RemoteHost.find(name)
        if host is not None:
            host.finish()
            # The socket proxy ends with its socket. Sandboxes are gone by now.
            host.folder.with_name("docker").joinpath("docker.sock").unlink(missing_ok=True)


def _say_where_to_look(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, default=Path("runs") / arguments[0])  # as the commands have it
    run_dir = parser.parse_known_args(arguments[1:])[0].run_dir.absolute()
    lines = [
        f"run folder {run_dir}, on the volume of runs; look into it while it goes on, from another terminal:",
        f"  docker compose exec SERVICE harness-trainer traces ls --run-dir {run_dir}    (SERVICE: trainer-cpu, ...)",
        f"  docker compose exec SERVICE tail -f {run_dir}/metrics.jsonl",
        f"  docker compose cp SERVICE:{run_dir} .    also when it has ended",
        "  docker compose --profile view up view    the same in a browser",
        "Ctrl-C stops it; `docker compose up` continues it.",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

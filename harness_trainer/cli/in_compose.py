"""The trainer's container in compose.yaml: `python -m harness_trainer.cli.in_compose COMMAND ...`.

Owns what is different in a container: secrets come as files, `docker stop` must end a run as Ctrl-C does, the machine
is checked before a run, and the other containers are told when it is over. Every command but `train` and `rollout` is
only passed on, with the secrets. No command of its own in `harness-trainer`: people call compose.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from harness_trainer.cli import main as harness_trainer
from harness_trainer.doctor.secrets import SECRETS, take_over
from harness_trainer.errors import HarnessTrainerError, SetupError
from harness_trainer.supervision.remote import RemoteHost
from sandboxes.namespaces import hold

RUNS = ("train", "rollout")
PARTS = ("engine", "gateway")


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


def _run(arguments: Sequence[str]) -> int:
    """Raises SetupError."""
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

"""`harness-trainer launch slurm`: one job that trains, and the questions one asks of such a job.

Owns arguments, what is printed and exit codes. What is sent is `launch_slurm_order`'s; asking SLURM, the job's own
process and following it are `jobs.slurm`, `jobs.slurm_step` and `jobs.slurm_follow`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from harness_trainer.cli.launch_slurm_order import (
    INSIDE,
    SlurmOrder,
    add_options,
    add_place,
    add_resources,
    check_name,
    jobs_folder,
    last_order,
    make,
    margin_of,
    missing_secrets,
    next_file,
    order_of,
    split_extra,
    write_order,
)
from harness_trainer.errors import ConfigError, SetupError, TrainingFailed

if TYPE_CHECKING:
    from jobs.slurm import Job

_PROG = "harness-trainer launch slurm"


def run(argv: Sequence[str], *, inside: Sequence[str] = INSIDE) -> int:
    """`inside` is the command that the job is."""
    from jobs.errors import JobsError

    action = ACTIONS.get(argv[0]) if argv else None
    try:
        return _launch(argv, inside) if action is None else action(argv[1:], inside)
    except JobsError as error:
        raise SetupError(str(error)) from error


def _launch(argv: Sequence[str], inside: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} --runs FOLDER --time TIME [options of `train`]\n"
        f"       {_PROG} {{{','.join(ACTIONS)}}} --runs FOLDER [--run NAME] ...",
    )
    add_options(parser)
    words, extra = split_extra(argv)
    options = parser.parse_args(words)
    return _start(order_of(options, extra), inside, detach=options.detach, dry_run=options.dry_run)


def _start(order: SlurmOrder, inside: Sequence[str], *, detach: bool, dry_run: bool) -> int:
    from jobs.slurm import require_slurm, submit

    if dry_run:
        print(shown(order, inside))
        return 0
    require_slurm()
    if missing := missing_secrets(order, os.environ):
        raise SetupError(f"nothing was launched: {'; '.join(missing)}")
    _refuse_second(order)
    job = submit(make(order, write_order(order), inside))
    _say(f"job {job.job_id}, log {job.paths.stdout}")
    if detach:
        _say(f"follow it with `{order.call('logs')}`, end it with `{order.call('cancel')}`")
        print(job.job_id)
        return 0
    return _follow(job, order)


def shown(order: SlurmOrder, inside: Sequence[str] = INSIDE) -> str:
    """The script as sbatch gets it, and what the job reads, secrets masked wherever they stand."""
    from jobs.masking import Mask
    from jobs.slurm import script

    values = [os.environ.get(name, "") for name in order.secrets]
    file = next_file(order.folder)
    sent = make(order, file, inside)
    told = "\n".join(f"# {line}" for line in order.model_dump_json(indent=1).splitlines())
    text = f"{script(sent)}\n# It runs: {shlex.join(sent.step.command)}\n# which reads, in {file}:\n{told}"
    return Mask(values)(text)


def _refuse_second(order: SlurmOrder) -> None:
    """Two jobs must not share a run. Raises SetupError."""
    from jobs.slurm import find, is_alive, jobs_of, state_of

    for job_id in jobs_of(order.folder)[-1:]:
        state = state_of(find(order.folder, job_id))
        if is_alive(state):
            raise SetupError(
                f"job {job_id} of run {order.run} is {state}: follow it with `{order.call('logs')}`, end it with "
                f"`{order.call('cancel')}`, or give another --run"
            )


def _follow(job: Job[Any], order: SlurmOrder) -> int:
    from jobs.masking import Mask
    from jobs.slurm_follow import Follower

    mask = Mask(os.environ.get(name, "") for name in order.secrets)
    follower = Follower(job, say=_say)
    try:
        for line in follower.lines():
            print(mask(line), flush=True)
    except KeyboardInterrupt:
        _say(f"the job goes on: `{order.call('logs')}` follows it, `{order.call('cancel')}` ends it")
        return 130
    if follower.code == 0:
        _say(f"job {job.job_id}: {follower.ended}; {order.runs}/{order.run}")
        return 0
    raise TrainingFailed(f"job {job.job_id} ended: {follower.ended}; go on with `{order.again}`")


# -- questions about a run's jobs -----------------------------------------------------------------------------------


def _parse(name: str, argv: Sequence[str], about: str) -> tuple[argparse.Namespace, dict[str, str | bool]]:
    parser = argparse.ArgumentParser(prog=f"{_PROG} {name}", description=about)
    add_place(parser)
    if name == "resume":
        add_resources(parser, time_required=False)
        parser.add_argument("--detach", action="store_true", help="do not follow it")
        parser.add_argument("--dry-run", action="store_true", help="print the script that sbatch would get, and stop")
    else:
        parser.add_argument("--job", help="id of an earlier job of the run (default: the last one)")
    words, extra = split_extra(argv) if name == "resume" else (list(argv), {})
    options = parser.parse_args(words)
    check_name(options.run)
    return options, extra


def _chosen(options: argparse.Namespace) -> tuple[Job[Any], SlurmOrder]:
    """Raises ConfigError, JobsError."""
    from jobs.slurm import find, jobs_of

    folder = jobs_folder(options.runs, options.run)
    order, ids = last_order(folder), jobs_of(folder)
    if not ids or options.job not in (None, *ids):
        raise ConfigError(f"run {options.run} has no such job: {', '.join(ids) or 'none was sent'}")
    return find(folder, options.job or ids[-1]), order


def _status(argv: Sequence[str], _: Sequence[str]) -> int:
    from jobs.slurm import jobs_of, look
    from jobs.slurm_follow import outcome
    from jobs.slurm_step import ended_with

    options, _extra = _parse("status", argv, "How a run's job is.")
    job, order = _chosen(options)
    code = ended_with(order.folder, job.job_id)
    state, nodes = look(job)
    facts = {
        "run": order.run,
        "job": f"{job.job_id} (of {len(jobs_of(order.folder))})",
        "state": state,
        "ended": "-" if code is None else outcome(code),
        "nodes": nodes or "-",
        "step": _step_of(order),
        "limit": f"{order.minutes} min",
        "folder": f"{order.runs}/{order.run}",
        "log": str(job.paths.stdout),
    }
    for name, value in facts.items():
        print(f"{name:7} {value}")
    return 0


def _step_of(order: SlurmOrder) -> str:
    """Of the newest checkpoint that is on the shared disk. A copy is one file, which only another job unpacks."""
    from pathlib import Path

    from harness_trainer.run_copy import newest_step
    from harness_trainer.rundir import RunDir

    if order.scratch is not None:
        return "- (on the job's own disk; the log says)"
    step = newest_step(RunDir(Path(order.runs) / order.run))
    return "- (no checkpoint yet)" if step is None else str(step)


def _logs(argv: Sequence[str], _: Sequence[str]) -> int:
    options, _extra = _parse("logs", argv, "Show a job's log, and follow it to its end.")
    return _follow(*_chosen(options))


def _cancel(argv: Sequence[str], _: Sequence[str]) -> int:
    from jobs.slurm import cancel

    options, _extra = _parse(
        "cancel", argv, "End a job, with a checkpoint if there is time. Its run goes on with `resume`."
    )
    job, order = _chosen(options)
    cancel(job)
    _say(f"job {job.job_id} is told to end; `{order.again}` goes on")
    return 0


def _resume(argv: Sequence[str], inside: Sequence[str]) -> int:
    options, extra = _parse(
        "resume", argv, "A new job that goes on with a run: the same order, on other machines if given."
    )
    from jobs.slurm import checked_extra, minutes_of

    before = last_order(jobs_folder(options.runs, options.run))
    names = ("partition", "account", "constraint", "gpus", "cpus", "nodes")
    changed: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.time is not None:
        changed["minutes"] = minutes = minutes_of(options.time)
        changed["margin_s"] = margin_of(minutes, None)
    changed["extra"] = {**before.extra, **checked_extra(extra)}
    return _start(before.model_copy(update=changed), inside, detach=options.detach, dry_run=options.dry_run)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


ACTIONS: dict[str, Callable[[Sequence[str], Sequence[str]], int]] = {
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "resume": _resume,
}

"""SLURM through `submitit`: what sbatch is sent, and the questions that are asked of a job.

Owns the order (`Order`), its form as an sbatch script, and what SLURM's refusals mean. What runs in the job is
`slurm_step`'s, its log `slurm_follow`'s. Called by the command line.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jobs.errors import JobsError
from jobs.slurm_step import Step

if TYPE_CHECKING:
    from submitit import Job as Job  # under this name for callers too, who must not import the library themselves
    from submitit.core.core import PicklingExecutor

Cluster = Literal["slurm", "local"]  # local: submitit's own double, a process of this machine

# Parameters of sbatch that an order has a field for, or that submitit needs as they are.
_TAKEN = {
    "partition": "--partition",
    "account": "--account",
    "time": "--time",
    "gpus-per-node": "--gpus",
    "nodes": "--nodes",
    "cpus-per-task": "--cpus",
    "constraint": "--constraint",
    "job-name": "--run",
    "signal": "--margin",
}
_OURS = ("array", "error", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "wrap")
# Everything else is an end. PREEMPTED is one where SLURM cancels such jobs, and passing where it requeues them.
_ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "RESIZING", "SUSPENDED", "STOPPED")
_JOBS = "jobs.jsonl"
_ANSWER_S = 60.0  # for squeue; a controller that is overloaded answers nobody for minutes


@dataclass(frozen=True, slots=True)
class Order:
    """One job.

    Example: Order(run="math", folder=Path("/shared/runs/math.slurm"), step=Step(("python", "-m", ..)), minutes=360,
    margin_s=600, gpus=2, partition="a100", extra={"mem": "64G", "exclusive": True}).
    """

    run: str
    folder: Path  # of logs and submitit's files; on a disk that login node and machines share
    step: Step
    minutes: int  # time limit
    margin_s: int  # before it SLURM warns the job
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    nodes: int = 1
    gpus: int | None = None  # on each node; None = what the partition gives
    cpus: int | None = None  # likewise
    extra: Mapping[str, str | bool] = field(default_factory=dict)  # sbatch's own names, without the dashes
    setup: tuple[str, ...] = ()  # shell lines before the job's command
    requeues: int = 3  # times that the job is queued again at its time limit


def script(order: Order) -> str:
    """Exactly what `submit` would give to sbatch; asks nobody, and needs no SLURM here."""
    from submitit import SlurmExecutor

    class Anywhere(SlurmExecutor):  # whose constructor looks for srun
        @classmethod
        def affinity(cls) -> int:
            return 2

    executor = Anywhere(order.folder, max_num_timeout=order.requeues)
    with explained("the order"):
        executor.update_parameters(**_parameters(order))
    # There is no public way to the text without sending it; the library is pinned.
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


def submit(order: Order, cluster: Cluster = "slurm") -> Job[Any]:
    """Start it. Raises JobsError."""
    executor = _executor(order, cluster)
    with explained("sbatch"):
        order.folder.mkdir(parents=True, exist_ok=True)
        job = executor.submit(order.step)
        with (order.folder / _JOBS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": job.job_id, "submitted": time.time(), "minutes": order.minutes}) + "\n")
    return job


def jobs_of(folder: Path) -> list[str]:
    """Ids of the jobs that were sent with this folder, oldest first."""
    try:
        lines = (folder / _JOBS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [str(json.loads(line)["job"]) for line in lines if line.strip()]


def find(folder: Path, job_id: str) -> Job[Any]:
    """A job that another process has sent. Raises JobsError."""
    require_slurm()
    from submitit import SlurmJob

    return SlurmJob(folder, job_id)


def state_of(job: Job[Any]) -> str:
    """ "RUNNING", "CANCELLED by 1000", ... as SLURM says now; "UNKNOWN" where it does not."""
    return look(job)[0]


def look(job: Job[Any]) -> tuple[str, str]:
    """State, and nodes ("" = none). squeue knows living jobs, and others for minutes; sacct all, where it is kept."""
    from submitit import SlurmJob

    if not isinstance(job, SlurmJob):
        return str(job.state), ""
    asked = ["squeue", "--noheader", "--states=all", "--format=%T|%N", f"--jobs={job.job_id}"]
    with explained("squeue"):
        told = _told_by(asked)
    if lines := told.split():
        state, _, nodes = lines[0].partition("|")
        return state, nodes
    info = job.get_info(mode="force")
    return info.get("State") or "UNKNOWN", info.get("NodeList", "")


def _told_by(argv: Sequence[str], timeout_s: float = _ANSWER_S) -> str:
    """What a program of SLURM's prints; "" = it failed, or gave no answer in time. The next question may get one."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def is_alive(state: str) -> bool | None:
    """None = nobody knows."""
    word = (state.split() or ["UNKNOWN"])[0].rstrip("+")
    return None if word == "UNKNOWN" else word in _ALIVE


def cancel(job: Job[Any]) -> None:
    """Raises JobsError."""
    with explained(f"scancel {job.job_id}"):
        job.cancel(check=True)


def require_slurm() -> None:
    """Raises JobsError, and ModuleNotFoundError before anything is written."""
    import submitit  # noqa: F401

    logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns at each question where there is no sacct
    missing = [name for name in ("sbatch", "srun", "scancel", "squeue") if shutil.which(name) is None]
    if missing:
        raise JobsError(
            f"{', '.join(missing)} not found: run this on the cluster's login node (or `module load slurm`); "
            "--dry-run works anywhere"
        )


def minutes_of(text: str) -> int:
    """`90m`, `6h`, `2d`, and as SLURM writes it: `90`, `HH:MM:SS`, `D-HH[:MM[:SS]]`. Rounded up. Raises JobsError."""
    simple = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text)
    if simple:
        found = float(simple[1]) * {"m": 1, "h": 60, "d": 1440}[simple[2]]
    else:
        parts = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
        if parts is None:
            raise JobsError(f"--time {text!r} is no duration: write 90m, 6h, 2d, 6:00:00 or 1-12:00:00")
        days, first, second, third = (int(part or 0) for part in parts.groups())
        if parts[1] is not None or parts[4] is not None:  # days-hours:minutes:seconds, hours:minutes:seconds
            found = days * 1440 + first * 60 + second + third / 60
        else:  # minutes:seconds
            found = first + second / 60
    minutes = int(found) + (found > int(found))
    if minutes <= 0:
        raise JobsError(f"--time {text!r} is no time at all: write 90m, 6h, 2d, 6:00:00 or 1-12:00:00")
    return minutes


def checked_extra(extra: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """Parameters of sbatch's that may be given as they are. Raises JobsError."""
    for name in extra:
        if name in _TAKEN:
            raise JobsError(f"--slurm.{name}: give {_TAKEN[name]} instead")
        if name in _OURS:
            raise JobsError(f"--slurm.{name} cannot be given: submitit and the job's log need it as it is")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise JobsError(f"--slurm.{name}: give one of sbatch's long options, such as --slurm.mem 64G")
    return dict(extra)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Whatever goes wrong with SLURM, as JobsError: one line that says what to do."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        yield
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        said = " ".join(str(error).split())[:400] or type(error).__name__
        raise JobsError(
            f"{what}: SLURM refuses ({said}); `sinfo` shows partitions, `sacctmgr show assoc` accounts"
        ) from error
    except OSError as error:
        raise JobsError(f"{what}: {error.strerror or error} ({error.filename or 'no file'})") from error
    except (ValueError, RuntimeError) as error:
        raise JobsError(f"{what}: {' '.join(str(error).split())[:400]}") from error


def _executor(order: Order, cluster: Cluster) -> PicklingExecutor:
    """Raises JobsError."""
    from submitit import LocalExecutor, SlurmExecutor

    if cluster == "local":
        local = LocalExecutor(order.folder, max_num_timeout=order.requeues)
        # Its limit is a number of minutes too; tests give parts of one.
        local.update_parameters(
            timeout_min=order.minutes, signal_delay_s=order.margin_s, stderr_to_stdout=True, tasks_per_node=order.nodes
        )
        return local
    require_slurm()
    slurm = SlurmExecutor(order.folder, max_num_timeout=order.requeues)
    with explained("the order"):
        slurm.update_parameters(**_parameters(order))
    return slurm


def _parameters(order: Order) -> dict[str, Any]:
    """For submitit, in its names. One task on each node."""
    return {
        "job_name": f"harness-trainer-{order.run}",
        "time": order.minutes,
        "signal_delay_s": order.margin_s,
        "partition": order.partition,
        "account": order.account,
        "constraint": order.constraint,
        "nodes": order.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": order.gpus,
        "cpus_per_task": order.cpus,
        # Since SLURM 22.05 a step does not inherit this one from its job.
        "srun_args": None if order.cpus is None else [f"--cpus-per-task={order.cpus}"],
        "setup": list(order.setup) or None,
        "stderr_to_stdout": True,
        "wckey": None,  # submitit's own would be refused where such keys are checked
        # A site may not queue jobs again unless they ask for it.
        "additional_parameters": {"requeue": True, **order.extra} if order.requeues else dict(order.extra),
    }

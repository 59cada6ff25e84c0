"""What submitit runs in a job: the trainer as a child, told in time, and the job queued again.

Owns what SLURM's signals mean. The warning before the time limit (submitit's signal, SIGUSR2: NCCL and the learner use
SIGUSR1) is passed on; when the child has ended in order, submitit's own handler queues the job again. SIGTERM
(cancelled, preempted) is passed on and nothing is queued: if SLURM wants the job again, it does that itself. Pickled by
`slurm`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

STOPPED = 75  # exit code of a trainer that was told to end, and whose run goes on when it is started again
RANK = "{rank}"  # in a worker's command: the number of its node
NODES = "HARNESS_TRAINER_NODES"  # variable: host names of the job's nodes, the trainer's first, with commas
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Step:
    """One task of a job. The first node's is `command`, each other's `worker`, again and again until that has ended.

    Example: Step(("python", "-m", "harness_trainer.cli", "launch", "inside-slurm", "order-1.json")).
    """

    command: tuple[str, ...]
    worker: tuple[str, ...] = ()
    worker_reads: Path | None = None  # that the trainer writes first; one of an earlier job names other machines
    # After SIGTERM, for SLURM to end the job itself: one that is preempted and ends before that is not queued again.
    linger_s: float = 300.0
    worker_again_s: float = 5.0

    def __call__(self) -> int:
        """0, or SystemExit with the trainer's exit code, so that SLURM calls the job failed."""
        from submitit import JobEnvironment

        job = JobEnvironment()
        os.environ[NODES] = ",".join(job.hostnames)
        marker = ended_file(job.paths.folder, job.job_id)
        # A job that is queued again has the same id; SLURM counts its lives.
        life = os.environ.get("SLURM_RESTART_COUNT", "0")
        began = job.paths.folder / f"{job.job_id}_{life}_began"
        code = self._trainer(began, marker) if job.global_rank == 0 else self._worker(began, marker, job.global_rank)
        if code:
            sys.exit(code)
        return 0

    def checkpoint(self) -> Any:
        """Of submitit's protocol: what is queued again, as a DelayedSubmission. The run goes on from its folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _trainer(self, began: Path, marker: Path) -> int:
        marker.unlink(missing_ok=True)  # of an earlier life
        began.touch()
        warning = warning_signal()
        submitits = signal.getsignal(warning)
        child = _Child((warning, signal.SIGTERM, signal.SIGINT))  # the last is how the local executor cancels
        process = child.start(self.command)
        while (code := process.poll()) is None:
            # Handlers run between two looks; a blocking wait goes on where another thread got the signal.
            time.sleep(_POLL_S)
        # One that was warned before it could listen has died of it, and has done nothing yet.
        is_to_go_on = code in (STOPPED, -warning) and child.told == {warning}
        if is_to_go_on and callable(submitits):
            try:
                submitits(warning, None)  # queued again, it ends this process
            except Exception:  # once too often, or SLURM does not queue it again
                _write(marker, code)
                raise
        if signal.SIGTERM in child.told:
            time.sleep(self.linger_s)
        _write(marker, code)
        return code

    def _worker(self, began: Path, marker: Path, rank: int) -> int:
        """It ends whenever the trainer's learner does. Files tell the time: machines' clocks differ."""
        argv = [word.replace(RANK, str(rank)) for word in self.worker]
        # Not told of the warning: the trainer makes its last checkpoint with it.
        child = _Child((signal.SIGTERM,))

        def is_over() -> bool:
            return bool(child.told) or _is_since(marker, began)

        def is_ready() -> bool:
            return _is_since(began if self.worker_reads is None else self.worker_reads, began)

        while not is_over():
            if not is_ready():
                time.sleep(_POLL_S)
                continue
            process = child.start(argv)
            while process.poll() is None and not is_over():
                time.sleep(_POLL_S)
            if process.poll() is None:
                process.terminate()
                process.wait()
            again_at = time.monotonic() + self.worker_again_s
            while time.monotonic() < again_at and not is_over():
                time.sleep(_POLL_S)
        return 0


class _Child:
    """A process, and what this one was told, which is passed on to it."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.told: set[signal.Signals] = set()
        self._process: subprocess.Popen[bytes] | None = None
        for number in numbers:
            signal.signal(number, self._hear)

    def start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        for number in tuple(self.told):  # while there was none; another may come meanwhile
            self._process.send_signal(number)
        return self._process

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.told.add(signal.Signals(number))
        if self._process is not None:
            self._process.send_signal(number)  # of one that has ended, nothing


def warning_signal() -> signal.Signals:
    """The one that submitit tells SLURM to send before the time limit."""
    from submitit import JobEnvironment

    return signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]


def ended_file(folder: Path, job_id: str) -> Path:
    """Written when a job is over by itself, with its exit code: sacct may know nothing, or late."""
    return folder / f"{job_id}_ended.json"


def ended_with(folder: Path, job_id: str) -> int | None:
    """The exit code; None = it has not ended, or not by itself."""
    try:
        return int(json.loads(ended_file(folder, job_id).read_text(encoding="utf-8"))["code"])
    except FileNotFoundError:
        return None


def _write(marker: Path, code: int) -> None:
    temporary = marker.with_suffix(".tmp")
    temporary.write_text(json.dumps({"code": code}), encoding="utf-8")
    temporary.replace(marker)


def _is_since(file: Path, began: Path) -> bool:
    """Whether both are there and `file` was written later."""
    try:
        return file.stat().st_mtime >= began.stat().st_mtime
    except FileNotFoundError:
        return False

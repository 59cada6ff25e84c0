"""A SLURM job watched to its end: every line of its log once, and what it came to.

Owns when a job counts as over: its own note of its exit code says so at once; SLURM's state says so when it has been an
end twice in a row, because a job that is queued again shows one in passing. Called by the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.slurm import is_alive, state_of
from jobs.slurm_step import STOPPED, ended_with

if TYPE_CHECKING:
    from submitit import Job


@dataclass(frozen=True, slots=True)
class Pace:
    """In seconds. `poll`: between looks at the log; `look`: between questions to SLURM, which many people ask."""

    poll: float = 1.0
    look: float = 30.0


class Follower:
    """One job. `lines` yields its log until it has ended; `ended` is what it came to, for people."""

    def __init__(
        self,
        job: Job[Any],
        *,
        say: Callable[[str], None],
        pace: Pace = Pace(),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`say` tells a person what is not of the job's log: that it waits, runs, is queued again."""
        self.ended: str | None = None
        self.code: int | None = None  # None = it did not end by itself
        self._job = job
        self._folder = job.paths.folder
        self._say = say
        self._pace = pace
        self._clock = clock
        self._sleep = sleep
        self._look_at = clock()
        self._state = ""
        self._num_ends = 0

    def lines(self) -> Iterator[str]:
        tail = Tail(self._job.paths.stdout)
        while True:
            is_over = self._is_over()  # asked before the log is read: what is in it after the end is read too
            yield from tail.lines()
            if is_over:
                yield from tail.rest()
                return
            self._sleep(self._pace.poll)

    def _is_over(self) -> bool:
        self.code = ended_with(self._folder, self._job.job_id)
        if self.code is not None:
            self.ended = outcome(self.code)
            return True
        if self._clock() < self._look_at:
            return False
        self._look_at = self._clock() + self._pace.look
        state = state_of(self._job)
        if state != self._state:
            self._state = state
            unknown = " (neither squeue nor sacct knows it)" if is_alive(state) is None else ""
            self._say(f"job {self._job.job_id}: {state}{unknown}")
        self._num_ends = self._num_ends + 1 if is_alive(state) is False else 0
        self.ended = state
        return self._num_ends >= 2


class Tail:
    """A file that grows, by whole lines. It may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0  # bytes read
        self._begun = b""  # a line without its end

    def lines(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return
        self._at += len(new)
        *whole, self._begun = (self._begun + new).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")

    def rest(self) -> Iterator[str]:
        """The last line, once nothing follows."""
        if self._begun:
            yield self._begun.decode(errors="replace")
            self._begun = b""


def outcome(code: int) -> str:
    """Of an exit code that a job has noted."""
    if code == 0:
        return "the run is over"
    if code == STOPPED:
        return "stopped in order, before the run was over"
    return f"signal {-code}" if code < 0 else f"exit code {code}"

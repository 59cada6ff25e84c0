"""A job watched to its end: every line of its log once, in order, and what it came to.

Owns joining a log stream again that was cut, and the timeout where the service does not hold it. The client joins a
stream itself after short failures; it gives up after some, and takes a reply that broke off for the end. Then we ask
for the log anew, which the service replays from its start, and go on behind what was shown. Called by the command line.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobs.errors import JobsError
from jobs.hf import ENDED, cancel, explained, inspect, stage_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi, JobInfo

OVERDUE_S = 300.0  # over its timeout before we end a job ourselves: the service needs some time to do so
# Once a job is over the client does not say whether a stream broke off or ended.
_QUIET = 2
_GONE = "[the service no longer has the beginning of this log; lines may be missing here, or stand twice]"


@dataclass(slots=True)
class Shown:
    """The lines that were shown so far, as hashes: enough to find the place again in a log that starts anew."""

    hashes: list[int] = field(default_factory=list)

    def beyond(self, lines: Iterable[str]) -> Iterator[str]:
        """Of a log from its start, the lines that were not shown yet; each counts as shown once it is yielded."""
        known, at = len(self.hashes), 0
        for line in lines:
            if at < known and hash(line) == self.hashes[at]:
                at += 1
                continue
            if at < known:  # not the log that we know
                yield _GONE
                del self.hashes[at:]
                known = at
            self.hashes.append(hash(line))
            yield line


@dataclass(frozen=True, slots=True)
class Pace:
    """How patient following is, in seconds. `rejoin`: between two joins that brought nothing; `look`: at its state."""

    rejoin: float = 5.0
    look: float = 30.0
    overdue: float = OVERDUE_S
    unreachable: float = 600.0  # nothing was heard of the service for so long: given up


class Follower:
    """One job. `lines` yields its log until it has ended; `job` is what was last heard of it."""

    def __init__(
        self,
        api: HfApi,
        job: JobInfo,
        namespace: str,
        *,
        timeout_s: float | None,
        say: Callable[[str], None],
        pace: Pace = Pace(),
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`timeout_s` None = it is not ours to hold. `say` tells a person what is not of the job's log."""
        self.job = job
        self._api = api
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._say = say
        self._pace = pace
        self._clock = clock
        self._sleep = sleep
        self._shown = Shown()
        self._heard_at = clock()

    def lines(self) -> Iterator[str]:
        """Raises JobsError when the service is not heard of for long, or refuses."""
        num_quiet = 0  # readings in a row of the log of a job that is over, which brought nothing new
        with self._watching():
            while num_quiet < _QUIET:
                was_over = self._is_over()  # asked before the log is read: what is in it after the end is read too
                before = len(self._shown.hashes)
                yield from self._shown.beyond(self._stream())
                is_quiet = len(self._shown.hashes) == before
                num_quiet = num_quiet + 1 if is_quiet and was_over else 0
                if is_quiet and not was_over and not self._is_over():
                    self._sleep(self._pace.rejoin)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """A silent stream keeps us waiting inside the client, so the timeout is held from a thread."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(self._pace.look):
                with contextlib.suppress(JobsError):  # the stream's own failure says so soon
                    self._look()

        thread = threading.Thread(target=watch, name="job timeout", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    def _stream(self) -> Iterator[str]:
        """The log from its start until the stream ends, for whatever reason."""
        what = f"the log of job {self.job.id}"
        stream: Iterator[str] | None = None
        while True:
            try:
                with explained(what):
                    if stream is None:
                        stream = iter(
                            self._api.fetch_job_logs(job_id=self.job.id, namespace=self._namespace, follow=True)
                        )
                    line = next(stream, None)
            except JobsError as error:
                self._unheard(error)
                return
            if line is None:
                return
            self._heard_at = self._clock()
            yield line

    def _is_over(self) -> bool:
        try:
            self._look()
        except JobsError as error:
            self._unheard(error)
            return False
        return stage_of(self.job) in ENDED

    def _look(self) -> None:
        self.job = inspect(self._api, self.job.id, self._namespace)
        self._heard_at = self._clock()
        self._hold_timeout()

    def _unheard(self, error: JobsError) -> None:
        silent_s = self._clock() - self._heard_at
        if silent_s > self._pace.unreachable:
            raise JobsError(f"{error}; the job may still be running") from error

    def _hold_timeout(self) -> None:
        """End a job that the service let run on after its timeout: it goes on costing."""
        if self._timeout_s is None or self.job.started_at is None or stage_of(self.job) in ENDED:
            return
        over_s = self._clock() - self.job.started_at.timestamp() - self._timeout_s
        if over_s > self._pace.overdue:
            self._timeout_s = None  # once; what comes of it is the service's to do
            self._say(f"the job is {over_s:.0f} s over its timeout and still runs: ending it")
            cancel(self._api, self.job.id, self._namespace)


def how_it_ended(job: JobInfo) -> str:
    """ "ERROR: Job timeout"."""
    message = (job.status.message or "").strip()
    return f"{stage_of(job)}: {message}" if message else stage_of(job)

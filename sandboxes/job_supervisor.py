"""The process that runs one detached command of a local sandbox, so that its output and exit code outlive the caller.

Run as a script by `local_box` with the job's folder as its argument, never imported. It starts the command (on this
machine, or in a sealed box), keeps what it writes within the cap, ends it at its time limit, notes how it ended, and
says "started" (or what is wrong) on its standard output once it has started. SIGTERM ends the job. When the command is
over it stays only while something of it still writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started with -I -S: no site, no working directory

from sandboxes.base import SandboxError
from sandboxes.bubblewrap_box import BoxProcess, ask_to_run
from sandboxes.local_jobs import JobFolder, Order, StreamFile
from sandboxes.local_process import HostProcess, NotStarted
from sandboxes.processes import Traces, kill_owned

_PR_SET_CHILD_SUBREAPER = 36
_TERM_GRACE_S = 0.7
_READ_BYTES = 1 << 18


class Job:
    """One command and its pipes."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._order: Order = folder.order()
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, StreamFile] = {}
        self._running: HostProcess | BoxProcess
        self._watched = -1  # becomes readable when the command may be over
        self._over = False
        self._began = self._ends_at = float("inf")  # monotonic seconds
        self._terminated_at: float | None = None  # its time was up
        self._asked_to_end, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(writer)
        self._selector.register(self._asked_to_end, selectors.EVENT_READ)

    def start(self) -> None:
        """Raises NotStarted, or SandboxGone."""
        order = self._order
        timeout_s = float("inf") if order.timeout_s is None else order.timeout_s
        self._began = time.monotonic()
        self._ends_at = min(self._began + timeout_s, float("inf") if order.ends_at is None else order.ends_at)
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        stdio = [self._folder.open_stdin(), *(writer for _, writer in pipes)]
        try:
            if order.control is None:
                host = HostProcess(order.argv, cwd=order.cwd, env=order.env, command_id=order.command_id, stdio=stdio)
                self._running, self._watched = host, os.pidfd_open(host.pid)
            else:
                conn = ask_to_run(Path(order.control), order.uid, order.argv, order.cwd, order.env, stdio)
                boxed = BoxProcess(conn)
                self._running, self._watched = boxed, boxed.fileno()
        finally:
            for fd in stdio:
                os.close(fd)
        for name, (reader, _) in zip(("stdout", "stderr"), pipes, strict=True):
            os.set_blocking(reader, False)
            self._streams[reader] = StreamFile(self._folder.path, name, order.output_cap)
            self._selector.register(reader, selectors.EVENT_READ)
        self._selector.register(self._watched, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the command is over and nothing writes any more. Raises NotStarted when a box could not start it."""
        while self._streams or not self._over:
            for key, _ in self._selector.select(self._patience()):
                if key.fd == self._asked_to_end:
                    self._end()  # and leave no exit code
                    return
                if key.fd == self._watched:
                    self._look()
                elif not self._pump(key.fd):
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    del self._streams[key.fd]
            if not self._over:
                self._hold_time()

    def _patience(self) -> float | None:
        if self._over:
            return None
        if self._terminated_at is not None:
            return max(0.0, self._terminated_at + _TERM_GRACE_S - time.monotonic())
        return None if self._ends_at == float("inf") else max(0.0, self._ends_at - time.monotonic())

    def _hold_time(self) -> None:
        now = time.monotonic()
        if self._terminated_at is not None:
            if now >= self._terminated_at + _TERM_GRACE_S:
                self._end()
                self._note_end()
        elif now >= self._ends_at:
            self._terminated_at = now
            self._running.terminate()

    def _look(self) -> None:
        if not isinstance(self._running, BoxProcess) or self._running.read():
            self._end_rest_of_a_late_one()
            self._note_end()

    def _end_rest_of_a_late_one(self) -> None:
        if self._terminated_at is not None:  # it obeyed SIGTERM, but what it started may not have
            self._end()

    def _note_end(self) -> None:
        late = self._terminated_at is not None
        while any(self._pump(fd, wait=False) for fd in self._streams):
            pass  # what it left in the pipes belongs to it
        duration_s = time.monotonic() - self._began
        self._folder.end(None if late else self._running.exit_code, timed_out=late, duration_s=duration_s)
        self._over = True
        self._selector.unregister(self._watched)
        if isinstance(self._running, HostProcess):
            os.close(self._watched)

    def _pump(self, fd: int, *, wait: bool = True) -> bool:
        """Take what is there; False at the end of the stream (or, without `wait`, when there is nothing now)."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return wait
        if data:
            self._streams[fd].append(data)
        return bool(data)

    def _end(self) -> None:
        self._running.end()
        if isinstance(self._running, HostProcess):
            kill_owned(self._order.command_id, Traces(parent=os.getpid()))


def main(path: str) -> int:
    # What the command leaves behind becomes ours instead of init's, and is found again when the job is to be ended.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = JobFolder(Path(path))
    job = Job(folder)
    folder.sign()
    try:
        job.start()
        _tell("started")
        job.run()
    except NotStarted as e:
        why = f"no folder {folder.order().cwd} to run in" if e.what == "cwd" else f"cannot be run: {e}"
        StreamFile(folder.path, "stderr", 10_000).append(f"sandbox: {why}\n".encode())
        folder.end(126, timed_out=False, duration_s=0.0)
        _tell("started")
    except SandboxError as e:
        _tell(str(e))
        return 1
    return 0


def _tell(text: str) -> None:
    """To the caller, who may be gone."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode())
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

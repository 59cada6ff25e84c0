"""The log of a job, which its service reads: lines go into a queue, and one thread writes them.

Owns that a log which takes no more, with an error (a full disk, a reader that is gone) or by blocking (a reader that
hangs), neither stops the process that logs nor changes its exit code: such lines are counted, the next that is taken
says how many are missing, and what is still in the way at the end is left. Who logs what is `in_job`'s.
"""

from __future__ import annotations

import io
import os
import queue
import threading
from collections.abc import Callable
from typing import IO

_CAPACITY = 10_000  # lines: what a busy run says in minutes


class JobLog:
    """Lines to `out`. `say` never waits; `close` waits `wait_s` at the most."""

    def __init__(self, out: IO[str]) -> None:
        self._write = _writer(out)
        self._lines: queue.Queue[str | None] = queue.Queue(_CAPACITY)
        self._num_lost = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="job log", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lose()

    def close(self, wait_s: float = 5.0) -> None:
        """Write what is queued, as far as the log takes it. Nothing can be said after."""
        try:
            self._lines.put(None, timeout=wait_s)
        except queue.Full:
            return  # it hangs: the thread, a daemon, ends with the process
        self._thread.join(wait_s)

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            with self._lock:
                lost, self._num_lost = self._num_lost, 0
            late = f"[job] WARNING: the log took no lines for a while: up to {lost} are missing here\n" if lost else ""
            try:
                self._write(f"{late}{line}\n")
            except OSError:
                self._lose(lost + 1)

    def _lose(self, lines: int = 1) -> None:
        with self._lock:
            self._num_lost += lines


def _writer(out: IO[str]) -> Callable[[str], object]:
    """Past the stream's buffer where there is a file: Python flushes that at its end, once more, and makes a failure of
    it the exit code, and a thread that hangs in it an abort."""
    try:
        file = out.fileno()
    except io.UnsupportedOperation:  # in memory
        return out.write

    def write(text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(file, data) :]

    return write

"""Taking what a command writes, without letting it fill memory or hold up its caller.

Owns the cut of long output (`Kept`: the first and the last bytes up to a cap, the middle counted and dropped; every
backend) and one pipe per stream of a local command (`Capture`). When a local command is over its pipe stays open and is
read on at a slow pace, so that a server it started in the background neither blocks nor dies of SIGPIPE; `Capture`'s
methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 18
_SLOW_S = 0.05  # pause between reads once nobody wants the output any more


class Kept:
    """Bytes of one stream: half of `cap` from its start, half from its end."""

    def __init__(self, cap: int) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._head_cap, self._tail_cap = cap - cap // 2, cap // 2
        self.num_cut = 0

    def add(self, data: bytes) -> None:
        room = self._head_cap - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        extra = len(self._tail) - self._tail_cap
        if extra > 0:
            self.num_cut += extra
            del self._tail[:extra]

    @property
    def truncated(self) -> bool:
        return self.num_cut > 0

    def data(self) -> bytes:
        """What was kept, with a marker line where bytes were cut."""
        marker = f"\n[... {self.num_cut} bytes cut ...]\n".encode() if self.truncated else b""
        return b"".join((self._head, marker, self._tail))

    def text(self) -> str:
        """`data` with undecodable bytes escaped."""
        return self.data().decode(errors="backslashreplace")


class Capture:
    """One stream of one command: give `write_fd` to the child, `start`, and `finish` when the command is over."""

    def __init__(self, cap: int, on_end: Callable[[Capture], object]) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        with contextlib.suppress(OSError):  # an unprivileged user's share of pipe memory may be used up
            fcntl.fcntl(self._read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._kept = Kept(cap)
        self._finished = False

    def close_write_end(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def start(self) -> None:
        self._loop.add_reader(self._read_fd, self._on_readable)

    def _on_readable(self) -> None:
        self._read()
        if self._finished and self._read_fd >= 0:
            self._loop.remove_reader(self._read_fd)
            self._loop.call_later(_SLOW_S, self._resume)

    def _resume(self) -> None:
        if self._read_fd >= 0:
            self.start()

    def _read(self) -> bool:
        """Take what is there; False when there is nothing more for now."""
        try:
            data = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        if not self._finished:
            self._kept.add(data)
        return True

    def finish(self) -> None:
        """The command is over: take what it left in the pipe, drop what comes later."""
        for _ in range(2 * _PIPE_BYTES // _READ_BYTES):  # bounded: a background child may be writing on
            if self._read_fd < 0 or not self._read():
                break
        self._finished = True

    @property
    def truncated(self) -> bool:
        return self._kept.truncated

    def text(self) -> str:
        """What was kept, undecodable bytes escaped, with a marker line where bytes were cut."""
        return self._kept.text()

    def close(self) -> None:
        """Idempotent."""
        self.close_write_end()
        if self._read_fd >= 0:
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1
            self._on_end(self)

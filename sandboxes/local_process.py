"""One running command of a local sandbox, directly on this machine; `bubblewrap` has the other kind.

Owns how it is started, waited for and ended. Its environment and limits are `local_launch`'s, its output and its
time `local_commands`'; of a job, output and time are `job_supervisor`'s, which calls it too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from sandboxes.processes import Proc, Traces, find_below, is_running, kill_owned, read_proc


def own_user() -> str:
    """The name of the user that this process runs as."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


class NotStarted(Exception):
    """The command could not be started. `what` is "cwd" (its working directory) or "exec" (the rest)."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(os.strerror(number))
        self.what = what


def search_path() -> list[str]:
    """This machine's PATH, with a python3."""
    # Relative entries would let the agent's folder decide which program runs.
    path = [entry for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(entry)]
    if shutil.which("python3", path=os.pathsep.join(path)) is None:
        path.append(os.path.dirname(sys.executable))
    return path


@contextlib.contextmanager
def in_memory(data: bytes | None) -> Iterator[int]:
    """A descriptor to read the data from, as a file and not a pipe, so that nobody has to feed it. None = /dev/null."""
    fd = os.open(os.devnull, os.O_RDONLY) if data is None else os.memfd_create("data", os.MFD_CLOEXEC)
    try:
        if data is not None:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(data)
            os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


class Running(Protocol):
    """A started command, of either kind."""

    @property
    def exit_code(self) -> int:
        """By the shell's convention (128 + N = signal N). Only after `over` or `end`."""
        ...

    async def over(self) -> None:
        """Return when the command itself has ended. Raises NotStarted."""
        ...

    def terminate(self) -> None:
        """SIGTERM to its process group."""
        ...

    def end(self) -> None:
        """SIGKILL everything of the command. Blocking, seconds at most; raises LifecycleError or SandboxError."""
        ...

    def release(self) -> None:
        """Nobody will ask about the command any more; what it left running goes on. Idempotent."""
        ...


class HostProcess:
    """A command as a child of this process. `command_id` is the last id in its marker variable."""

    def __init__(
        self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], command_id: str, stdio: Sequence[int]
    ) -> None:
        self._command_id = command_id
        self._below: list[Proc] = []  # what it had started when its time was up
        try:
            self._popen = subprocess.Popen(
                argv, cwd=cwd, env=env, stdin=stdio[0], stdout=stdio[1], stderr=stdio[2], start_new_session=True
            )
        except OSError as e:
            raise NotStarted("cwd" if e.filename == cwd else "exec", e.errno or errno.EIO) from e
        except ValueError as e:  # a NUL byte
            raise NotStarted("exec", errno.EINVAL) from e

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int:
        code = self._popen.wait()
        return code if code >= 0 else 128 - code

    async def over(self) -> None:
        """Without reaping and without a thread."""
        import asyncio  # half of a job supervisor's start, and never used there

        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(self._popen.pid)
        except OSError:  # a kernel without pidfd
            while not self._has_exited():
                await asyncio.sleep(0.02)
            return
        over = asyncio.Event()
        loop.add_reader(fd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def _has_exited(self) -> bool:
        return os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def terminate(self) -> None:
        # What it started is noted while it still has its parent: an orphan in a session of its own, with an emptied
        # environment, could not be told from anybody's process.
        self._below = [proc for proc in map(read_proc, find_below(self._popen.pid)) if proc is not None]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGTERM)

    def end(self) -> None:
        try:
            for proc in self._below:
                if is_running(proc.pid, proc.start_ticks):
                    kill_owned(self._command_id, Traces(parent=proc.pid), limit_s=1.0)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(proc.pid, signal.SIGKILL)
            # the session is ours until we reap its leader
            kill_owned(self._command_id, Traces(session=self._popen.pid), limit_s=1.0)
        finally:
            if self._popen.poll() is None:
                self._popen.kill()
            self._popen.wait()

    def release(self) -> None:
        self._popen.poll()

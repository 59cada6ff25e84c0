"""The worker of a run: forks a process per rollout, and ends and buries them. Called by `__main__`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import traceback

from .agent import check
from .peer import Message
from .rollout import drive

_MAX_PACKET = 65_536
_MAX_FILE = 1_000_000_000  # bytes that a rollout's process may write to one file: an agent may flood its log


class Worker:
    """Forks a process per rollout. No threads and no event loop here, or they would be half there in each of them."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._rollouts: dict[int, str] = {}  # pid -> rollout
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Until the other side is gone, or SIGTERM."""
        try:
            control = self._control.fileno()
            while True:
                ready, _, _ = select.select([control, self._woken], [], [])
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._bury()
                if control in ready and not self._obey():
                    return
        finally:
            for pid in self._rollouts:
                _kill(pid)

    def _obey(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self._control, _MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            return False
        message = json.loads(packet)
        if "fork" in message:
            self._fork(message, fds[0])
        else:
            for pid in [pid for pid, rollout in self._rollouts.items() if rollout == message["kill"]]:
                _kill(pid)
        return True

    def _fork(self, message: Message, fd: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory: this rollout's bad luck
            os.close(fd)
            print(f"no process for rollout {message['fork']}: {error}", file=sys.stderr)
            self._tell_end(message["fork"], 1)
            return
        if pid == 0:
            code = 1
            try:
                self._become(message, fd)
                code = 0
            except BaseException:  # the log is all there is to tell of it
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        os.close(fd)
        self._rollouts[pid] = message["fork"]

    def _become(self, message: Message, fd: int) -> None:
        """In the new process: nothing of the worker's stays open, and its output is its own."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        self._control.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE, _MAX_FILE))
        log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True)
        asyncio.run(drive(socket.socket(fileno=fd)))

    def _bury(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if (rollout := self._rollouts.pop(ended[0], None)) is not None:
                    self._tell_end(rollout, os.waitstatus_to_exitcode(ended[1]))

    def _tell_end(self, rollout: str, status: int) -> None:
        self._control.send(json.dumps({"ended": rollout, "status": status}).encode())


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def main(args: list[str]) -> None:
    # A signal to the group that we were started in would also end the rollouts while they are being ended in order.
    os.setpgid(0, 0)
    if args[0] == "check":
        problem = check(json.loads(args[1]))
        print(json.dumps({"problem": problem}))
        return
    from harbor.llms.litellm_config import litellm  # noqa: F401 - the slow half of an agent's start, once for all

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    control = socket.socket(fileno=int(args[1]))
    control.send(json.dumps({"version": importlib.metadata.version("harbor")}).encode())
    Worker(control).serve()

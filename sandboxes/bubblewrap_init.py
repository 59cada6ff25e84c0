"""Process 1 of a box that bubblewrap made: starts the commands that the owner asks for, and ends with the last asker.

Handed to a Python as an open file in memory, so that no file of ours lies in the box; imports only the standard
library. The owner and the supervisors of detached jobs are connected through a Unix socket that the box cannot see;
`bubblewrap_box` is their end. Each connection carries one request, a JSON packet with file descriptors:

    {"op": "hold"}      the box is to live; answered by {"ports": [N, ..]}, with their listening sockets
    {"op": "run"}       descriptors: request (argv, cwd, env as JSON), stdin, stdout, stderr.
                        Answers: {"started": true} or {"errno": N, "what": "cwd" | "exec"}, then {"exit": code}.
                        "T" sends SIGTERM to its process group; "K" ends all it started, answered by {"left": num}
    {"op": "kill_all"}  ends every other process of the box; answered by {"left": num}

When the asker of "run" hangs up before the end, everything of its command is ended: nobody wants it any more. When
nobody is connected any more, this process ends, and with it, by the kernel, every process of the box.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_FIRST_ASKER_S = 60.0
_KILL_LIMIT_S = 3.0
_prctl = ctypes.CDLL(None).prctl


def _children_signal() -> int:
    """A descriptor that becomes readable when a child has ended."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


def _say(conn: socket.socket, answer: dict[str, Any], fds: list[int] | None = None) -> None:
    try:
        socket.send_fds(conn, [json.dumps(answer).encode()], fds or [])
    except OSError:
        return  # hung up: noticed where the connection is watched


class Init:
    """The loop of process 1. Commands run below a process of their own each, see `_Shim`."""

    def __init__(self, listener: socket.socket, services: list[socket.socket]) -> None:
        self._listener = listener
        self._services = services
        self._askers: dict[int, socket.socket] = {}  # by descriptor
        self._shims: dict[int, int] = {}  # pid -> the asker's descriptor
        self._ended = _children_signal()
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(self._ended, select.POLLIN)

    def run(self) -> None:
        had_any = False
        while self._askers or not had_any:
            events = self._poll.poll(None if had_any else _FIRST_ASKER_S * 1000)
            if not events:
                return
            for fd, _ in events:
                if fd == self._ended:
                    _drain(fd)
                    self._bury()
                elif fd == self._listener.fileno():
                    self._answer(self._listener.accept()[0])
                    had_any = True
                elif fd in self._askers:
                    self._hang_up(fd)

    def _bury(self) -> bool:
        """Collect what has ended; whether nothing runs any more."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid in self._shims:  # or its asker would wait for an answer from nobody
                self._hang_up(self._shims.pop(pid))

    def _hang_up(self, fd: int) -> None:
        conn = self._askers.pop(fd, None)
        if conn is not None:
            self._poll.unregister(fd)
            conn.close()

    def _answer(self, conn: socket.socket) -> None:
        conn.settimeout(5.0)
        try:
            packet, fds, _, _ = socket.recv_fds(conn, 4096, 8, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            packet, fds = b"", []
        if not packet:
            conn.close()
            return
        self._askers[conn.fileno()] = conn
        self._poll.register(conn, 0)  # hanging up is always reported
        op = json.loads(packet)["op"]
        if op == "hold":
            ports = [service.getsockname()[1] for service in self._services]
            _say(conn, {"ports": ports}, [service.fileno() for service in self._services])
        elif op == "kill_all":
            _say(conn, {"left": self._kill_all()})
        else:
            self._fork(conn, fds)
        for fd in fds:
            os.close(fd)

    def _fork(self, conn: socket.socket, fds: list[int]) -> None:
        pid = os.fork()
        if pid:
            self._shims[pid] = conn.fileno()
            return
        code = 1
        try:
            for other in (self._listener, *self._services, *self._askers.values()):
                if other is not conn:
                    other.close()
            _Shim(conn).run(*fds)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())  # into the box's log; the asker sees the connection end
        finally:
            os._exit(code)

    def _kill_all(self) -> int:
        end = time.monotonic() + _KILL_LIMIT_S
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # everything but this process; nothing escapes by forking
            if self._bury():
                return 0
            if time.monotonic() > end:
                return len(_below(os.getpid()))
            time.sleep(0.002)


class _Shim:
    """One command's own reaper: whatever the command starts, and however it hides, stays below this process."""

    def __init__(self, conn: socket.socket) -> None:
        self._conn = conn
        self._leader = 0
        self._exit_code: int | None = None
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self, request: int, *stdio: int) -> None:
        ended = _children_signal()
        with os.fdopen(request, "rb") as file:
            order = json.loads(file.read())
        if not self._start(order, stdio):
            return
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(self._conn, select.POLLIN)
        while not self._bury():
            for fd, _ in poll.poll():
                if fd == ended:
                    _drain(ended)
                elif not self._obey():
                    poll.unregister(self._conn)
                    self._conn.close()

    def _start(self, order: dict[str, Any], stdio: tuple[int, ...]) -> bool:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self._leader = os.fork()
        if self._leader == 0:
            _become(order, stdio, writer)
        os.close(writer)
        for fd in stdio:
            os.close(fd)
        with os.fdopen(reader, "rb") as file:
            problem = file.read()
        _say(self._conn, json.loads(problem) if problem else {"started": True})
        return not problem

    def _obey(self) -> bool:
        """Do what the asker wants; False when it hung up."""
        try:
            packet = self._conn.recv(64)
        except OSError:
            packet = b""
        if packet == b"T" and self._exit_code is None:
            os.killpg(self._leader, signal.SIGTERM)
        elif packet == b"K" or (not packet and self._exit_code is None):
            _say(self._conn, {"left": self._kill()})
        return bool(packet)

    def _bury(self) -> bool:
        """Collect what has ended, tell the exit code; whether nothing is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._leader:
                code = os.waitstatus_to_exitcode(status)
                self._exit_code = code if code >= 0 else 128 - code
                _say(self._conn, {"exit": self._exit_code})

    def _kill(self) -> int:
        end = time.monotonic() + _KILL_LIMIT_S
        while not self._bury():
            below = _below(os.getpid())
            for pid in below:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > end:
                return len(below)
            time.sleep(0.002)
        return 0


def _become(order: dict[str, Any], stdio: tuple[int, ...], report: int) -> None:
    """In the new process: turn into the command. Never returns."""
    what = "exec"
    try:
        os.setsid()
        for number in range(1, signal.NSIG):
            if signal.getsignal(number) not in (None, signal.SIG_DFL):
                signal.signal(number, signal.SIG_DFL)
        for target, fd in enumerate(stdio):
            os.dup2(fd, target)
        what = "cwd"
        os.chdir(order["cwd"])
        what = "exec"
        os.execve(order["argv"][0], order["argv"], order["env"])
    except BaseException as e:
        problem = {"errno": getattr(e, "errno", None) or errno.EINVAL, "what": what}
        os.write(report, json.dumps(problem).encode())
    finally:
        os._exit(126)


def _below(ancestor: int) -> list[int]:
    """Every process that descends from `ancestor`."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    text = file.read()
            except OSError:
                continue
            parents[int(name)] = int(text[text.rfind(b")") + 2 :].split()[1])
    found = {ancestor}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return sorted(found - {ancestor})


def main(order: dict[str, Any]) -> None:
    """`order`: listener (descriptor), uid (to become; null = stay), ports (of the box's loopback to listen on)."""
    if order["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[order["uid"]] * 3)
        os.setresuid(*[order["uid"]] * 3)
    _prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # nobody in the box may trace us or reach into our descriptors
    os.umask(0o022)
    os.closerange(3, order["listener"])
    os.closerange(order["listener"] + 1, 256)
    os.set_inheritable(order["listener"], False)
    listener = socket.socket(fileno=order["listener"])
    Init(listener, [socket.create_server(("127.0.0.1", port), backlog=4096) for port in order["ports"]]).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

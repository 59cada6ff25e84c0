"""The owner's end of a box that bubblewrap made: starting it, and asking its process 1 for commands.

`bubblewrap_init` is the other end and describes the packets; what a box sees is `bubblewrap`'s. Called by `local_box`,
for its commands by `local_launch`, and for detached jobs by `job_supervisor`; imports little, so that the latter starts
fast. Blocking, except where it says otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sandboxes.base import SandboxError, SandboxGone
from sandboxes.bubblewrap import Shape, arguments, find, interpreter
from sandboxes.local_process import NotStarted, in_memory
from sandboxes.processes import find_below, read_proc

_INIT = Path(__file__).with_name("bubblewrap_init.py")
_SOCKET = "box.sock"
_LOG = "box.log"
_MONITOR = "monitor.json"
_ANSWER_S = 60.0  # a loaded machine may take long to start it
_KILLED_S = 10.0
_MAX_PORTS = 8


def connect(control: Path) -> socket.socket:
    """A connection to the box's process 1. Raises SandboxGone when there is none."""
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(control) as folder:
            conn.connect(f"{folder}/{_SOCKET}")
    except OSError as e:
        conn.close()
        raise SandboxGone(f"the sandbox is gone: process 1 of its box has ended ({e.strerror})") from e
    return conn


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Another name of a folder; a socket's address has room for 107 bytes only."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def ask_to_run(
    control: Path, uid: int | None, argv: Sequence[str], cwd: str, env: Mapping[str, str], stdio: Sequence[int]
) -> socket.socket:
    """Ask for a command; the connection on which its fate is told (`BoxProcess` reads it). `uid` is the box's."""
    conn = connect(control)
    try:
        if uid is not None:
            for fd in stdio[1:]:
                os.fchown(fd, uid, uid)  # pipes of ours, which scripts open again as /dev/stderr
        with in_memory(json.dumps({"argv": list(argv), "cwd": cwd, "env": dict(env)}).encode()) as request:
            socket.send_fds(conn, [b'{"op": "run"}'], [request, *stdio])
    except OSError as e:
        conn.close()
        raise SandboxGone(f"the sandbox is gone: process 1 of its box does not answer ({e.strerror})") from e
    return conn


class BoxProcess:
    """A command in a box. See `local_process.Running`."""

    def __init__(self, conn: socket.socket) -> None:
        self._conn = conn
        self._code: int | None = None
        self._ended = False
        self._lock = threading.Lock()
        conn.setblocking(False)

    def fileno(self) -> int:
        return self._conn.fileno()

    @property
    def exit_code(self) -> int:
        return 137 if self._code is None else self._code  # no word of its end: it was killed with everything else

    async def over(self) -> None:
        import asyncio  # half of a job supervisor's start, and never used there

        loop = asyncio.get_running_loop()
        while not self._ended:
            try:
                packet = await loop.sock_recv(self._conn, 4096)
            except ConnectionResetError:  # an end with something of ours unread
                packet = b""
            self._take(packet)

    def read(self) -> bool:
        """For callers without an event loop, when the descriptor is readable; whether the command is over."""
        try:
            packet = self._conn.recv(4096)
        except ConnectionResetError:
            packet = b""
        self._take(packet)
        return self._ended

    def _take(self, packet: bytes) -> None:
        answer = json.loads(packet) if packet else {}
        if "errno" in answer:
            self._ended = True
            raise NotStarted(answer["what"], answer["errno"])
        self._code = answer.get("exit", self._code)
        self._ended = self._ended or not packet or "exit" in answer

    def terminate(self) -> None:
        self._send(b"T")

    def end(self) -> None:
        """SIGKILL everything that the command started. Raises SandboxError when something survives."""
        with self._lock:
            if self._conn.fileno() < 0:
                return
            self._send(b"K")
            left = self._left()
            self._conn.close()
        if left:
            raise SandboxError(f"{left} processes of a command in the sandbox survived SIGKILL")

    def _left(self) -> int:
        until = time.monotonic() + _KILLED_S
        while select.select([self._conn], [], [], max(0.0, until - time.monotonic()))[0]:
            try:
                packet = self._conn.recv(4096)
            except OSError:
                packet = b""
            answer = json.loads(packet) if packet else {"left": 0}
            if "left" in answer:
                return int(answer["left"])
        raise SandboxError(f"a command in the sandbox did not end within {_KILLED_S:g} s of SIGKILL")

    def release(self) -> None:
        with self._lock:
            self._conn.close()

    def _send(self, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended this moment
            self._conn.send(packet)


class SealedBox:
    """A running box, as its owner holds it: while `start`ed, and not closed, it lives."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.services: dict[int, socket.socket] = {}  # by port: listening in the box's network
        self._hold: socket.socket | None = None
        self._monitor: subprocess.Popen[bytes] | None = None
        self._monitor_pid = 0

    def start(self, env: Mapping[str, str]) -> None:
        """Join the box if it runs (its first owner died), else start it. `env` is process 1's. Raises SandboxError."""
        with contextlib.suppress(SandboxGone):
            self._hold_on(connect(self.shape.control))
            self._monitor_pid = _known_monitor(self.shape.control)
            return
        found = find()
        if found.problem:
            raise SandboxError(found.problem)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            with _short(self.shape.control) as folder:
                (self.shape.control / _SOCKET).unlink(missing_ok=True)
                listener.bind(f"{folder}/{_SOCKET}")
            listener.listen(1024)
            order = {"listener": listener.fileno(), "uid": self.shape.uid, "ports": self.shape.ports}
            with in_memory(_INIT.read_bytes()) as code, open(self.shape.control / _LOG, "ab") as log:
                program = [str(interpreter()), "-I", "-S", f"/proc/self/fd/{code}", json.dumps(order)]
                self._monitor = subprocess.Popen(
                    [*arguments(found, self.shape), *program],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[listener.fileno(), code],
                    start_new_session=True,
                )
            self._monitor_pid = self._monitor.pid
            _note_monitor(self.shape.control, self._monitor.pid)
        try:
            self._hold_on(connect(self.shape.control))
        except SandboxError as e:
            raise SandboxError(f"cannot start a box with bubblewrap: {self._last_words() or e}") from e

    def _hold_on(self, conn: socket.socket) -> None:
        try:
            conn.settimeout(_ANSWER_S)
            conn.send(b'{"op": "hold"}')
            packet, fds, _, _ = socket.recv_fds(conn, 4096, _MAX_PORTS, socket.MSG_CMSG_CLOEXEC)
            if not packet:
                raise OSError("it ended at once")
        except OSError as e:
            conn.close()
            raise SandboxGone(f"process 1 of the box did not answer: {e}") from e
        conn.setblocking(False)
        self._hold = conn
        ports = json.loads(packet)["ports"]
        self.services = {port: socket.socket(fileno=fd) for port, fd in zip(ports, fds, strict=True)}

    def _last_words(self) -> str:
        lines = (self.shape.control / _LOG).read_text(errors="backslashreplace").strip().splitlines()
        return lines[-1] if lines else ""

    def alive(self) -> bool:
        """Never blocks."""
        if self._hold is None:
            return False
        try:
            return bool(self._hold.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def run(self, argv: Sequence[str], cwd: str, env: Mapping[str, str], stdio: Sequence[int]) -> BoxProcess:
        return BoxProcess(ask_to_run(self.shape.control, self.shape.uid, argv, cwd, env, stdio))

    def kill_all(self) -> None:
        """End every process of the box but its process 1. Raises SandboxError when something survives."""
        with connect(self.shape.control) as conn:
            try:
                conn.settimeout(_KILLED_S)
                conn.send(b'{"op": "kill_all"}')
                packet = conn.recv(4096)
            except OSError as e:
                raise SandboxError(f"process 1 of the box did not answer: {e}") from e
        left = json.loads(packet)["left"] if packet else 0
        if left:
            raise SandboxError(f"{left} processes of the sandbox survived SIGKILL")

    def pids(self) -> list[int]:
        """Of all processes in the box, as this machine numbers them; process 1 and our helpers are among them."""
        return find_below(self._monitor_pid) if self._monitor_pid else []

    @property
    def monitor_pid(self) -> int | None:
        """Every process of the box descends from it."""
        return self._monitor_pid or None

    def let_go(self) -> None:
        """With no job in it, the box ends now. Idempotent."""
        for service in self.services.values():
            service.close()
        self.services = {}
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def wait(self) -> None:
        """For the bubblewrap of a box that was ended, if it is our child."""
        if self._monitor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._monitor.wait(5.0)


def _note_monitor(control: Path, pid: int) -> None:
    proc = read_proc(pid)
    (control / _MONITOR).write_text(json.dumps([pid, proc.start_ticks if proc else 0]))


def _known_monitor(control: Path) -> int:
    """The pid of the bubblewrap that a dead owner started; 0 = unknown."""
    try:
        pid, ticks = json.loads((control / _MONITOR).read_text())
    except (OSError, ValueError):
        return 0
    proc = read_proc(pid)
    return pid if proc is not None and proc.start_ticks == ticks else 0

"""Parts of a run that live in other containers: the near side of `part_host`.

Owns the connection that is one life of such a part, and where the hosts' sockets are. To `parts` a remote process is
like any other. Called by `run`, and by the containers' entry when a run is over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness_trainer.errors import SetupError
from harness_trainer.supervision.part_host import Lines

PARTS = "HARNESS_TRAINER_PARTS"  # variable: the folder of the hosts' sockets; unset = every part runs on this machine
CONNECT_S = 60.0  # a container that is started again needs some seconds, and its host ends the earlier part first
_LOST = -9  # the exit code of a part whose host is gone: nobody can tell
_POLL_S = 0.2


class RemoteHost:
    """One host, by its socket. Example: `RemoteHost.find("engine")` in a container of compose.yaml."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def find(cls, name: str) -> RemoteHost | None:
        """The host of that part; None = the part runs on this machine."""
        folder = os.environ.get(PARTS)
        return RemoteHost(Path(folder) / f"{name}.sock") if folder else None

    @property
    def folder(self) -> Path:
        """Which the host's container sees at the same path."""
        return self._path.parent

    def address(self, timeout_s: float = CONNECT_S) -> tuple[str, int]:
        """Where its part is to listen, as this container names it: ("engine", 8000). Raises SetupError."""
        stream, _, address = self._connect(timeout_s)
        stream.close()
        host, _, port = address.rpartition(":")
        return host, int(port)

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path, kind: str
    ) -> RemoteProcess:
        """Start the part; `env` is laid over its container's own. Raises SetupError."""
        stream, lines, _ = self._connect(CONNECT_S)
        try:
            order = {"argv": list(argv), "env": dict(env), "cwd": str(cwd), "log": str(log_path), "kind": kind}
            lines.write(start=order)
            answer = lines.read(CONNECT_S) or {}
        except (EOFError, ValueError, OSError) as error:
            stream.close()
            raise SetupError(f"the {kind}'s container ended at once ({error}): look at its log") from error
        if "started" not in answer:
            stream.close()
            raise SetupError(f"the {kind} cannot be started in its container: {answer.get('failed', 'no answer')}")
        return RemoteProcess(stream, lines, int(answer["started"]))

    def finish(self, timeout_s: float = 5.0) -> None:
        """The run is over: the host ends, and with it its container. Quiet when it has ended already."""
        with contextlib.suppress(SetupError, OSError):
            stream, lines, _ = self._connect(timeout_s)
            with stream:
                lines.write(finish=True)

    def _connect(self, timeout_s: float) -> tuple[socket.socket, Lines, str]:
        """Until the host is free: it ends an earlier part first."""
        deadline, why = time.monotonic() + timeout_s, ""
        while True:
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                stream.connect(str(self._path))
                lines = Lines(stream)
                hello = lines.read(max(0.0, deadline - time.monotonic()))
                if hello is not None:
                    return stream, lines, str(hello["address"])
                why = "it is busy with another run"
            except (EOFError, ValueError, KeyError, OSError) as error:
                why = getattr(error, "strerror", None) or str(error)
            stream.close()
            if time.monotonic() > deadline:
                raise SetupError(
                    f"the container of the {self._path.stem} does not answer at {self._path} ({why}): "
                    f"`docker compose ps` shows whether it runs, `docker compose logs {self._path.stem}` why not"
                )
            time.sleep(_POLL_S)


class RemoteProcess:
    """See `process.PartProcess`. `pid` is that in its own container."""

    def __init__(self, stream: socket.socket, lines: Lines, pid: int) -> None:
        self.pid = pid
        self._stream = stream
        self._lines = lines
        self._code: int | None = None
        self._lock = threading.Lock()

    @property
    def returncode(self) -> int | None:
        with self._lock:
            self._listen(0.0)
            return self._code

    def alive(self) -> bool:
        return self.returncode is None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code, or None when it still runs after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.05)
        return self.returncode

    def stop(self, grace_s: float = 5.0, *, successor: bool = False) -> int | None:
        with self._lock:
            if self._code is None:
                with contextlib.suppress(OSError):
                    self._lines.write(stop=grace_s)
                self._listen(grace_s + 10.0)  # the host kills after the grace, and says when all is gone
                if self._code is None:
                    self._code = _LOST
            self._stream.close()  # whatever the host makes of it, its part ends with the connection
            return self._code

    def _listen(self, timeout_s: float) -> None:
        """Note the end of the part, if it is told within that time."""
        if self._code is not None:
            return
        try:
            message = self._lines.read(timeout_s)
            if message is not None and "ended" in message:
                code = message["ended"]
                self._code = _LOST if code is None else int(code)
        except (EOFError, ValueError, OSError):
            self._code = _LOST

"""The first process of a container in which one part of a run (engine, gateway) runs: starts it when it is told to.

    python -m harness_trainer.supervision.part_host --socket FILE --address HOST:PORT

A connection to the socket is one life of the part: JSON lines, first `hello` from here, then an order. The part ends
with the connection, so it never outlives its supervisor, and nobody but the supervisor decides when one starts: it must
have made the gateway hold before an engine is there. Connections are served one after the other.

Owns the protocol's far side, the container's end (`finish`, or nobody there for long); `remote` is the near side,
`part_health` Docker's look at it. Only the standard library and `sandboxes.lifecycle`: a few MB beside the part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness_trainer.supervision.part_health import host_file, state_file
from sandboxes.lifecycle import LifecycleError, OwnedProcess, start_process

ALONE_S = 120.0  # nobody says what to do for so long after somebody was there: the run is dead, and so is the container
_POLL_S = 0.1
_ORDER_S = 30.0  # for the first line of a connection
_MOST_BYTES = 1 << 20


class Lines:
    """JSON objects, one a line, over a stream socket. `read` raises EOFError when the other side has gone."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._buffer = b""

    def write(self, **message: Any) -> None:
        self._stream.sendall(json.dumps(message).encode() + b"\n")

    def read(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, None when none came in time. Raises EOFError, ValueError, OSError."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._stream], [], [], left)[0]:
                return None
            chunk = self._stream.recv(1 << 16)
            if not chunk:
                raise EOFError("the other side closed the connection")
            self._buffer += chunk
            if len(self._buffer) > _MOST_BYTES:
                raise ValueError("a message is too long")
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a message is no object")
        return message


class PartHost:
    """`address` is where the part is to listen, as other containers name it. `registry` = records of what it starts."""

    def __init__(self, path: Path, address: str, *, registry: Path, alone_s: float = ALONE_S) -> None:
        self._path = path
        self._address = address
        self._registry = registry
        self._alone_s = alone_s
        self._state = state_file(path)
        self._stopping = False

    def serve(self) -> int:
        """Until the run is over, nobody has come back for `alone_s`, or a signal. 0, or Docker would start it again."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        here = host_file(self._state)
        for file in (self._state, here):
            file.unlink(missing_ok=True)
        with _listening(self._path) as server:
            here.touch()
            last = None  # monotonic seconds when somebody was last there; None = nobody has been yet
            while not self._stopping:
                if select.select([server], [], [], _POLL_S)[0]:
                    connection, _ = server.accept()
                    with connection:
                        was_there, finished = self._serve_one(Lines(connection))
                    if finished:
                        return 0
                    last = time.monotonic() if was_there else last
                elif last is not None and time.monotonic() - last > self._alone_s:
                    print(f"part_host: no supervisor for {self._alone_s:g} s; this run is over", file=sys.stderr)
                    return 0
        return 0

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _serve_one(self, lines: Lines) -> tuple[bool, bool]:
        """Whether somebody gave an order (a health check does not), and whether that was to finish."""
        try:
            lines.write(hello=1, address=self._address)
            order = lines.read(_ORDER_S) or {}
            if "finish" in order:
                return True, True
            if "start" not in order:
                return False, False
            self._run(lines, order["start"])
            return True, False
        except (EOFError, ValueError, KeyError, TypeError, OSError) as error:
            if not isinstance(error, EOFError | ConnectionError):
                print(f"part_host: a message was not understood: {error}", file=sys.stderr)
            return False, False

    def _run(self, lines: Lines, order: dict[str, Any]) -> None:
        """One life of the part: until it ends, or whoever ordered it says so or goes."""
        try:
            process = start_process(
                order["argv"],
                env={**os.environ, **order["env"]},
                cwd=Path(order["cwd"]),
                log_path=Path(order["log"]),
                registry=self._registry,
                kind=order["kind"],
            )
        except (LifecycleError, OSError) as error:
            lines.write(failed=str(error))
            return
        grace_s = 0.0
        try:
            self._state.write_text(json.dumps({"pid": process.pid}))
            lines.write(started=process.pid)
            grace_s = self._watch(lines, process)
        finally:
            code = process.stop(grace_s)
            self._state.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # who wanted to know may have gone
            lines.write(ended=code)

    def _watch(self, lines: Lines, process: OwnedProcess) -> float:
        """Seconds that the part is given to end."""
        while process.alive():
            if self._stopping:
                return 5.0
            try:
                message = lines.read(_POLL_S)
            except (EOFError, OSError):
                return 5.0
            if message is not None and "stop" in message:
                return float(message["stop"])
        return 0.0


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of an earlier container: the volume outlives it
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        path.chmod(0o600)
        server.listen(16)
        yield server


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="part_host", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--address", default="", help="HOST:PORT of the part, as other containers reach it")
    args = parser.parse_args(argv)
    registry = Path(tempfile.gettempdir()) / "owned"  # dies with the container, like everything in it
    print(f"part_host: waiting for orders at {args.socket}", flush=True)
    return PartHost(args.socket, args.address, registry=registry).serve()


if __name__ == "__main__":
    sys.exit(main())

"""A door in front of a Docker engine's socket: requests pass, until one is held for a test.

The product is pointed at it by its address, like at any engine, so a test can kill or cancel it exactly between two
calls: before the engine sees a request, or after it has done what was asked and nobody knows yet.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from pathlib import Path
from typing import Self

# Of a sandbox's own container; the relay's name ends in "-net".
BOX = rb"sandbox-[\w-]+(?<!-net)"
CREATE = rb"POST /v[\d.]+/containers/create\?name=" + BOX + rb"(&| )"
START = rb"POST /v[\d.]+/containers/" + BOX + rb"/start"
REMOVE = rb"DELETE /v[\d.]+/containers/" + BOX + rb"\?"
EXEC = rb"POST /v[\d.]+/containers/" + BOX + rb"/exec"
RELAY_START = rb"POST /v[\d.]+/containers/[0-9a-f]{64}/start"  # the relay's is started by its id


class EngineGate:
    """Threads between a socket of its own and the engine's. A context manager."""

    def __init__(self, engine: str, path: Path) -> None:
        self.address = f"unix://{path}"
        self.held = threading.Event()  # a request is waiting
        self._engine = engine.removeprefix("unix://")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._pattern: re.Pattern[bytes] | None = None
        self._after = False
        self._skip = 0
        self._go = threading.Event()
        self._dropped = False
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()
        self._listener.close()
        for end in self._open:
            _close(end)

    def hold(self, request: bytes, *, after: bool = False, skip: int = 0) -> None:
        """Hold the next request that begins like this (but for the first `skip`): itself, or the answer (`after`)."""
        self.held.clear()
        self._go = threading.Event()
        self._dropped = False
        self._after, self._skip, self._pattern = after, skip, re.compile(request)

    def release(self) -> None:
        """Let what is held go on."""
        self._pattern = None
        self._go.set()

    def drop(self) -> None:
        """What is held never arrives."""
        self._dropped = True
        self.release()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                engine = socket.socket(socket.AF_UNIX)
                engine.connect(self._engine)
                self._open += [client, engine]
                answer_held, ended = threading.Event(), []
                for source, sink, inward in ((client, engine, True), (engine, client, False)):
                    args = (source, sink, inward, answer_held, ended)
                    threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        inward: bool,
        answer_held: threading.Event,
        ended: list[bool],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if inward and self._wanted(data):
                    if self._after:
                        answer_held.set()
                    elif not self._wait():
                        break
                elif not inward and answer_held.is_set():
                    answer_held.clear()
                    if not self._wait():
                        break
                sink.sendall(data)
            else:
                ended.append(inward)
                if len(ended) < 2:
                    sink.shutdown(socket.SHUT_WR)  # half of a connection may end before the other
                    return
        _close(source)
        _close(sink)

    def _wanted(self, data: bytes) -> bool:
        with self._lock:
            if self._pattern is None or not self._pattern.match(data):
                return False
            if self._skip:
                self._skip -= 1
                return False
            return not self.held.is_set()

    def _wait(self) -> bool:
        go = self._go
        self.held.set()
        go.wait()
        return not self._dropped


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()

"""One command in a container, from its start to the end of its output. Blocking: each has a thread of its own.

Owns the connection that the engine turns into the command's streams, and the frames on it. `docker_sandbox` is the only
caller.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Any

import docker

from sandboxes.box_calls import Exec, OnOutput

_READ_BYTES = 1 << 18
_HEADER = struct.Struct(">BxxxL")  # stream, length; see "Attach to a container" in the engine's API reference
_SMALL = 1 << 15  # bytes that a fresh connection surely takes at once
_SETTLE_S = 2.0  # between the end of the output and the exit code


class _Wire:
    """The connection of one command, by whichever way the SDK reaches the engine: a socket, or a process of ssh's."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._ssh = getattr(raw, "proc", None)
        self._socket = getattr(raw, "_sock", raw)
        self._socket.settimeout(None)

    def send(self, data: bytes) -> None:
        """All of the command's standard input. What it does not read is lost."""
        with contextlib.suppress(OSError, ValueError):
            if self._ssh is not None:
                self._raw.sendall(data)
                self._ssh.stdin.close()
            else:
                self._socket.sendall(data)
                self._socket.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        with contextlib.suppress(OSError):  # over already
            if self._ssh is not None:
                self._ssh.terminate()
            else:
                self._socket.shutdown(socket.SHUT_RDWR)


def can_end_input(api: docker.APIClient) -> bool:
    """Whether a command's input can be ended before its output: not over TLS, as Python has it."""
    return not api.base_url.startswith("https://")


class Stream:
    """`run` is called once, in a thread; `leave` from any other, at any time."""

    def __init__(self, api: docker.APIClient, container: str, command: Exec, on_output: OnOutput) -> None:
        self._api, self._container, self._command, self._on_output = api, container, command, on_output
        self._lock = threading.Lock()
        self._wire: _Wire | None = None
        self._left = False
        self.first = b""  # what came first of the output: an engine says there why it could not start the command

    def run(self) -> int | None:
        """See `BoxCalls._exec`. Raises one of `ENGINE_ERRORS`."""
        command = self._command
        execution = self._api.exec_create(
            self._container,
            list(command.argv),
            stdin=bool(command.stdin),
            user=command.user or "",
            workdir=command.cwd,
            environment=dict(command.env),
        )["Id"]
        if self._left:
            return None
        raw = self._api.exec_start(execution, socket=True)
        response = raw._response
        # The SDK hands out the bare socket, but the buffer above it may have taken the first output with the headers.
        buffered = response.raw._fp.fp
        try:
            wire = self._open(raw)
            if wire is None or self._pump(wire, buffered):
                return None
        finally:
            self._close(raw, response)
        return None if self._left else self._exit_code(execution)

    def leave(self) -> None:
        """Stop listening; `run` returns soon."""
        with self._lock:
            self._left = True
            if self._wire is not None:
                self._wire.cut()

    def _open(self, raw: Any) -> _Wire | None:
        with self._lock:
            self._wire = _Wire(raw)
            return None if self._left else self._wire

    def _close(self, raw: Any, response: Any) -> None:
        with self._lock:
            if self._wire is not None:
                self._wire.cut()
            self._wire = None
        for end in (response.close, raw.close):
            with contextlib.suppress(OSError, ValueError):  # the one may have closed the other
                end()

    def _pump(self, wire: _Wire, buffered: Any) -> bool:
        """Feed the command and take its output; whether the output was left before its end."""
        data = self._command.stdin
        if len(data) > _SMALL:  # its output has to be read meanwhile
            threading.Thread(target=wire.send, args=(data,), name="stdin", daemon=True).start()
        elif data:
            wire.send(data)
        buffer, stream, left = bytearray(), 1, 0
        while chunk := buffered.read1(_READ_BYTES):
            buffer += chunk
            at = 0
            while True:
                if left:
                    part = bytes(buffer[at : at + left])
                    at, left = at + len(part), left - len(part)
                    self.first = self.first or part[:500]
                    if part and self._on_output(stream, part):
                        return True
                if left or len(buffer) - at < _HEADER.size:
                    break
                stream, left = _HEADER.unpack_from(buffer, at)
                at += _HEADER.size
            del buffer[:at]
        return False

    def _exit_code(self, execution: str) -> int:
        end = time.monotonic() + _SETTLE_S
        while True:
            seen = self._api.exec_inspect(execution)
            if seen["ExitCode"] is not None and not seen["Running"]:
                return int(seen["ExitCode"])
            if time.monotonic() > end:
                raise OSError("the engine closed a command's output and still calls it running")
            time.sleep(0.02)

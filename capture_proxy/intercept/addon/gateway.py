"""What the proxy tells the gateway, the refusals, and what it asks it, whether a session's token is known.

Owns the events file, the thread that posts, and the answers about tokens that are still believed. What is refused, and
what an answer leads to, is `hooks`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

from .hosts import Address

_log = logging.getLogger(__name__)
_KNOWN_S, _UNKNOWN_S = 60.0, 5.0  # how long the gateway's word on a token is believed
_MAX_TOKENS = 10_000
_MAX_DETAIL = 300  # characters


class Events:
    """What was refused, in a log file at once and on the gateway's admin port as soon as possible.

    A file line is {"time", "kind", "detail", "session": 12 digits of the token's SHA-256, or null}. The post is a
    thread's work with a bounded queue; what could not be posted is counted, and the count goes into the file.
    """

    def __init__(self, path: str, admin: Address | str | None, admin_key: str, *, room: int = 1000) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._file = open(fd, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed in `close`
        self._admin, self._admin_key = admin, admin_key
        self._queue: queue.Queue[dict[str, object] | None] = queue.Queue(room)
        self._num_lost = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._post_all, daemon=True)
        if admin is not None:
            self._thread.start()

    def add(self, kind: str, detail: str, token: str | None) -> None:
        detail = detail[:_MAX_DETAIL]
        self._write(kind, detail, token)
        if self._admin is None or token is None:
            return
        try:
            # With its time the gateway can tell a repeated event from another one of the same words.
            event = {"session_token": token, "kind": kind, "detail": detail, "at": time.time()}
            self._queue.put_nowait(event)
        except queue.Full:
            self._lose()

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(2)
        with self._lock:
            self._num_lost += sum(event is not None for event in self._queue.queue)
        self._report_lost()

    def _write(self, kind: str, detail: str, token: str | None) -> None:
        session = hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()[:12] if token else None
        line = {"time": round(time.time(), 3), "kind": kind, "detail": detail, "session": session}
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            _log.error("cannot write an event: %s", error)

    def _post_all(self) -> None:
        while (event := self._queue.get()) is not None:
            if not self._post(event):
                self._lose()
            if self._queue.empty():
                self._report_lost()

    def _post(self, event: dict[str, object]) -> bool:
        assert self._admin is not None
        headers = {"authorization": f"Bearer {self._admin_key}", "content-type": "application/json"}
        for pause_s in (0, 1, 2, 4, 8, 15, 30):  # a gateway that restarts is back within these
            time.sleep(pause_s)
            status = ask(self._admin, "POST", "/events", headers, json.dumps(event), timeout_s=5)
            if status is not None and status < 500:
                return status < 300
        return False

    def _lose(self) -> None:
        with self._lock:
            self._num_lost += 1

    def _report_lost(self) -> None:
        with self._lock:
            lost, self._num_lost = self._num_lost, 0
        if lost:
            self._write("events_lost", f"{lost} events did not reach the gateway", None)


class Tokens:
    """Which session tokens the gateway knows; asked once in a while per token."""

    def __init__(self, gateway: Address, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway = gateway
        self._clock = clock
        self._asked: dict[str, tuple[float, asyncio.Future[int | None]]] = {}

    async def status(self, token: str) -> int | None:
        """The gateway's answer to this token: 401 unknown, 403 over, None not to be had, anything else known."""
        until, answer = self._asked.get(token, (0.0, None))
        if answer is None or (answer.done() and self._clock() >= until):
            if len(self._asked) >= _MAX_TOKENS:
                self._asked.clear()
            headers = {"authorization": f"Bearer {token}"}
            asking = asyncio.to_thread(ask, self._gateway, "GET", "/v1/models", headers, None, timeout_s=10)
            answer = asyncio.ensure_future(asking)
            self._asked[token] = (self._clock() + _UNKNOWN_S, answer)
            status = await asyncio.shield(answer)
            if status not in (None, 401, 403):
                self._asked[token] = (self._clock() + _KNOWN_S, answer)
        return await asyncio.shield(answer)


class UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host)


def ask(
    address: Address | str, method: str, path: str, headers: dict[str, str], body: str | None, *, timeout_s: float
) -> int | None:
    """The status of one small HTTP request to a port or a Unix socket; None = no answer. Blocking."""
    if isinstance(address, str):
        connection: http.client.HTTPConnection = UnixConnection(address, 80, timeout=timeout_s)
        headers = {"host": "localhost", **headers}
    else:
        connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as error:
        _log.warning("%s does not answer: %s", address, error)
        return None
    finally:
        connection.close()

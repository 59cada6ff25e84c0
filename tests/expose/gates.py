"""A gateway and what may stand before it, for the tests of `expose`: real HTTP on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from capture_proxy.errors import UnknownSession
from tests.http_serving import in_thread

BODY = str(UnknownSession("no session has this API key")).encode()


class Gate:
    """Answers everybody with `status` and `body`. `asked` holds each request's path and Authorization."""

    def __init__(self, status: int = 401, body: bytes = BODY) -> None:
        self.status, self.body = status, body
        self.asked: list[tuple[str, str | None]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def gate(status: int = 401, body: bytes = BODY) -> Iterator[Gate]:
    it = Gate(status, body)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            it.asked.append((self.path, self.headers.get("authorization")))
            self.send_response(it.status)
            self.send_header("Content-Length", str(len(it.body)))
            self.end_headers()
            self.wfile.write(it.body)

        def log_message(self, *_: object) -> None:
            pass

    with in_thread(Handler) as port:
        it.port = port
        yield it

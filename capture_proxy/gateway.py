"""HTTP for agents: the dialects' routes as one ASGI app on one set of rooms.

Owns routing, keep-alive, hang-ups and the last word on what an agent is sent. What a body means is the dialect's, what
may be done the session's, how a call runs the turn's, the trainer's port `admin`'s. Called by `__main__` and tests.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from re import Pattern
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from capture_proxy.bodies import read_body
from capture_proxy.calls import CallEvent, Listener, Started, Text
from capture_proxy.dialects import all_dialects
from capture_proxy.dialects.base import Call, Dialect, Head, Route, StreamWriter
from capture_proxy.errors import CaptureError, NotFound
from capture_proxy.http_server import connection_of
from capture_proxy.pipeline import Pipeline
from capture_proxy.session import Live
from capture_proxy.turn import Arrival
from capture_proxy.types import Turn

_log = logging.getLogger(__name__)
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


@dataclass
class Gateway(Pipeline):
    """The rooms behind both ports.

    `keepalive_s` is the longest silence of a stream in seconds; `max_body` bounds a request body in bytes after
    decompression.
    """

    keepalive_s: float = 10.0
    max_body: int = 64 * 2**20
    dialects: Sequence[Dialect] = field(default_factory=all_dialects)


def agent_app(gateway: Gateway) -> AgentApp:
    """The port that agents reach: the dialects, and nothing else."""
    return AgentApp(gateway)


_Served = list[tuple[Dialect, Route]]


class AgentApp:
    """The ASGI app. Plain paths are found by lookup, those with parameters by their pattern."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._plain: dict[tuple[str, str], _Served] = {}
        self._patterns: dict[tuple[str, str], tuple[Pattern[str], Mapping[str, Any], _Served]] = {}
        for dialect in gateway.dialects:
            for route in dialect.routes:
                self._add(dialect, route)

    def _add(self, dialect: Dialect, route: Route) -> None:
        key = (route.method, route.path)
        if "{" not in route.path:
            self._plain.setdefault(key, []).append((dialect, route))
            return
        if key not in self._patterns:
            pattern, _, convertors = compile_path(route.path)
            self._patterns[key] = (pattern, convertors, [])
        self._patterns[key][2].append((dialect, route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        served, params = self._find(scope["method"], scope["path"])
        query = QueryParams(scope["query_string"]) if scope["query_string"] else {}
        head = Head(params, query, _headers(scope["headers"]))
        known: Sequence[Dialect] = [dialect for dialect, _ in served] or self._gateway.dialects
        # Where several dialects have a path, the client's headers tell which one is meant.
        chosen = next((i for i, dialect in enumerate(known) if dialect.speaks(head)), 0)
        dialect = known[chosen]
        try:
            if not served:
                raise NotFound(f"{scope['method']} {scope['path']} is not served here")
            response = await self._answer(dialect, served[chosen][1], head, receive)
        except CaptureError as error:
            response = self._error(dialect, error)
        except ClientDisconnect:
            return  # nobody is left to read an answer
        except Exception as error:
            _log.exception("%s %s failed in an unforeseen way", scope["method"], scope["path"])
            response = self._error(dialect, CaptureError(f"the capture proxy failed: {type(error).__name__}"))
        await response(scope, receive, send)

    def _find(self, method: str, path: str) -> tuple[_Served, dict[str, Any]]:
        if (served := self._plain.get((method, path))) is not None:
            return served, {}
        for (wanted, _), (pattern, convertors, found) in self._patterns.items():
            if wanted == method and (match := pattern.match(path)):
                return found, {name: convertors[name].convert(value) for name, value in match.groupdict().items()}
        return [], {}

    async def _answer(self, dialect: Dialect, route: Route, head: Head, receive: Receive) -> _Answer:
        # The token is looked at before the body: a stranger's upload is not worth reading.
        live = await self._gateway.sessions.resolve(dialect.token(head))
        if route.kind != "call" or live.session.policy.at_limit != "reply":
            self._gateway.sessions.check_open(live)
        if route.kind == "call":
            return await self._call(dialect, head, receive, live)
        if route.kind == "count":
            call = dialect.parse(head, await read_body(head.headers, receive, self._gateway.max_body))
            return _json(dialect.count(await self._gateway.turns.count(live, call)))
        return await self._models(dialect, head)

    async def _call(self, dialect: Dialect, head: Head, receive: Receive, live: Live) -> _Answer:
        body = await read_body(head.headers, receive, self._gateway.max_body)
        call = dialect.parse(head, body)
        arrival = Arrival(body, hashlib.blake2b(body, digest_size=16).digest(), says_retry(head.headers))
        listener = await self._gateway.turns.start(live, call, dialect.name, arrival)
        return _CallAnswer(self._gateway, dialect, call, listener)

    async def _models(self, dialect: Dialect, head: Head) -> Response:
        models = await self._gateway.turns.models()
        wanted = head.path.get("model")
        if wanted is None:
            return _json(dialect.models(models))
        found = [m for m in models if m.get("id") == wanted]
        if not found:
            raise NotFound(f"the engine serves no model {wanted!r}")
        return _json(dialect.model(found[0]))

    def _error(self, dialect: Dialect, error: CaptureError) -> Response:
        self._gateway.metrics.refused.add(error.code)
        return Response(dialect.error(error), error.status, media_type="application/json")


_Answer = Callable[[Scope, Receive, Send], Awaitable[None]]


def _headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """By lower-case name; of a header that is sent twice, the first."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


def says_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client's SDK says that it sends this request again (the Stainless SDKs count from 0)."""
    return headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")


class _CallAnswer:
    """Answers one call, streaming or not. Leaving the call is what makes it end when the agent hangs up."""

    def __init__(self, gateway: Gateway, dialect: Dialect, call: Call, listener: Listener) -> None:
        self._gateway, self._dialect, self._call, self._listener = gateway, dialect, call, listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listener = self._listener
        connection = connection_of(scope)
        connection.watch(listener.hang_up)
        try:
            await (self._stream(send) if self._call.stream else self._whole(send))
        except OSError:
            _log.debug("the agent of %s went away while it was answered", listener.turn_id)
        finally:
            connection.unwatch(listener.hang_up)
            listener.leave()

    async def _whole(self, send: Send) -> None:
        event = await self._listener.last()
        if event is None:
            return
        if isinstance(event, CaptureError):
            await self._send_error(send, event)
        else:
            await _send_whole(send, 200, self._dialect.reply(self._call, event))
            self._acknowledge()

    async def _stream(self, send: Send) -> None:
        listener = self._listener
        writer = self._dialect.stream(listener.turn_id, self._call)
        head_sent = False
        while True:
            event = await listener.next(self._gateway.keepalive_s)
            if listener.gone:
                return
            if not head_sent:
                if isinstance(event, CaptureError):  # nothing is out yet: it can still be a plain HTTP error
                    await self._send_error(send, event)
                    return
                headers = [(b"content-type", writer.media_type.encode()), *_STREAM_HEADERS]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                head_sent = True
            if event is None:
                await _send_chunk(send, writer.keepalive())
                continue
            data, last = b"", False
            while event is not None and not last:  # what piled up while the agent was slow leaves as one write
                data += _written(writer, event)
                last = isinstance(event, Turn | CaptureError)
                if isinstance(event, CaptureError):
                    self._gateway.metrics.refused.add(event.code)
                event = None if last else listener.ready()
            if data or last:
                await _send_chunk(send, data, more=not last)
            if last:
                self._acknowledge()
                return

    async def _send_error(self, send: Send, error: CaptureError) -> None:
        self._gateway.metrics.refused.add(error.code)
        await _send_whole(send, error.status, self._dialect.error(error))

    def _acknowledge(self) -> None:
        if not self._listener.gone:
            self._listener.acknowledge()


def _written(writer: StreamWriter, event: CallEvent) -> bytes:
    if isinstance(event, Text):
        return writer.delta(event.content, event.reasoning)
    if isinstance(event, Turn):
        return writer.finish(event)
    if isinstance(event, Started):
        return writer.start(event.num_prompt_tokens)
    return writer.error(event)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _send_whole(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await _send_chunk(send, body, more=False)


async def _send_chunk(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})

"""The wire: one call per connection, read whole as far as it is judged, passed on anew, and its answer passed back.

Owns HTTP framing on both sides (h11), the questions to the engine whether a named object is ours, and streams. Nothing
is kept alive: after one call both connections close, so no second call can hide behind a first that was allowed. A
command's connection becomes a raw stream only once the engine has said so.

Which calls pass is `routes`', what bodies hold `bodies`'. Run by `__main__`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Collection
from typing import Any
from urllib.parse import quote

import h11

from sandboxes.socket_proxy import bodies
from sandboxes.socket_proxy.routes import Call, Kind, Refused, decide, is_our_image, is_ours

log = logging.getLogger(__name__)

_CHUNK = 1 << 16
_HEAD_S = 30.0  # for a call to be told whole; archives and builds take their time afterwards
_LINGER_S = 1.0  # for a refused client to stop sending
_BODY_BYTES = 1 << 20
_FRAMING = {b"transfer-encoding", b"content-length"}
_HOP = _FRAMING | {b"connection", b"keep-alive", b"upgrade", b"expect", b"host", b"te"}
_PATHS: dict[Kind, str] = {
    "container": "/containers/{}/json",
    "network": "/networks/{}",
    "volume": "/volumes/{}",
    "image": "/images/{}/json",
    "exec": "/exec/{}/json",
}


class Wire:
    """One side of a call. `role` is ours."""

    def __init__(self, role: type[h11.CLIENT] | type[h11.SERVER], reader: Any, writer: Any) -> None:
        self.conn = h11.Connection(role, max_incomplete_event_size=1 << 17)
        self.reader: asyncio.StreamReader = reader
        self.writer: asyncio.StreamWriter = writer

    async def next(self) -> Any:
        """The next event. Raises EOFError when a client has gone, h11's errors when it speaks no HTTP; ConnectionError
        for both of an engine."""
        while True:
            if self.conn.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue"))
            try:
                event = self.conn.next_event()
            except h11.RemoteProtocolError as error:
                if self.conn.our_role is h11.SERVER:
                    raise
                raise ConnectionError(f"its answer broke off ({error})") from error
            if event is h11.NEED_DATA:
                self.conn.receive_data(await self.reader.read(_CHUNK))
                continue
            if isinstance(event, h11.ConnectionClosed):
                raise EOFError
            return event

    async def send(self, event: Any) -> None:
        data = self.conn.send(event)
        if data:
            self.writer.write(data)
            await self.writer.drain()

    def close(self) -> None:
        self.writer.close()


class Door:
    """`engine` is the real socket, `volumes` the named volumes that relays may mount."""

    def __init__(self, engine: str, volumes: Collection[str]) -> None:
        self._engine = engine
        self._volumes = frozenset(volumes)
        self._serving: set[object] = set()  # nobody else holds on to the tasks of connections

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client: one call. Never raises for what the client does."""
        client = Wire(h11.SERVER, reader, writer)
        task = asyncio.current_task()
        self._serving.add(task)
        try:
            await self._call(client)
        except Refused as refusal:
            log.warning("refused: %s", refusal)
            await self._answer(client, 403, _said(f"refused by the socket proxy: {refusal}"))
        except OSError as error:
            await self._answer(client, 502, _said(f"the engine's socket failed: {error}"))
        except (EOFError, h11.ProtocolError, TimeoutError, ValueError) as error:
            await self._answer(client, 400, _said(f"not a call of the engine's API: {error}"))
        finally:
            client.close()
            self._serving.discard(task)

    async def _call(self, client: Wire) -> None:
        async with asyncio.timeout(_HEAD_S):
            request = await client.next()
            if not isinstance(request, h11.Request):
                raise EOFError
            call = decide(request.method.decode(), request.target.decode("ascii", errors="replace"))
            body = None
            if call.body != "stream":
                body, owned = self._checked(call, await _read_body(client))
                call = Call(call.target, (*call.owned, *owned), call.body, call.upgrade)
            for kind, name in call.owned:
                await self._require_ours(kind, name, may_be_absent=call.body == "create" and kind == "container")
        upstream = Wire(h11.CLIENT, *await asyncio.open_unix_connection(self._engine, limit=_CHUNK))
        try:
            await self._pass(client, upstream, request, call, body)
        finally:
            upstream.close()

    def _checked(self, call: Call, raw: bytes) -> tuple[bytes, bodies.Owned]:
        """The body as it is passed on, and what in it must be ours. Raises Refused."""
        if call.body == "none":
            if raw.strip() not in (b"", b"{}", b"null"):
                raise Refused("this call takes no body")
            return b"", []
        try:
            value = json.loads(raw or b"{}")
        except (ValueError, RecursionError):
            raise Refused("the body is no JSON") from None
        owned: bodies.Owned = []
        if call.body == "create":
            value, owned = bodies.container(value, self._volumes)
        elif call.body == "exec":
            value = bodies.command(value)
        elif call.body == "exec_start":
            value = bodies.command_start(value)
        elif call.body == "network":
            value = bodies.network(value)
        elif call.body == "volume":
            value = bodies.volume(value)
        return json.dumps(value).encode(), owned

    # -- the engine is asked ---------------------------------------------------------------------------------------

    async def _require_ours(self, kind: Kind, name: str, *, may_be_absent: bool = False) -> None:
        """Raises Refused. What does not exist passes, for the engine to say so in its own words."""
        status, found = await self._ask(_PATHS[kind].format(quote(name, safe=":@/")))
        if status == 404 and (may_be_absent or kind != "exec"):
            return
        if status != 200:
            raise Refused(f"the engine does not say whose the {kind} {name[:80]} is (status {status})")
        if kind == "exec":
            return await self._require_ours("container", str(found.get("ContainerID")))
        config = found.get("Config") or {} if kind in ("container", "image") else found
        labels = config.get("Labels")
        if not (is_our_image(labels) if kind == "image" else is_ours(labels)):
            raise Refused(f"the {kind} {name[:80]} is not one of ours")

    async def _ask(self, target: str) -> tuple[int, dict[str, Any]]:
        upstream = Wire(h11.CLIENT, *await asyncio.open_unix_connection(self._engine, limit=_CHUNK))
        try:
            await upstream.send(
                h11.Request(method="GET", target=target, headers=[("Host", "docker"), ("Connection", "close")])
            )
            await upstream.send(h11.EndOfMessage())
            response = await upstream.next()
            value = json.loads(await _read_body(upstream, most=16 * _BODY_BYTES) or b"{}")
            return int(response.status_code), value if isinstance(value, dict) else {}
        finally:
            upstream.close()

    # -- passing on ------------------------------------------------------------------------------------------------

    async def _pass(self, client: Wire, upstream: Wire, request: h11.Request, call: Call, body: bytes | None) -> None:
        headers = [(name, value) for name, value in request.headers if name not in _HOP | {b"content-type"}]
        headers.append((b"Host", b"docker"))
        if call.body != "none":
            # Never the client's: the engine takes parameters from a body that calls itself a form.
            headers.append((b"Content-Type", b"application/x-tar" if body is None else b"application/json"))
        wants_stream = call.upgrade and any(name == b"upgrade" for name, _ in request.headers)
        if wants_stream:
            headers += [(b"Connection", b"Upgrade"), (b"Upgrade", b"tcp")]
        else:
            headers.append((b"Connection", b"close"))
        if body is None:
            headers += [(name, value) for name, value in request.headers if name in _FRAMING]
        elif body or request.method in (b"POST", b"PUT"):
            headers.append((b"Content-Length", str(len(body)).encode()))
        await upstream.send(h11.Request(method=request.method, target=call.target, headers=headers))
        if body is None:
            answer = await self._upload(client, upstream)
            if answer is None:
                return
        else:
            if body:
                await upstream.send(h11.Data(data=body))
            await upstream.send(h11.EndOfMessage())
            answer = await upstream.next()
        await self._pass_answer(client, upstream, answer)

    async def _upload(self, client: Wire, upstream: Wire) -> Any:
        """Pass the body on as it comes; the engine's answer. None = it refused before it had read all, as was said.

        An engine that refuses reads no further and closes: a write would then fail, and the reason would be lost.
        """
        answering = asyncio.ensure_future(upstream.next())
        sending = asyncio.ensure_future(_pump(client, upstream))
        try:
            await asyncio.wait([answering, sending], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() or getattr(answering.result(), "status_code", 0) < 400:
                await sending
                return await answering
            text = await _read_body(upstream)
            await self._answer(client, answering.result().status_code, text)
            return None
        finally:
            for task in (answering, sending):
                task.cancel()
            await asyncio.gather(answering, sending, return_exceptions=True)

    async def _pass_answer(self, client: Wire, upstream: Wire, answer: Any) -> None:
        while isinstance(answer, h11.InformationalResponse) and answer.status_code != 101:
            answer = await upstream.next()
        if isinstance(answer, h11.InformationalResponse):
            await client.send(answer)
            await _stream(client, upstream)
            return
        headers = [(name, value) for name, value in answer.headers if name not in _HOP]
        headers += [(name, value) for name, value in answer.headers if name in _FRAMING]
        headers.append((b"Connection", b"close"))
        await client.send(h11.Response(status_code=answer.status_code, headers=headers, reason=answer.reason))
        gone = asyncio.ensure_future(client.reader.read(1))  # nothing comes after a call but the client's end
        passing = asyncio.ensure_future(_pump(upstream, client))
        try:
            await asyncio.wait([gone, passing], return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (gone, passing):
                task.cancel()
            await asyncio.gather(gone, passing, return_exceptions=True)

    async def _answer(self, client: Wire, status: int, text: bytes) -> None:
        """If the client still listens and was answered nothing yet; it may still be sending."""
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(text))), ("Connection", "close")]
        with contextlib.suppress(OSError, h11.ProtocolError, TimeoutError):
            await client.send(h11.Response(status_code=status, headers=headers))
            await client.send(h11.Data(data=text))
            await client.send(h11.EndOfMessage())
            async with asyncio.timeout(_LINGER_S):  # closing on what is still being sent would lose the answer
                while await client.reader.read(_CHUNK):
                    pass


def _said(message: str) -> bytes:
    """In the engine's own form."""
    return json.dumps({"message": message}).encode()


async def _read_body(wire: Wire, most: int = _BODY_BYTES) -> bytes:
    """To its end. Raises Refused when it is too long to judge."""
    parts, size = [], 0
    while not isinstance(event := await wire.next(), h11.EndOfMessage):
        parts.append(bytes(event.data))
        size += len(event.data)
        if size > most:
            raise Refused("the body is too long")
    return b"".join(parts)


async def _pump(source: Wire, target: Wire) -> None:
    """A message's body and end, as it comes."""
    while not isinstance(event := await source.next(), h11.EndOfMessage):
        await target.send(h11.Data(data=bytes(event.data)))
    await target.send(h11.EndOfMessage())


async def _stream(client: Wire, upstream: Wire) -> None:
    """Bytes both ways until the engine's side ends. A client that ends its input may go on listening."""

    async def copy(source: Wire, target: Wire) -> None:
        early, _ = source.conn.trailing_data
        if early:
            target.writer.write(early)
        while chunk := await source.reader.read(_CHUNK):
            target.writer.write(chunk)
            await target.writer.drain()
        if target.writer.can_write_eof():
            target.writer.write_eof()

    inward = asyncio.ensure_future(copy(client, upstream))
    try:
        await copy(upstream, client)
    finally:
        inward.cancel()
        await asyncio.gather(inward, return_exceptions=True)

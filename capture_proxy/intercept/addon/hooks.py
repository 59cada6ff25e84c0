"""The hooks that mitmproxy calls: one decision per request.

Owns where each request goes, to the gateway, through, or refused; and that each refusal is recorded. Made by `program`.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio
import base64
import binascii
import collections
import functools
import json
import logging
import os
import re
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from mitmproxy import ctx
from mitmproxy.addons import next_layer
from mitmproxy.http import Response
from mitmproxy.net.tls import starts_like_tls_record
from mitmproxy.proxy import layers
from mitmproxy.proxy.layers.http import HTTPMode
from mitmproxy.proxy.layers.tls import parse_client_hello

from .gateway import Events, Tokens
from .hosts import Address, Hosts, name_matches, normal, shown

Flow: TypeAlias = Any  # mitmproxy.http.HTTPFlow

_log = logging.getLogger(__name__)
_KEYS = ("authorization", "x-api-key", "x-goog-api-key")  # where vendors' clients put their API key
_SECRETS = (*_KEYS, "api-key", "cookie", "proxy-authorization", "proxy-connection")
_SECRET_QUERY = ("key", "access_token")
_BODILESS = ("GET", "HEAD", "OPTIONS", "DELETE")
_MAX_REFUSED_BODY = 2**20  # bytes; mitmproxy reads the body before it answers, so a larger one is cut off instead
_MAX_UPSTREAM = 1000  # connections to the gateway for one connection of an agent: an HTTP/2 agent multiplexes
_IDLE_S = 3600  # a reply that does not stream may take this long without a byte


@dataclass(frozen=True, slots=True)
class Tunnel:
    """What a connection became with its CONNECT: e.g. Tunnel("provider", "api.openai.com", 443, "sk-...")."""

    kind: str  # "provider", "allowed", or "refused" (allowed, but then it asked for another name)
    host: str
    port: int
    token: str


Hook: TypeAlias = Callable[[Any, Any], Awaitable[None]]


def or_close(hook: Hook) -> Hook:
    """A hook that fails must not let the request pass as if there were none."""

    @functools.wraps(hook)
    async def guarded(self: Any, flow: Any) -> None:
        try:
            await hook(self, flow)
        except Exception:
            _log.exception("%s failed", hook.__name__)
            flow.kill()

    return guarded


class Intercept:
    """The hooks that mitmproxy calls. State is per connection of a client: sessions share nothing."""

    name = "nextlayer"  # it takes the place of mitmproxy's addon of that name

    def __init__(self, orders: dict[str, Any]) -> None:
        self._gateway: Address = tuple(orders["gateway"])
        self._allowed = Hosts(orders["allow"])
        self._providers = [
            (p["host"], [(re.compile(old), new) for old, new in p["rewrites"]]) for p in orders["providers"]
        ]
        admin = tuple(orders["admin"]) if isinstance(orders["admin"], list) else orders["admin"]
        self._events = Events(orders["events"], admin, orders["admin_key"])
        self._tokens = Tokens(self._gateway)
        self._ready_fd: int = orders["ready_fd"]
        self._owner: int = orders["owner"]
        self._outer = next_layer.NextLayer()
        self._tunnels: weakref.WeakKeyDictionary[Any, Tunnel] = weakref.WeakKeyDictionary()

    # --- life

    def running(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(0, self._owner_said_something)
        # A process that the owner forked may hold its end of stdin open beyond its death.
        loop.add_reader(os.pidfd_open(self._owner), ctx.master.shutdown)
        (address, *_) = ctx.master.addons.get("proxyserver").listen_addrs()
        with os.fdopen(self._ready_fd, "w") as ready:
            ready.write(json.dumps({"host": address[0], "port": address[1], "pid": os.getpid()}) + "\n")

    def done(self) -> None:
        self._events.close()

    def _owner_said_something(self) -> None:
        if not os.read(0, 4096):
            asyncio.get_running_loop().remove_reader(0)
            ctx.master.shutdown()

    # --- connections

    def client_connected(self, client: Any) -> None:
        handler = ctx.master.addons.get("proxyserver").connections.get(client.id)
        if handler is not None:
            handler.max_conns = collections.defaultdict(lambda: asyncio.Semaphore(_MAX_UPSTREAM))
            handler.timeout_watchdog.timeout = _IDLE_S

    def server_connect(self, data: Any) -> None:
        """The last gate: whatever happened before, connections lead to the gateway or to an allowed host."""
        host, port = data.server.address[:2]
        if (host, port) != self._gateway and (normal(host), port) not in self._allowed:
            data.server.error = "this destination is not allowed"

    @or_close
    async def http_connect(self, flow: Flow) -> None:
        self._tunnels.pop(flow.client_conn, None)
        token = proxy_token(flow)
        host, port = normal(flow.request.host), flow.request.port
        if token is None:
            self._answer_407(flow)
        elif self._rewrites(host) is not None:
            self._tunnels[flow.client_conn] = Tunnel("provider", host, port, token)
            # Set here, so that no connection to the real host is opened.
            flow.response = Response.make(200, b"")
            flow.response.headers.clear()
        elif (host, port) not in self._allowed:
            self._refuse(flow, token, f"{shown(host)}:{port} CONNECT")
        elif await self._knows(flow, token):
            self._tunnels[flow.client_conn] = Tunnel("allowed", host, port, token)

    def next_layer(self, nextlayer: Any) -> None:
        context = nextlayer.context
        tunnel = self._tunnels.get(context.client)
        if tunnel is None:
            self._outer.next_layer(nextlayer)  # still outside: TLS to the proxy itself, or plain HTTP
            return
        data = nextlayer.data_client()
        if context.client.tls_established and isinstance(context.layers[-1], layers.ClientTLSLayer):
            nextlayer.layer = layers.HttpLayer(context, HTTPMode.transparent)
        elif len(data) < 3 and not data.isalpha():
            return  # more must come to tell TLS from HTTP
        elif tunnel.kind == "allowed" and not self._asks_for_another(tunnel, context, data):
            nextlayer.layer = layers.TCPLayer(context, ignore=True)
        elif starts_like_tls_record(data):
            nextlayer.layer = layers.ClientTLSLayer(context)
        else:
            nextlayer.layer = layers.HttpLayer(context, HTTPMode.transparent)

    def _asks_for_another(self, tunnel: Tunnel, context: Any, data: bytes) -> bool:
        """Whether TLS inside an allowed tunnel is for a name that is not allowed: many hosts share an address."""
        try:
            hello = parse_client_hello(data) if starts_like_tls_record(data) else None
        except ValueError:
            return False
        name = hello.sni if hello is not None else None
        if name is None or (normal(name), tunnel.port) in self._allowed:
            return False
        self._tunnels[context.client] = Tunnel("refused", normal(name), tunnel.port, tunnel.token)
        return True

    # --- requests

    @or_close
    async def requestheaders(self, flow: Flow) -> None:
        if flow.error is not None:
            return  # not valid HTTP: mitmproxy answers by itself
        request = flow.request
        tunnel = self._tunnels.get(flow.client_conn)
        token = tunnel.token if tunnel is not None else proxy_token(flow)
        host, port = (tunnel.host, tunnel.port) if tunnel is not None else (normal(request.host), request.port)
        if token is None:
            self._answer_407(flow)
            return
        where = f"{shown(host)}:{port} {request.method} {request.path.partition('?')[0]}"
        rewrites = self._rewrites(host)
        if rewrites is not None and "websocket" in request.headers.get("upgrade", "").lower():
            self._events.add("websocket_refused", where, token)
            self._answer(flow, 426, "WebSockets are not served here; use HTTPS", {"upgrade": "HTTP/1.1"})
        elif rewrites is not None:
            flow.metadata["provider"] = (where, token)
            self._to_gateway(flow, token, rewrites)
        elif tunnel is not None or (host, port) not in self._allowed:
            self._refuse(flow, token, where)
        elif await self._knows(flow, token):
            for name in ("proxy-authorization", "proxy-connection"):
                request.headers.pop(name, None)
            # The name that was checked is the name that is asked for.
            request.host_header = shown(host) if port == 80 else f"{shown(host)}:{port}"
            self._pass_on(flow)

    @or_close
    async def responseheaders(self, flow: Flow) -> None:
        if flow.response is None or flow.metadata.get("answered"):
            return
        flow.response.stream = True
        if flow.response.status_code in (404, 405) and "provider" in flow.metadata:
            where, token = flow.metadata["provider"]
            self._events.add("not_served", where, token)

    def _to_gateway(self, flow: Flow, token: str, rewrites: list[tuple[re.Pattern[str], str]]) -> None:
        request = flow.request
        path, mark, query = request.path.partition("?")
        for old, new in rewrites:
            if found := old.match(path):
                path = found.expand(new) + path[found.end() :]
                break
        kept = [part for part in query.split("&") if part.partition("=")[0] not in _SECRET_QUERY]
        carried = [name for name in _KEYS if name in request.headers] or [key_header(path, query)]
        for name in _SECRETS:
            request.headers.pop(name, None)
        for name in carried:
            request.headers[name] = f"Bearer {token}" if name == "authorization" else token
        request.path = path + (mark + "&".join(kept) if any(kept) else "")
        request.scheme = "http"
        request.host, request.port = self._gateway
        self._pass_on(flow)

    def _pass_on(self, flow: Flow) -> None:
        """Both bodies stream, as they come."""
        headers = flow.request.headers
        if headers.get("upgrade", "").lower() == "h2c":
            for name in ("upgrade", "http2-settings", "connection"):
                headers.pop(name, None)
        if flow.request.is_http2 and "content-length" not in headers and flow.request.method not in _BODILESS:
            headers["transfer-encoding"] = "chunked"  # HTTP/1 must be told that a body follows
        flow.request.stream = without_empty_pieces

    # --- answers of our own

    async def _knows(self, flow: Flow, token: str) -> bool:
        status = await self._tokens.status(token)
        if status == 401:
            self._answer_407(flow)
        elif status == 403:
            self._answer(flow, 403, "this session is over")
        elif status is None or status in (500, 507):
            self._answer(flow, 502, "the capture gateway cannot say whether this session exists; try again")
        else:
            return True
        return False

    def _refuse(self, flow: Flow, token: str, where: str) -> None:
        self._events.add("egress_refused", where, token)
        self._answer(flow, 403, f"{where.partition(' ')[0]} is not on the allow-list of this sandbox")

    def _answer_407(self, flow: Flow) -> None:
        realm = {"proxy-authenticate": 'Basic realm="harness-trainer"'}
        self._answer(flow, 407, "the proxy needs the session token as password: http://x:TOKEN@HOST:PORT", realm)

    def _answer(self, flow: Flow, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        if not ends_soon(flow.request):
            flow.kill()
            return
        flow.metadata["answered"] = True
        body = b"" if flow.request.method == "HEAD" else json.dumps({"error": {"message": reason}}).encode()
        flow.response = Response.make(status, body, {"content-type": "application/json", **(headers or {})})

    def _rewrites(self, host: str) -> list[tuple[re.Pattern[str], str]] | None:
        """How this provider's paths are rewritten; None = the host is no provider's."""
        return next((rewrites for name, rewrites in self._providers if name_matches(name, host)), None)


def proxy_token(flow: Flow) -> str | None:
    """The password (or a lone user name) of the proxy credentials; None = there is none."""
    scheme, _, value = flow.request.headers.get("proxy-authorization", "").partition(" ")
    try:
        user, _, password = base64.b64decode(value.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return None
    token = password or user
    return token if scheme.lower() == "basic" and token.isprintable() and token.isascii() and token else None


def key_header(path: str, query: str) -> str:
    """Where the key belongs in a request that carried none in a header."""
    if path.startswith("/v1beta/") or re.search(r"(^|&)key=", query):
        return "x-goog-api-key"
    return "x-api-key" if path.startswith("/v1/messages") else "authorization"


def without_empty_pieces(data: bytes) -> list[bytes]:
    """An HTTP/2 body may end with an empty frame; as an HTTP/1 chunk that would end the body twice."""
    return [data] if data else []


def ends_soon(request: Any) -> bool:
    """Whether the request's body is known to be small."""
    length = request.headers.get("content-length")
    if "transfer-encoding" in request.headers:
        return False
    if length is None:
        return not request.is_http2 or request.method in _BODILESS
    return length.isdecimal() and int(length) <= _MAX_REFUSED_BODY

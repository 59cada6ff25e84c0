"""The intercepting proxy: a program on mitmproxy, in the environment that holds mitmproxy and nothing of ours.

Owns one decision per request: to the gateway, through, or refused; and that each refusal is recorded. It imports only
mitmproxy and the standard library, is started by `launch`, gets its orders as one line of JSON on stdin, says on the
ready pipe where it listens, and ends when stdin or its owner does. Whatever goes wrong in here closes the connection:
no mistake may become a way out. One file, because it runs isolated from every package.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio
import base64
import binascii
import collections
import contextlib
import fcntl
import functools
import hashlib
import http.client
import json
import logging
import os
import queue
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mitmproxy import certs, ctx, master, options
from mitmproxy.addons import block, core, errorcheck, next_layer, proxyserver, tlsconfig
from mitmproxy.http import Response
from mitmproxy.net.tls import starts_like_tls_record
from mitmproxy.proxy import layers
from mitmproxy.proxy.layers.http import HTTPMode
from mitmproxy.proxy.layers.tls import parse_client_hello

Address: TypeAlias = tuple[str, int]  # host, port
Flow: TypeAlias = Any  # mitmproxy.http.HTTPFlow

_log = logging.getLogger(__name__)
_BASENAME = "mitmproxy"  # of the CA's files; mitmproxy's own choice
_KEYS = ("authorization", "x-api-key", "x-goog-api-key")  # where vendors' clients put their API key
_SECRETS = (*_KEYS, "api-key", "cookie", "proxy-authorization", "proxy-connection")
_SECRET_QUERY = ("key", "access_token")
_BODILESS = ("GET", "HEAD", "OPTIONS", "DELETE")
_MAX_REFUSED_BODY = 2**20  # bytes; mitmproxy reads the body before it answers, so a larger one is cut off instead
_MAX_UPSTREAM = 1000  # connections to the gateway for one connection of an agent: an HTTP/2 agent multiplexes
_IDLE_S = 3600  # a reply that does not stream may take this long without a byte
_KNOWN_S, _UNKNOWN_S = 60.0, 5.0  # how long the gateway's word on a token is believed
_MAX_TOKENS = 10_000
_MAX_DETAIL = 300  # characters


class Hosts:
    """A list of host names: exact or "*.suffix", with ":PORT", ":*" (any) or no port (80 and 443)."""

    def __init__(self, entries: list[str]) -> None:
        self._entries = [self._parse(entry) for entry in entries]

    @staticmethod
    def _parse(entry: str) -> tuple[str, frozenset[int] | None]:
        host, colon, port = entry.lower().rpartition(":")
        if not colon or entry.endswith("]"):
            return entry.lower().strip("[]"), frozenset((80, 443))
        return host.strip("[]"), None if port == "*" else frozenset((int(port),))

    def __contains__(self, address: Address) -> bool:
        host, port = address
        return any(name_matches(name, host) and (ports is None or port in ports) for name, ports in self._entries)


def name_matches(name: str, host: str) -> bool:
    return host.endswith(name[1:]) and len(host) > len(name) - 1 if name.startswith("*.") else host == name


def normal(host: str) -> str:
    return host.lower().removesuffix(".").strip("[]")


def shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


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


# --- the program


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_ca(folder: Path) -> None:
    """The CA's files, unless they are there. The one with the key comes last, whole, and only its owner can read it."""
    key_file = f"{_BASENAME}-ca.pem"
    with alone(folder):
        if not (folder / key_file).exists():
            with tempfile.TemporaryDirectory(dir=folder) as made:
                certs.CertStore.create_store(Path(made), _BASENAME, 2048, "harness-trainer", "harness-trainer proxy")
                for name in sorted(os.listdir(made), key=lambda name: name == key_file):
                    os.replace(Path(made) / name, folder / name)
        certs.CertStore.from_store(folder, _BASENAME, 2048)  # raises when the files are damaged


def check_address(host: str, port: int) -> None:
    """Raises OSError with the reason that mitmproxy would bury in its log."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)


async def serve(orders: dict[str, Any]) -> None:
    host, port = orders["listen"]
    chosen = options.Options(listen_host=host, listen_port=port, confdir=orders["confdir"], upstream_cert=False)
    proxy = master.Master(chosen, with_termlog=True)
    chosen.update(termlog_verbosity="warn")
    # Only what is needed: mitmproxy's other addons serve pages, save flows and run commands.
    addons = [Intercept(orders), core.Core(), block.Block(), proxyserver.Proxyserver(), tlsconfig.TlsConfig()]
    proxy.addons.add(*addons, errorcheck.ErrorCheck())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, proxy.shutdown)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    await proxy.run()
    # Connections that are cut off by the end are no errors; Python 3.11 would log each as one.
    loop.set_exception_handler(lambda _, context: _log.debug("while ending: %s", context.get("message")))


def main() -> None:
    line = b""
    while not line.endswith(b"\n"):  # nothing follows on stdin until it ends with the owner
        part = os.read(0, 65536)
        if not part:
            sys.exit("no orders came on stdin; start this program through `python -m capture_proxy.intercept`")
        line += part
    orders = json.loads(line)
    logging.getLogger().setLevel(logging.WARNING)
    host, port = orders["listen"]
    try:
        check_address(host, port)
    except OSError as error:
        sys.exit(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port, or 0")
    try:
        make_ca(Path(orders["confdir"]))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        sys.exit(f"the CA in {orders['confdir']} is unusable; remove {_BASENAME}-ca.pem to get a new one ({reason})")
    asyncio.run(serve(orders))


if __name__ == "__main__":
    main()

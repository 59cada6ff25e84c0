"""Who may ask, and what a browser may do with the answer: Host header, token, methods, security headers.

Owns the outermost ASGI layer. A page elsewhere on the web can make a browser send requests here, and by DNS rebinding
read the answers under a name of its own: so the Host must be a name that is known, or an address, which nobody can
rebind. Beyond loopback a token is asked for as well. Wraps the app of `app`; made by `cli.view`.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = ("GET", "HEAD")
# Scripts and styles are files of ours; nothing is inline, nothing comes from elsewhere, nothing is framed or posted.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """`names`: host names that the server is known by, besides loopback's; `token` None = none is asked for."""

    def __init__(self, app: ASGIApp, *, names: Iterable[str] = (), token: str | None = None) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower().rstrip(".") for name in names)}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_known(hosts[0]):
            return PlainTextResponse(
                "this Host is not served here: use the address that `harness-trainer view` printed, or start it with "
                "--allow-host NAME\n",
                421,
            )
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-dest") != "document":
            # A page elsewhere could not read the answer, but by asking for it again and again slow the run's machine.
            return PlainTextResponse("not for pages of other sites: follow a link to this address\n", 403)
        if scope["method"] not in _METHODS:
            return PlainTextResponse("read-only\n", 405, {"allow": ", ".join(_METHODS)})
        return None if self._token is None else self._ask(scope, headers, hosts[0], self._token)

    def _is_known(self, host: str) -> bool:
        name = _without_port(host.strip().lower()).rstrip(".")
        return name in self._names or name.endswith(".localhost") or is_address(name)

    def _ask(self, scope: Scope, headers: Headers, host: str, token: str) -> Response | None:
        """None = the token was shown. In an address it is taken into a cookie, so that it stays in no link."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        in_query = [value for name, value in query if name == "token"]
        cookie = _cookie_name(host)
        if any(_same(value, token) for value in in_query):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # A path that begins with two slashes would name another host.
            response = RedirectResponse("/" + scope["path"].lstrip("/") + (f"?{rest}" if rest else ""), 303)
            response.set_cookie(cookie, token, httponly=True, samesite="strict")
            return response
        scheme, _, given = headers.get("authorization", "").partition(" ")
        shown = [given.strip()] if scheme.lower() == "bearer" else []
        shown += _cookies(headers, cookie)
        if any(_same(value, token) for value in shown):
            return None
        return PlainTextResponse(
            "a token is needed: open the whole address that `harness-trainer view` printed, or send it as "
            "`Authorization: Bearer ...`\n",
            401,
            {"www-authenticate": "Bearer"},
        )


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _cookie_name(host: str) -> str:
    """Browsers share cookies between the ports of a host."""
    port = host.rpartition(":")[2]
    return f"harness-trainer-view-{port if port.isdecimal() else 'default'}"


def _cookies(headers: Headers, name: str) -> list[str]:
    given = (cookie_parser(header) for header in headers.getlist("cookie"))
    return [cookies[name] for cookies in given if name in cookies]


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def is_address(name: str) -> bool:
    """Of an IPv4 or IPv6 address; anything else is a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

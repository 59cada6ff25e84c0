"""A real gateway behind a real mitmproxy, and clients that know only the proxy."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture_proxy.engines.base import Engine
from capture_proxy.intercept.launch import InterceptConfig, InterceptError, Interceptor, find_python
from capture_proxy.types import Session
from tests.capture.serving import KEY, Served, listening, served

try:
    find_python(InterceptConfig("", None, "", Path()))
    MISSING = ""
except InterceptError as error:
    MISSING = str(error)

needs_mitmproxy = pytest.mark.skipif(bool(MISSING), reason=MISSING)
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@dataclass
class Behind:
    """A running proxy, as its agents see it."""

    proxy: Interceptor

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the proxy wrote into its events file."""
        lines = self.proxy.events_path.read_text().splitlines()
        return [event for event in map(json.loads, lines) if kind in (None, event["kind"])]

    def http(self, token: str | None, **options: Any) -> httpx.AsyncClient:
        """A client that knows the proxy and its CA, as an agent does."""
        proxy = httpx.Proxy(self.proxy.url, auth=("x", token) if token is not None else None)
        context = ssl.create_default_context(cafile=str(self.proxy.ca_bundle))
        return httpx.AsyncClient(proxy=proxy, verify=context, trust_env=False, timeout=20, **options)

    def curl(self, token: str, *arguments: str) -> list[str]:
        """A curl command line through the proxy."""
        proxy = self.proxy.url.replace("http://", f"http://x:{token}@")
        return ["curl", "-sS", "--max-time", "20", "--proxy", proxy, "--cacert", str(self.proxy.ca_bundle), *arguments]


@dataclass
class Intercepted(Behind):
    gateway: Served

    async def turns(self, session: Session) -> list[Any]:
        return (await self.gateway.admin.capture(session.session_id)).turns


@contextlib.asynccontextmanager
async def intercepted(engine: Engine, folder: Path, **options: Any) -> AsyncIterator[Intercepted]:
    async with served(engine, folder / "store.sqlite") as gateway:
        config = InterceptConfig(gateway.agent_url, gateway.admin_url, KEY, folder / "intercept", **options)
        async with Interceptor(config) as proxy:
            yield Intercepted(proxy, gateway)


@dataclass
class Echo:
    """Stands where the gateway's two ports would be, and answers each request with what it was."""

    status: int = 200
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        seen = {
            "method": scope["method"],
            "path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(),
            "headers": headers,
            "body": base64.b64encode(body).decode(),
        }
        self.requests.append(seen)
        answer = b"" if scope["method"] == "HEAD" else json.dumps(seen).encode()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    def paths(self) -> list[str]:
        return [f"{seen['method']} {seen['path']}" for seen in self.requests]


@dataclass
class Echoed(Behind):
    gateway: Echo
    admin: Echo


@contextlib.asynccontextmanager
async def echoed(folder: Path, **options: Any) -> AsyncIterator[Echoed]:
    gateway, admin = Echo(), Echo()
    async with listening(gateway) as gateway_url, listening(admin) as admin_url:
        config = InterceptConfig(gateway_url, admin_url, KEY, folder / "intercept", **options)
        async with Interceptor(config) as proxy:
            yield Echoed(proxy, gateway, admin)

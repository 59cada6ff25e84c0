"""A real gateway on real sockets for the capture tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from capture_proxy import http_server
from capture_proxy.admin import admin_app
from capture_proxy.admin_client import AdminClient
from capture_proxy.engines.base import Engine
from capture_proxy.gateway import Gateway, agent_app
from capture_proxy.store import Store
from capture_proxy.types import Session, SessionPolicy

KEY = "admin-key"


@dataclass
class Served:
    gateway: Gateway
    agent_url: str
    admin_url: str
    admin: AdminClient
    clients: list[AsyncOpenAI] = field(default_factory=list)  # closed with the gateway

    async def mint(self, session_id: str = "s1", **policy: Any) -> Session:
        return await self.admin.mint(session_id, SessionPolicy(**policy), {"task": "t"})

    def openai(self, session: Session) -> AsyncOpenAI:
        client = AsyncOpenAI(base_url=f"{self.agent_url}/v1", api_key=session.token, max_retries=0)
        self.clients.append(client)
        return client

    def http(self, session: Session | None = None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {session.token}"} if session else {}
        return httpx.AsyncClient(base_url=self.agent_url, headers=headers, trust_env=False)


@contextlib.asynccontextmanager
async def served(engine: Engine, path: Path, **options: Any) -> AsyncIterator[Served]:
    gateway = Gateway(engine, Store.open(path), **options)
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(gateway.running())
        agent_url = await stack.enter_async_context(listening(agent_app(gateway), stop))
        admin_url = await stack.enter_async_context(listening(admin_app(gateway, KEY), stop))
        stack.callback(stop.set)  # both at once: uvicorn sleeps a tenth of a second when it stops
        admin = await stack.enter_async_context(AdminClient(admin_url, KEY))
        gw = Served(gateway, agent_url, admin_url, admin)
        try:
            yield gw
        finally:
            for client in gw.clients:  # left to the garbage collector, it would be closed in another test's loop
                await client.close()


class _Server(http_server.Server):
    """Stops at once: uvicorn's own loop looks ten times a second."""

    def __init__(self, app: Any, stop: asyncio.Event) -> None:
        super().__init__(app)
        self._stop = stop

    async def main_loop(self) -> None:
        await self._stop.wait()


@contextlib.asynccontextmanager
async def listening(app: Any, stop: asyncio.Event | None = None) -> AsyncIterator[str]:
    """Serve an ASGI app on a free port; gives its URL. `stop` may end it before the context is left."""
    stop = stop or asyncio.Event()
    async with http_server.listening(_Server(app, stop)) as url:
        try:
            yield url
        finally:
            stop.set()


async def until(condition: Any, timeout_s: float = 3.0) -> None:
    """Wait until the condition holds; fails the test if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)

"""What the proofs share: the dialects there are, a gateway with one session, raw requests, and error shapes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from capture_proxy.dialects import all_dialects
from capture_proxy.engines.base import Engine
from capture_proxy.types import Capture, Session
from tests.capture.serving import Served, served
from tests.proof.clients import Agent, Tool, Wire, agent

DIALECTS = [dialect.name for dialect in all_dialects()]
BASH: Tool = ("bash", {"type": "object", "properties": {"command": {"type": "string"}}})
NOW: Tool = ("now", {"type": "object", "properties": {}})


@dataclass
class Bench:
    """A gateway, and agents of one dialect on sessions of their own."""

    gateway: Served
    dialect: str
    stack: contextlib.AsyncExitStack

    async def agent(
        self, session_id: str = "s1", *, tools: Sequence[Tool] = (), max_tokens: int | None = None, **policy: Any
    ) -> Agent:
        session = await self.gateway.mint(session_id, **policy)
        return await self.resume(session, tools=tools, max_tokens=max_tokens)

    async def resume(self, session: Session, *, tools: Sequence[Tool] = (), max_tokens: int | None = None) -> Agent:
        made = agent(self.dialect, self.gateway.agent_url, session.token, tools=tools, max_tokens=max_tokens)
        return await self.stack.enter_async_context(made)

    async def capture(self, session_id: str = "s1") -> Capture:
        return await self.gateway.admin.capture(session_id)


@contextlib.asynccontextmanager
async def bench(dialect: str, engine: Engine, tmp_path: Path, **options: Any) -> AsyncIterator[Bench]:
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(served(engine, tmp_path / "store.sqlite", **options))
        yield Bench(gateway, dialect, stack)


@contextlib.asynccontextmanager
async def opened(url: str, wire: Wire) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The call on a connection of its own, sent but not read. Leaving closes it at once, read or not."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        body = wire.raw()
        head = [f"POST {wire.path} HTTP/1.1", f"host: {parts.netloc}", f"content-length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in wire.headers.items()]
        writer.write("\r\n".join([*head, "connection: close", "", ""]).encode() + body)
        yield reader, writer
    finally:
        writer.transport.abort()


def check_error(dialect: str, body: bytes, status: int) -> str:
    """Fails unless the body is an error of this dialect; returns its message."""
    assert status >= 400
    data = json.loads(body)
    if isinstance(data, list):  # Gemini's stream without SSE is an array
        assert dialect == "gemini"
        (data,) = data
    error = data["error"]
    assert isinstance(error["message"], str) and error["message"]
    if dialect == "anthropic":
        assert data["type"] == "error"
        assert error["type"].endswith("_error") or (status, error["type"]) == (413, "request_too_large")
    elif dialect == "gemini":
        assert error["code"] == status
        assert error["status"] == error["status"].upper()
    else:
        assert {"message", "type", "param", "code"} <= set(error)
        assert error["type"] != "server_error" or status >= 500  # beside a 4xx, agents retry it for ever
    return str(error["message"])

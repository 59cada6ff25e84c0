"""Sends recorded traffic to a real gateway; the scripted engine says what the engine of the recording said."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from capture_proxy import graph
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineUnreachable, PromptTooLong
from capture_proxy.report import Report
from capture_proxy.trace import rollout_report, trained_turns
from capture_proxy.types import Capture
from tests.capture.serving import Served, served, until
from tests.harnesses.traffic import Request, ids_of


@dataclass(frozen=True)
class Replayed:
    """What a gateway made of one recorded run."""

    statuses: list[int]  # one each request
    num_sampled: int  # calls that reached the engine
    capture: Capture
    report: Report

    @property
    def sides(self) -> dict[int, str]:
        """Side calls: number of the turn -> the reason."""
        return {turn.index: turn.side_reason for turn in self.capture.turns if turn.side_reason}

    @property
    def rows(self) -> list[list[int]]:
        """The numbers of the turns that each row trains."""
        sound = trained_turns(self.capture)
        return sorted([sound[turn_id].index for turn_id in row] for row in graph.build(list(sound.values())).lineages)


class Player:
    """Plays recorded runs to one gateway, each as a session of its own."""

    def __init__(self, gw: Served, engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
        self.gateway = gw.gateway
        self._gw, self._engine, self._client = gw, engine, client
        self._playing: Request | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        engine.script = lambda _: _said(self._playing)
        engine.hold = self._hold

    async def play(self, name: str, requests: Sequence[Request], *, loses: int | None = None) -> Replayed:
        """`loses` is the number of a request whose reply the agent loses on the way; it asks again."""
        token = (await self._gw.mint(name)).token
        before, statuses = len(self._engine.requests), []
        ids: dict[str, str] = {}
        for number, request in enumerate(requests):
            self._playing = request
            send = self._twice if number == loses else self._client.send
            response = await send(_http(self._client, request, ids, token))
            statuses.append(response.status_code)
            ids |= ids_of(response.text, number) if response.status_code == 200 else {}
        capture = await self._gw.admin.capture(name)
        return Replayed(statuses, len(self._engine.requests) - before, capture, rollout_report(capture))

    async def _twice(self, request: httpx.Request) -> httpx.Response:
        joined = self.gateway.metrics.retries.total(how="joined")
        self._gate.clear()
        first = asyncio.create_task(self._client.send(request))
        await until(lambda: self._engine.in_flight)
        first.cancel()  # closes its connection
        await asyncio.gather(first, return_exceptions=True)
        again = asyncio.create_task(self._client.send(request))
        try:
            await until(lambda: self.gateway.metrics.retries.total(how="joined") > joined)
        finally:
            self._gate.set()
        return await again

    async def _hold(self, piece: int) -> None:
        if piece == 1:
            await self._gate.wait()


@contextlib.asynccontextmanager
async def player(folder: Path) -> AsyncIterator[Player]:
    engine = ScriptedEngine(model="smol", version="v3")
    async with served(engine, folder / "store.sqlite") as gw:
        # Loading certificates would take longer than all the rest.
        async with httpx.AsyncClient(base_url=gw.agent_url, trust_env=False, verify=False, timeout=20) as client:
            yield Player(gw, engine, client)


def _http(client: httpx.AsyncClient, request: Request, ids: dict[str, str], token: str) -> httpx.Request:
    headers = [(name, value.replace("@TOKEN@", token)) for name, value in request.headers]
    url = request.path if request.query is None else f"{request.path}?{request.query}"
    content = request.content(ids) if request.body is not None else None
    return client.build_request(request.method, url, headers=headers, content=content)


def _said(request: Request | None) -> Reply:
    assert request is not None
    reply = request.reply
    if reply["status"] >= 500:
        raise EngineUnreachable("the engine of the recording failed here")
    if reply["status"] >= 400:
        raise PromptTooLong("the engine of the recording found the prompt too long", 9000, 8192)
    calls = [(name, arguments) for name, arguments in reply["calls"]]
    die_after = len(reply["pieces"]) + bool(reply["reasoning"]) if reply["cut"] else None
    return Reply(reply["pieces"], calls, reply["reasoning"], die_after=die_after)

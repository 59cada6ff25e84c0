"""Gateways of different names on one store: a session is pinned to the one that minted it."""

import json
import sqlite3
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from openai import AuthenticationError

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import BadRequest, NotFound
from capture_proxy.types import GATEWAY_RESTARTED, SessionPolicy
from tests.capture.serving import served

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BASH = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]


async def test_a_session_is_known_to_the_gateway_that_minted_it_alone(tmp_path: Path) -> None:
    store = tmp_path / "s.sqlite"
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(served(ScriptedEngine("from the first"), store))
        other = await stack.enter_async_context(served(ScriptedEngine("from the other"), store, name="gateway-1"))
        session = await other.mint("s1")
        assert session.gateway == "gateway-1"

        with pytest.raises(AuthenticationError):
            await first.openai(session).chat.completions.create(**ASK)
        answer = await other.openai(session).chat.completions.create(**ASK)
        assert answer.choices[0].message.content == "from the other"
        for ask in (first.admin.seal, first.admin.capture, first.admin.session, first.admin.trace):
            with pytest.raises(NotFound, match="'s1' is pinned to gateway 'gateway-1'"):
                await ask("s1")
        with pytest.raises(BadRequest, match="exists already"):
            await first.mint("s1")
        assert not (await other.admin.session("s1")).sealed, "nobody else has ended it"
        assert [s.session_id for s in await first.admin.sessions()] == ["s1"], "the list is the store's"
        capture = await other.admin.capture("s1")
        assert len(capture.turns) == 1 and capture.session.gateway == "gateway-1"

        mine = await first.mint("s2")
        await first.openai(mine).chat.completions.create(**ASK)
        assert mine.gateway == ""
        with pytest.raises(NotFound, match="pinned to the gateway without a name"):
            await other.admin.seal("s2")


async def test_a_restart_is_noted_in_the_sessions_of_the_gateway_that_was_restarted(tmp_path: Path) -> None:
    store = tmp_path / "s.sqlite"

    def engine() -> ScriptedEngine:
        return ScriptedEngine([Reply(tool_calls=[("bash", {"command": "ls"})])])

    async with served(engine(), store) as first:
        mine = await first.mint("mine")
        await first.openai(mine).chat.completions.create(**ASK, tools=BASH)
        async with served(engine(), store, name="gateway-1") as other:
            theirs = await other.mint("theirs")
            await other.openai(theirs).chat.completions.create(**ASK, tools=BASH)
        async with served(engine(), store, name="gateway-1") as other:
            assert GATEWAY_RESTARTED in ((await other.admin.session("theirs")).last_fault or "")
            assert (await other.admin.mint("theirs", SessionPolicy(), {"task": "t"})).token == theirs.token
    faults = {body["session_id"]: body["last_fault"] for body in _sessions(store)}
    assert faults["mine"] is None, "its gateway was never away"


def _sessions(store: Path) -> list[dict]:
    with sqlite3.connect(store) as db:
        return [json.loads(body) for (body,) in db.execute("SELECT body FROM capture_sessions")]


async def test_a_store_of_one_gateway_is_written_as_before(tmp_path: Path) -> None:
    async with served(ScriptedEngine("x"), tmp_path / "s.sqlite") as gateway:
        await gateway.mint("s1")
    (body,) = _sessions(tmp_path / "s.sqlite")
    assert "gateway" not in body

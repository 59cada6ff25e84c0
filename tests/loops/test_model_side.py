"""The way to the model in the runner: nothing is sampled of an engine that has no policy, whatever the timing."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineUnreachable, SessionClosed
from capture_proxy.types import SessionPolicy, TurnStatus
from harness_trainer.rollouts.model_side import EngineGate
from harness_trainer.rollouts.store import RolloutStore
from tests.loops.playing import model_side

ASK = [{"role": "user", "content": "go"}]


@pytest.fixture
def store(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    yield store
    store.close()


@contextlib.asynccontextmanager
async def calling(engine, tmp_path, patience_s=5.0, **policy):
    """A session of the run's store, behind the gate that a runner has."""
    with contextlib.closing(EngineGate(tmp_path / "store.sqlite", patience_s=patience_s)) as gate:
        async with model_side(engine, tmp_path / "store.sqlite", gate=gate) as side:
            watching = asyncio.create_task(gate.watching())
            try:
                async with side.session("s", SessionPolicy(**policy), {}) as session:
                    yield session
            finally:
                watching.cancel()
                await asyncio.wait([watching])


async def test_nothing_is_sampled_before_the_engine_has_a_policy(tmp_path, store):
    engine = ScriptedEngine("hi")
    async with calling(engine, tmp_path) as session:
        asking = asyncio.create_task(session.endpoint.chat(ASK))
        await asyncio.sleep(0.2)
        assert engine.requests == [] and not asking.done()
        store.publish(1)
        assert (await asking).message["content"] == "hi"


async def test_without_patience_it_fails_at_once(tmp_path, store):
    async with calling(ScriptedEngine("hi"), tmp_path, patience_s=0.0) as session:
        with pytest.raises(EngineUnreachable):
            await session.endpoint.chat(ASK)


async def test_a_reply_of_an_engine_that_took_the_others_place_meanwhile_is_thrown_away(tmp_path, store):
    store.publish(1)
    engine = ScriptedEngine(["of base weights", "of a policy"], version="v1")

    async def replaced(piece):
        """All of it within one call: dead, started again, published to. No look in between could notice."""
        if len(engine.requests) == 1 and piece == 0:
            store.forget_engine()
            store.publish(2)

    engine.hold = replaced
    async with calling(engine, tmp_path) as session:
        reply = await session.endpoint.chat(ASK)
        capture = await session.capture()
    assert reply.message["content"] == "of a policy"
    (turn,) = capture.turns
    assert turn.status is TurnStatus.OK
    assert "sampled_anew" in [finding.code for finding in turn.findings]


async def test_a_new_policy_of_the_same_engine_throws_nothing_away(tmp_path, store):
    store.publish(1)
    engine = ScriptedEngine("hi there")

    async def updated(piece):
        store.publish(2)

    engine.hold = updated
    async with calling(engine, tmp_path) as session:
        await session.endpoint.chat(ASK)
    assert len(engine.requests) == 1


async def test_a_call_at_an_engine_that_is_gone_ends_and_is_made_again(tmp_path, store):
    store.publish(1)
    engine = ScriptedEngine([Reply("half", stall=True), "whole"])
    async with calling(engine, tmp_path) as session:
        asking = asyncio.create_task(session.endpoint.chat(ASK))
        while engine.in_flight == 0:
            await asyncio.sleep(0.01)
        store.forget_engine()
        while engine.in_flight:
            await asyncio.sleep(0.01)
        assert len(engine.requests) == 1
        store.publish(2)
        assert (await asking).message["content"] == "whole"


async def test_a_sealed_session_makes_no_call(tmp_path, store):
    store.publish(1)
    async with calling(ScriptedEngine("hi"), tmp_path) as session:
        await session.endpoint.chat(ASK)
        await session.capture()
        with pytest.raises(SessionClosed):
            await session.endpoint.chat(ASK)


async def test_two_pipelines_write_one_store_at_once(tmp_path, store):
    """As a runner beside a gateway: neither loses a turn of its own sessions."""
    engine = ScriptedEngine("hi")
    async with (
        model_side(engine, tmp_path / "store.sqlite") as one,
        model_side(engine, tmp_path / "store.sqlite") as two,
    ):

        async def converse(side, name):
            async with side.session(name, SessionPolicy(), {}) as session:
                for _ in range(10):
                    await session.endpoint.chat(ASK)
                return [turn.index for turn in (await session.capture()).turns]

        found = await asyncio.gather(
            *(converse(side, f"{i}-{n}") for n in range(8) for i, side in enumerate((one, two)))
        )
    assert found == [list(range(10))] * 16

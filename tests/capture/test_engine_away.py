"""An engine that is away, or has no policy yet: calls wait for it, and no reply is of two engines."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineError, EngineUnreachable
from capture_proxy.gate import Gate
from capture_proxy.types import Session, Turn, TurnStatus
from tests.capture.serving import Served, served, until

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
GONE = EngineUnreachable("connection refused")


def patient(**settings: Any) -> Gate:
    return Gate(**{"patience_s": 20.0, **settings})


async def ask(gw: Served, session: Session, **more: Any) -> httpx.Response:
    async with gw.http(session) as http:
        return await http.post(CHAT, json=BODY | more, timeout=30)


async def turns_of(gw: Served) -> list[Turn]:
    return (await gw.admin.capture("s1")).turns


def deltas(response: httpx.Response) -> list[str]:
    """What a streaming client puts together."""
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [c["delta"]["content"] for event in events for c in event.get("choices", []) if c["delta"].get("content")]


async def test_a_held_gateway_lets_no_call_reach_the_engine_until_it_is_told(tmp_path: Path) -> None:
    engine = ScriptedEngine("hello")
    async with served(engine, tmp_path / "s.sqlite", gate=patient(held=True), keepalive_s=0.05) as gw:
        session = await gw.mint()
        calls = [asyncio.create_task(ask(gw, session, stream=stream)) for stream in (True, False)]
        await until(lambda: gw.gateway.sessions.num_in_flight == 2, 20)
        await asyncio.sleep(0.4)
        assert engine.requests == [] and not any(call.done() for call in calls)
        await gw.admin.engine_ready(True)
        streamed, whole = await asyncio.gather(*calls)
        turns = await turns_of(gw)
    assert deltas(streamed) == ["hello"] and whole.json()["choices"][0]["message"]["content"] == "hello"
    assert streamed.text.startswith(": "), "its connection was kept alive meanwhile"
    assert [turn.status for turn in turns] == [TurnStatus.OK] * 2


async def test_calls_wait_while_the_engine_refuses_connections(tmp_path: Path) -> None:
    engine = ScriptedEngine("hello", faults={0: GONE, 1: GONE})
    async with served(engine, tmp_path / "s.sqlite", gate=patient()) as gw:
        session = await gw.mint(max_turns=1)
        response = await ask(gw, session)
        (turn,) = await turns_of(gw)
        assert (await gw.admin.session("s1")).last_fault is None
    assert response.status_code == 200 and len(engine.requests) == 3
    assert turn.trainable and [finding.code for finding in turn.findings] == ["sampled_anew"] * 2


async def test_a_reply_that_broke_off_before_the_agent_had_any_of_it_is_sampled_anew_and_recorded_once(
    tmp_path: Path,
) -> None:
    engine = ScriptedEngine([Reply(["old ", "reply"], die_after=1), "new"])
    async with served(engine, tmp_path / "s.sqlite", gate=patient()) as gw:
        session = await gw.mint()
        response = await ask(gw, session)
        (turn,) = await turns_of(gw)
    assert response.json()["choices"][0]["message"]["content"] == "new"
    assert bytes(turn.completion_ids_T[:-1]) == b"new" and len(turn.logprobs_T) == 4
    assert turn.version_spans[-1].end == 4 and turn.trainable
    (finding,) = turn.findings
    assert finding.detail.startswith("4 tokens were sampled before the engine went away")


async def test_a_stream_of_which_only_the_head_is_out_goes_on_with_the_new_engine(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply("old", die_after=0), "new"])
    async with served(engine, tmp_path / "s.sqlite", gate=patient()) as gw:
        response = await ask(gw, await gw.mint(), stream=True)
        (turn,) = await turns_of(gw)
    assert deltas(response) == ["new"] and response.text.endswith("data: [DONE]\n\n")
    assert response.text.count('"role":"assistant"') == 1, "a stream has one head"
    assert turn.trainable


async def test_what_an_agent_was_sent_is_not_taken_back_and_its_retry_is_a_call_of_its_own(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply(["old ", "reply"], die_after=1), "new"])
    async with served(engine, tmp_path / "s.sqlite", gate=patient()) as gw:
        session = await gw.mint()
        broken = await ask(gw, session, stream=True)
        assert (await gw.admin.session("s1")).last_fault is not None
        again = await ask(gw, session, stream=True)
        first, second = await turns_of(gw)
        assert (await gw.admin.session("s1")).last_fault is None
    assert deltas(broken) == ["old "] and "error" in broken.text
    assert deltas(again) == ["new"]
    assert (first.status, second.status) == (TurnStatus.FAILED, TurnStatus.OK)
    assert not first.trainable and second.trainable


async def test_hold_ends_every_attempt_before_it_is_answered(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply("old", stall=True), Reply("old", stall=True), "new"])
    async with served(engine, tmp_path / "s.sqlite", gate=patient()) as gw:
        session = await gw.mint()
        waiting = asyncio.create_task(ask(gw, session))
        told = asyncio.create_task(ask(gw, session, stream=True))
        await until(lambda: engine.in_flight == 2, 20)
        await gw.admin.engine_ready(False)
        assert engine.in_flight == 0
        await gw.admin.engine_ready(False)  # twice is as good as once
        assert "error" in (await told).text
        await asyncio.sleep(0.1)
        assert len(engine.requests) == 2 and not waiting.done()
        engine.version = "v2"
        await gw.admin.engine_ready(True)
        response = await waiting
        whole = next(turn for turn in await turns_of(gw) if turn.status is TurnStatus.OK)
    assert response.json()["choices"][0]["message"]["content"] == "new"
    assert {span.version for span in whole.version_spans} == {"v2"}


async def test_patience_has_an_end_and_then_the_call_fails_as_without_it(tmp_path: Path) -> None:
    engine = ScriptedEngine("hello")
    async with served(engine, tmp_path / "s.sqlite", gate=Gate(held=True, patience_s=0.3)) as gw:
        response = await ask(gw, await gw.mint())
        (turn,) = await turns_of(gw)
        assert "no policy yet" in str((await gw.admin.session("s1")).last_fault)
    assert response.status_code == 503 and engine.requests == []
    assert turn.status is TurnStatus.FAILED and not turn.trainable


async def test_without_patience_a_call_fails_at_once(tmp_path: Path) -> None:
    engine = ScriptedEngine("hello", faults={0: GONE})
    async with served(engine, tmp_path / "s.sqlite") as gw:
        response = await ask(gw, await gw.mint())
    assert response.status_code == 503 and len(engine.requests) == 1


async def test_a_deadline_that_passes_while_a_call_waits_is_the_engines_fault_and_no_limit(tmp_path: Path) -> None:
    async with served(ScriptedEngine("hello"), tmp_path / "s.sqlite", gate=patient(held=True)) as gw:
        response = await ask(gw, await gw.mint(deadline=time.time() + 2))
        session = await gw.admin.session("s1")
        (turn,) = await turns_of(gw)
    assert response.status_code == 503
    assert session.limit_hit is None and "deadline of this session has passed while" in str(session.last_fault)
    assert turn.status is TurnStatus.FAILED


async def test_an_agent_that_hangs_up_while_its_call_waits_leaves_no_call_behind(tmp_path: Path) -> None:
    engine = ScriptedEngine("hello")
    async with served(engine, tmp_path / "s.sqlite", gate=patient(held=True), hang_up_grace_s=0.0) as gw:
        call = asyncio.create_task(ask(gw, await gw.mint()))
        await until(lambda: gw.gateway.sessions.num_in_flight, 20)
        call.cancel()
        await until(lambda: not gw.gateway.sessions.num_in_flight, 20)
        await gw.admin.engine_ready(True)
        (turn,) = await turns_of(gw)
    assert turn.status is TurnStatus.ABORTED and engine.requests == []


async def test_an_error_of_an_engine_that_is_dying_is_no_error_of_the_call(tmp_path: Path) -> None:
    dead = EngineError("the engine answered 500: EngineCore encountered an issue")
    engine = ScriptedEngine("hello", faults={0: dead, 1: dead}, up=False)
    async with served(engine, tmp_path / "s.sqlite", gate=patient()) as gw:
        session = await gw.mint()
        assert (await ask(gw, session)).status_code == 200
        assert len(engine.requests) == 3
        engine.up, engine.faults = True, {3: dead}
        assert (await ask(gw, session, temperature=0.5)).status_code == 502, "a living engine means what it says"


class Away(ScriptedEngine):
    """Lists models, and counts, only while it is up."""

    async def models(self) -> list[dict[str, Any]]:
        if not self.up:
            raise GONE
        return await super().models()

    async def render(self, request: Any) -> list[int]:
        if not self.up:
            raise GONE
        return await super().render(request)


async def test_models_are_listed_as_they_were_and_prompts_counted_later_while_the_engine_is_away(
    tmp_path: Path,
) -> None:
    engine = Away("hello")
    async with served(engine, tmp_path / "s.sqlite", gate=patient()) as gw:
        session = await gw.mint()
        async with gw.http(session) as http:
            before = (await http.get("/v1/models")).json()
            engine.up = False
            assert (await http.get("/v1/models")).json() == before
            headers = {"x-api-key": session.token, "anthropic-version": "2023-06-01"}
            counting = asyncio.create_task(http.post("/v1/messages/count_tokens", json=BODY, headers=headers))
            await asyncio.sleep(0.3)
            assert not counting.done()
            engine.up = True
            assert (await counting).json()["input_tokens"] > 0

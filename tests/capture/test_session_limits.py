"""What ends a session, what its agent is told, and what the trainer reads of it afterwards."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from capture_proxy.engines.base import ChatRequest
from capture_proxy.engines.scripted import Reply, ScriptedEngine, render
from capture_proxy.errors import EngineError, EngineUnreachable, PromptTooLong
from capture_proxy.types import TurnStatus
from tests.capture.serving import served, until

CHAT = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "bash"}}]
LENGTH = len(render(ChatRequest("m", USER, [], None, {}, None)))


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("limit", ["max_turns", "max_total_tokens", "deadline", "sealed"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_spent_session_can_say_so_in_a_plain_message(tmp_path: Path, limit: str, stream: bool) -> None:
    policy: dict[str, Any] = {"max_turns": 1, "max_total_tokens": 2, "deadline": time.time() + 3, "sealed": None}
    policy = {limit: policy[limit]} if limit != "sealed" else {}
    async with served(ScriptedEngine(["ok"]), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint(at_limit="reply", **policy))
        await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        if limit == "deadline":
            await asyncio.sleep(max(0.0, policy["deadline"] - time.time()) + 0.05)
        if limit == "sealed":
            await gw.admin.seal("s1")
        for _ in range(3):
            if stream:
                chunks = await client.chat.completions.create(
                    model="m", messages=said("more"), tools=TOOLS, stream=True
                )
                got = [c.choices[0] async for c in chunks if c.choices]
                text = "".join(c.delta.content or "" for c in got)
                reason = got[-1].finish_reason
                assert not any(c.delta.tool_calls for c in got)
            else:
                whole = await client.chat.completions.create(model="m", messages=said("more"), tools=TOOLS)
                text, reason = whole.choices[0].message.content or "", whole.choices[0].finish_reason
                assert not whole.choices[0].message.tool_calls
            assert "this session" in text and reason == "stop"
        capture = await gw.admin.capture("s1")
    assert len(capture.turns) == 1  # what we said ourselves is no turn
    assert capture.session.limit_hit == (None if limit == "sealed" else limit)


@pytest.mark.parametrize("sealed", [True, False])
async def test_the_status_of_a_refusal_is_the_policys(tmp_path: Path, sealed: bool) -> None:
    async with served(ScriptedEngine(["ok"]), tmp_path / "s.sqlite") as gw:
        session = await gw.mint(max_turns=1, closed_status=401)
        async with gw.http(session) as http:
            assert (await http.post(CHAT, json={"model": "m", "messages": USER})).status_code == 200
            if sealed:
                await gw.admin.seal("s1")
            refused = await http.post(CHAT, json={"model": "m", "messages": said("more")})
    assert refused.status_code == 401
    assert refused.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "authentication_error",
        "param": None,
        "code": "session_closed",
    }


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at_limit", ["refuse", "reply"])
async def test_a_deadline_that_passes_in_mid_call_aborts_it(tmp_path: Path, stream: bool, at_limit: str) -> None:
    engine = ScriptedEngine([Reply("partial", stall=True)])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint(deadline=time.time() + 0.4, at_limit=at_limit)
        async with gw.http(session) as http:
            response = await http.post(CHAT, json={"model": "m", "messages": USER, "stream": stream})
        await until(lambda: not engine.in_flight)
        capture = await gw.admin.capture("s1")
    (turn,) = capture.turns
    assert engine.num_aborted == 1 and turn.status is TurnStatus.ABORTED and not turn.trainable
    assert turn.message["content"] == "partial"  # the record is of what was sampled, not of what we said
    assert capture.session.limit_hit == "deadline" and capture.session.last_fault is None
    if at_limit == "reply":
        assert response.status_code == 200 and "deadline" in response.text
        assert not stream or response.text.endswith("data: [DONE]\n\n")
    else:
        assert "session_closed" in response.text and response.status_code == (200 if stream else 403)
        assert "[DONE]" not in response.text


async def test_a_clock_that_is_set_forward_takes_no_time_from_an_agent(tmp_path: Path) -> None:
    ahead_s = 0.0

    def clock() -> float:
        return time.time() + ahead_s

    engine = ScriptedEngine(["ok"], first_delay_s=0.05)  # in which a deadline that has passed would cut the call
    async with served(engine, tmp_path / "s.sqlite", clock=clock) as gw:
        session = await gw.mint(deadline=time.time() + 600)
        async with gw.http(session) as http:
            for ahead_s in (0.0, 3600.0):
                response = await http.post(CHAT, json={"model": "m", "messages": said(f"{ahead_s}")})
                assert response.status_code == 200, response.text
        assert (await gw.admin.session("s1")).limit_hit is None
    async with served(engine, tmp_path / "s.sqlite", clock=clock) as gw, gw.http(session) as http:
        response = await http.post(CHAT, json={"model": "m", "messages": said("more")})
        assert response.status_code == 403, "the next gateway has the wall clock alone"


async def test_the_token_budget_cuts_the_last_reply_and_then_ends_the_session(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["a long answer"]), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint(max_total_tokens=20))
        first = await client.chat.completions.create(model="m", messages=USER)
        second = await client.chat.completions.create(model="m", messages=said("two"))
        with pytest.raises(openai.PermissionDeniedError, match="20 tokens"):
            await client.chat.completions.create(model="m", messages=said("three"))
        capture = await gw.admin.capture("s1")
    assert [r.choices[0].finish_reason for r in (first, second)] == ["stop", "length"]
    assert [len(t.completion_ids_T) for t in capture.turns] == [14, 6]
    assert capture.session.limit_hit == "max_total_tokens" and all(t.trainable for t in capture.turns)


async def test_a_cap_per_reply_truncates_the_reply_and_not_the_session(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["a long answer"]), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint(max_tokens=4))
        for text, asked in (("policy", 9), ("agent", 3)):
            await client.chat.completions.create(model="m", messages=said(text), max_tokens=asked)
        capture = await gw.admin.capture("s1")
    assert [t.finish_reason for t in capture.turns] == ["length", "length"]
    assert capture.session.limit_hit is None
    cut = [f.detail for t in capture.turns for f in t.findings if f.code == "cut"]
    assert cut == ["at the policy's max_tokens, 4", "at the agent's own max_tokens, 3"]


async def test_a_prompt_beyond_the_window_ends_the_good_turns_before_it_as_truncated(tmp_path: Path) -> None:
    engine = ScriptedEngine(["ok"], max_model_len=LENGTH + 200)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        for k in range(4):
            await client.chat.completions.create(model="m", messages=said(f"turn {k}"))
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=said("x" * 300))
        capture = await gw.admin.capture("s1")
    assert caught.value.code == "context_length_exceeded"
    assert [t.trainable for t in capture.turns] == [True] * 4 + [False]
    assert capture.session.limit_hit == "context_length" and capture.session.last_fault is None


async def test_an_agent_that_compacts_and_goes_on_is_not_truncated(tmp_path: Path) -> None:
    engine = ScriptedEngine(["ok"], max_model_len=LENGTH + 400)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=said("x" * 500), tools=TOOLS)
        await client.chat.completions.create(model="m", messages=said("a summary, please"))
        assert (await gw.admin.session("s1")).limit_hit == "context_length"  # a side call proves nothing
        await client.chat.completions.create(model="m", messages=said("short"), tools=TOOLS)
        assert (await gw.admin.session("s1")).limit_hit is None


@pytest.mark.parametrize("restart", [False, True])
async def test_a_window_that_stays_full_ends_the_session(tmp_path: Path, restart: bool) -> None:
    engine = ScriptedEngine(["a long answer"], max_model_len=LENGTH + 1)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        for k in range(3):
            reply = await gw.openai(session).chat.completions.create(model="m", messages=said(f"{k}!"), max_tokens=50)
            assert reply.choices[0].finish_reason == "length"
        if not restart:
            with pytest.raises(openai.PermissionDeniedError, match="context length"):
                await gw.openai(session).chat.completions.create(model="m", messages=said("3!"), max_tokens=50)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        with pytest.raises(openai.PermissionDeniedError, match="context length"):
            await gw.openai(session).chat.completions.create(model="m", messages=said("4!"), max_tokens=50)
        capture = await gw.admin.capture("s1")
    assert len(capture.turns) == 3 and capture.session.limit_hit == "context_length"


async def test_an_agent_that_insists_on_a_prompt_that_does_not_fit_is_ended(tmp_path: Path) -> None:
    engine = ScriptedEngine(["ok"], faults={k: PromptTooLong("too long") for k in range(9)})
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            codes = [(await http.post(CHAT, json={"messages": said(str(k))})).status_code for k in range(5)]
    assert codes == [400, 400, 400, 403, 403]


@pytest.mark.parametrize("fault", [EngineError("502"), EngineError("404: <html>"), EngineUnreachable("no such host")])
async def test_a_fault_stands_until_a_later_call_of_the_same_kind_succeeds(tmp_path: Path, fault: Exception) -> None:
    engine = ScriptedEngine(["ok"], faults={2: fault})
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:

            async def ask(text: str, tools: list[Any]) -> httpx.Response:
                return await http.post(CHAT, json={"model": "m", "messages": said(text), "tools": tools})

            for k in range(2):
                await ask(f"{k}", TOOLS)
            assert (await ask("2", TOOLS)).status_code in (502, 503)
            assert (await gw.admin.session("s1")).last_fault == f"{type(fault).__name__}: {fault}"
            await ask("a title", [])
            assert (await gw.admin.session("s1")).last_fault is not None
            await ask("2", TOOLS)
            assert (await gw.admin.session("s1")).last_fault is None


async def test_a_call_that_was_under_way_before_the_fault_does_not_hide_it(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold(piece: int) -> None:
        await gate.wait()

    engine = ScriptedEngine(["slow"], faults={1: EngineError("boom")}, hold=hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            slow = asyncio.create_task(http.post(CHAT, json={"model": "m", "messages": said("slow")}))
            await until(lambda: engine.in_flight)
            assert (await http.post(CHAT, json={"model": "m", "messages": said("bad")})).status_code == 502
            gate.set()
            assert (await slow).status_code == 200
        assert (await gw.admin.session("s1")).last_fault == "EngineError: boom"


@pytest.mark.parametrize("restart", [False, True])
async def test_a_later_refusal_does_not_replace_the_limit_that_came_first(tmp_path: Path, restart: bool) -> None:
    engine = ScriptedEngine(["a long answer"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint(max_turns=1, max_total_tokens=6)
        reply = await gw.openai(session).chat.completions.create(model="m", messages=USER)
        assert reply.choices[0].finish_reason == "length"
        if not restart:
            with pytest.raises(openai.PermissionDeniedError, match="its 1 calls"):
                await gw.openai(session).chat.completions.create(model="m", messages=said("more"))
    async with served(engine, tmp_path / "s.sqlite") as gw:
        with pytest.raises(openai.PermissionDeniedError, match="its 1 calls"):
            await gw.openai(session).chat.completions.create(model="m", messages=said("more"))
        assert (await gw.admin.session("s1")).limit_hit == "max_total_tokens"


async def test_a_call_that_ends_at_a_limit_does_not_replace_the_one_that_came_first(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold(piece: int) -> None:
        await gate.wait()

    engine = ScriptedEngine(["a long answer"], hold=hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint(max_turns=1, max_total_tokens=6)) as http:
            slow = asyncio.create_task(http.post(CHAT, json={"model": "m", "messages": USER}))
            await until(lambda: engine.in_flight)
            assert (await http.post(CHAT, json={"model": "m", "messages": said("more")})).status_code == 403
            gate.set()
            assert (await slow).json()["choices"][0]["finish_reason"] == "length"
        assert (await gw.admin.session("s1")).limit_hit == "max_turns"


async def test_a_window_that_the_agent_got_past_leaves_the_limit_that_was_hit_after_it(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold(piece: int) -> None:
        await gate.wait()

    engine = ScriptedEngine(["slow"], faults={0: PromptTooLong("too long")}, hold=hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint(max_turns=1)) as http:

            async def ask(text: str) -> httpx.Response:
                return await http.post(CHAT, json={"model": "m", "messages": said(text), "tools": TOOLS})

            assert (await ask("too much")).status_code == 400
            slow = asyncio.create_task(ask("slow"))
            await until(lambda: engine.in_flight)
            assert (await ask("one more")).status_code == 403
            assert (await gw.admin.session("s1")).limit_hit == "context_length"
            gate.set()
            assert (await slow).status_code == 200
        assert (await gw.admin.session("s1")).limit_hit == "max_turns"


async def test_a_request_of_the_agents_that_the_engine_refuses_is_no_fault(tmp_path: Path) -> None:
    from capture_proxy.errors import BadRequest

    async with served(ScriptedEngine(["ok"], faults={0: BadRequest("bad stop")}), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            assert (await http.post(CHAT, json={"model": "m", "messages": USER})).status_code == 400
        assert (await gw.admin.session("s1")).last_fault is None

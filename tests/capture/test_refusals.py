"""What bad requests, closed sessions and failing engines look like to an agent."""

import asyncio
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineError
from capture_proxy.types import TurnStatus
from tests.capture.serving import served, until

USER = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "messages": USER}
CHAT = "/v1/chat/completions"


def fault(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] != "server_error"
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"messages": []}',
        b'{"messages": {}}',
        b'{"messages": ["hi"]}',
        b'{"messages": [{"role": "wizard", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": 3}]}',
        b'{"messages": [{"role": "user", "content": [{"text": "x"}]}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": 3}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": true}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "custom", "name": "p"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 40 + b"}",
        b"[" * 100_000,
    ],
)
async def test_a_malformed_body_is_a_400_in_openai_shape(tmp_path: Path, body: bytes) -> None:
    engine = ScriptedEngine()
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            response = await http.post(CHAT, content=body)
    assert response.status_code == 400
    assert fault(response)["type"] == "invalid_request_error"
    assert engine.requests == []


async def test_what_agents_really_send_is_understood(tmp_path: Path) -> None:
    engine = ScriptedEngine(["ok"])
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be brief", "cache_control": {}}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "because",
                "provider_specific_fields": {"x": 1},
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "bash", "arguments": ""}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": None},
        ],
        "tools": [],
        "tool_choice": "auto",
        "max_completion_tokens": 9,
        "user": "someone",
        "reasoning_effort": "high",
        "store": False,
    }
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            response = await http.post(CHAT, json=body)
    assert response.status_code == 200
    request = engine.requests[0]
    assert request.tools == [] and request.tool_choice is None and request.max_tokens == 9
    assert request.messages[0] == {"role": "system", "content": "be brief"}
    assert request.messages[2]["reasoning_content"] == "because"
    assert request.messages[2]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert request.messages[3]["content"] == ""


async def test_half_a_surrogate_pair_is_replaced_not_refused(tmp_path: Path) -> None:
    engine = ScriptedEngine(["ok"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            body = b'{"model": "m", "messages": [{"role": "user", "content": "cut \\ud83d"}]}'
            assert (await http.post(CHAT, content=body)).status_code == 200
    assert engine.requests[0].messages[0]["content"] == "cut �"


async def test_compressed_bodies(tmp_path: Path) -> None:
    plain = json.dumps(BODY).encode()
    engine = ScriptedEngine(["ok"])
    async with served(engine, tmp_path / "s.sqlite", max_body=100_000) as gw:
        async with gw.http(await gw.mint()) as http:

            async def status(encoding: str, body: bytes) -> int:
                response = await http.post(CHAT, content=body, headers={"content-encoding": encoding})
                if response.status_code != 200:
                    fault(response)
                return response.status_code

            assert await status("identity", plain) == 200
            assert await status("gzip", gzip.compress(plain)) == 200
            assert await status("deflate", zlib.compress(plain)) == 200
            assert await status("foo", plain) == 415
            assert await status("gzip", b"garbage") == 400
            assert await status("gzip", gzip.compress(plain)[:-12]) == 400
            assert await status("gzip", gzip.compress(bytes(50_000_000))) == 413
            assert await status("identity", bytes(100_001)) == 413
        requests = (await gw.admin.capture("s1")).turns
    assert len(requests) == 3
    assert all(turn.request == requests[0].request for turn in requests)


async def test_no_or_unknown_tokens_get_401(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        async with gw.http() as http:
            assert fault(await http.post(CHAT, json=BODY))["type"] == "authentication_error"
            for header in (b"Bearer sk-wrong", b"Bearer", b"Basic abc", b"Bearer \xe9"):
                response = await http.post(CHAT, json=BODY, headers={"authorization": header})
                assert response.status_code == 401
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.get("/sessions")).status_code == 404  # no admin route on the agents' port
            assert fault(await http.get("/nowhere"))["code"] == "not_found"


async def test_a_sealed_session_gets_403(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        assert (await gw.admin.seal("s1")).sealed
        with pytest.raises(openai.PermissionDeniedError):
            await gw.openai(session).chat.completions.create(model="m", messages=USER)
        assert (await gw.admin.seal("s1")).sealed  # again is no error


async def test_a_spent_turn_budget_gets_403_and_side_calls_do_not_spend_it(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "bash"}}]
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint(max_turns=2))
        await client.chat.completions.create(model="m", messages=USER)  # a title, as it turns out
        for text in ("one", "two"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], tools=tools)
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(model="m", messages=USER, tools=tools)
        await client.chat.completions.create(model="m", messages=USER)  # another title still passes
        capture = await gw.admin.capture("s1")
    assert capture.session.limit_hit == "max_turns"
    assert [t.role.value for t in capture.turns] == ["side", "agent", "agent", "side"]


async def test_a_passed_deadline_gets_403(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        session = await gw.mint(deadline=1.0)
        with pytest.raises(openai.PermissionDeniedError):
            await gw.openai(session).chat.completions.create(model="m", messages=USER)
        assert (await gw.admin.session("s1")).limit_hit == "deadline"


async def test_an_engine_fault_is_remembered_until_a_turn_succeeds(tmp_path: Path) -> None:
    engine = ScriptedEngine(["ok"], faults={0: EngineError("boom")})
    async with served(engine, tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint(max_turns=1))
        for stream in (True, False):
            if stream:
                with pytest.raises(openai.InternalServerError) as caught:
                    await client.chat.completions.create(model="m", messages=USER, stream=True)
                assert caught.value.status_code == 502
                assert (await gw.admin.session("s1")).last_fault == "EngineError: boom"
            else:  # the failed call did not spend the budget
                await client.chat.completions.create(model="m", messages=USER)
        capture = await gw.admin.capture("s1")
    assert capture.session.last_fault is None
    assert [t.status for t in capture.turns] == [TurnStatus.FAILED, TurnStatus.OK]


async def test_an_engine_that_dies_in_mid_stream_is_an_error_event_without_done(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply(["some ", "text"], die_after=1)])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        async with gw.http(session) as http:
            response = await http.post(CHAT, json=BODY | {"stream": True})
        with pytest.raises(openai.APIError):
            stream = await gw.openai(session).chat.completions.create(model="m", messages=USER, stream=True)
            async for _ in stream:
                pass
        turn = (await gw.admin.capture("s1")).turns[0]
    assert "[DONE]" not in response.text and '"engine_unreachable"' in response.text
    assert turn.status is TurnStatus.FAILED and not turn.trainable
    assert bytes(turn.completion_ids_T) == b"some " and turn.message["content"] == "some "


@pytest.mark.parametrize("stream", [True, False])
async def test_a_hang_up_aborts_the_engine_and_records_what_was_sampled(tmp_path: Path, stream: bool) -> None:
    engine = ScriptedEngine([Reply("partial", stall=True)])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        async with gw.http(session) as http:
            call = asyncio.create_task(http.post(CHAT, json=BODY | {"stream": stream}))
            await until(lambda: engine.in_flight)
            await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await until(lambda: engine.num_aborted, 2.0)
        await until(lambda: not gw.gateway.sessions.num_in_flight)
        (turn,) = (await gw.admin.capture("s1")).turns
        assert (await gw.admin.stats())["turns"]["aborted"] == 1
    assert turn.status is TurnStatus.ABORTED and not turn.trainable
    assert turn.message["content"] == "partial" and len(turn.completion_ids_T) == len(turn.logprobs_T) == 8


async def test_sealing_aborts_calls_in_flight(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply("x", stall=True)])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        async with gw.http(session) as http:
            call = asyncio.create_task(http.post(CHAT, json=BODY))
            await until(lambda: engine.in_flight)
            await gw.admin.seal("s1")
            assert engine.in_flight == 0
            assert fault(await call)["type"] == "permission_error"
        (turn,) = (await gw.admin.capture("s1")).turns
    assert turn.status is TurnStatus.ABORTED


async def test_silence_is_filled_with_comments_that_no_client_sees(tmp_path: Path) -> None:
    engine = ScriptedEngine(["late"], first_delay_s=0.2)
    async with served(engine, tmp_path / "s.sqlite", keepalive_s=0.05) as gw:
        session = await gw.mint()
        async with gw.http(session) as http:
            raw = (await http.post(CHAT, json=BODY | {"stream": True})).text
        stream = await gw.openai(session).chat.completions.create(model="m", messages=USER, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    assert raw.startswith(": keep-alive\n\n") and raw.endswith("data: [DONE]\n\n")
    assert text == "late"


async def test_a_bug_in_an_engine_is_an_error_reply_and_a_failed_turn(tmp_path: Path) -> None:
    engine = ScriptedEngine(["x"], faults={0: ZeroDivisionError("oops")})
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            response = await http.post(CHAT, json=BODY)
        (turn,) = (await gw.admin.capture("s1")).turns
    assert response.status_code == 502 and "ZeroDivisionError" in fault(response)["message"]
    assert turn.status is TurnStatus.FAILED

"""The events of an Anthropic stream, as bytes and as the official SDK reads them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from capture_proxy.dialects.anthropic import Anthropic
from capture_proxy.dialects.anthropic_content import signature
from capture_proxy.dialects.base import Call
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineUnreachable
from capture_proxy.types import Turn, TurnRole, TurnStatus
from tests.capture.serving import Served, served, until

USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"name": "bash", "input_schema": {"type": "object"}}]
BODY: dict[str, Any] = {"model": "m", "max_tokens": 64, "messages": USER, "stream": True}
CALL = Call("m", USER, [], None, {}, 64, True, True)
HEADERS = {"anthropic-version": "2023-06-01"}


def read(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its data says."""
    events = []
    for text in raw.decode().split("\n\n")[:-1]:
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def turn_of(**message: Any) -> Turn:
    whole = {"role": "assistant", "content": None, **message}
    ok, agent = TurnStatus.OK, TurnRole.AGENT
    return Turn("t", "s", 0, "anthropic", {}, {}, {}, [1] * 7, [2] * 3, [-0.1] * 3, [], whole, "stop", ok, agent)


def function(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"id_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def fold(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that the events add up to; fails where a block is not opened, filled and closed in order."""
    blocks: list[dict[str, Any]] = []
    open_index: int | None = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(blocks)
            open_index = event["index"]
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            delta = event["delta"]
            key = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(
                delta["type"]
            )
            value = delta[key] if key else delta["partial_json"]
            blocks[-1][key or "json"] += value
            assert blocks[-1]["type"] == {"text": "text", "thinking": "thinking", "signature": "thinking"}.get(
                key or "", "tool_use"
            )
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
    assert open_index is None
    return blocks


def test_the_events_of_a_whole_reply_come_in_order() -> None:
    writer = Anthropic().stream("t", CALL)
    calls = [function("a", '{"x":   1}'), function("b", "{}")]
    raw = writer.start(7) + writer.delta("", "a") + writer.delta("b", "") + writer.delta("c", "")
    raw += writer.finish(turn_of(reasoning_content="a", content="bcd", tool_calls=calls))
    events = read(raw)
    assert [e["type"] for e in events if "block" not in e["type"]] == ["message_start", "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] == 7
    assert fold(events) == [
        {"type": "thinking", "thinking": "a", "signature": signature("a"), "json": ""},
        {"type": "text", "text": "bcd", "json": ""},
        {"type": "tool_use", "id": "id_a", "name": "a", "input": {}, "json": '{"x":   1}'},
        {"type": "tool_use", "id": "id_b", "name": "b", "input": {}, "json": "{}"},
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["input_tokens"] == 7 and events[-2]["usage"]["output_tokens"] == 3
    assert b"[DONE]" not in raw


def test_text_that_was_held_back_comes_at_the_end_in_blocks_of_its_own() -> None:
    writer = Anthropic().stream("t", CALL)
    raw = writer.start(None) + writer.finish(turn_of(reasoning_content="think", content="text"))
    blocks = fold(read(raw))
    assert [(b["type"], b.get("text", b.get("thinking"))) for b in blocks] == [("thinking", "think"), ("text", "text")]
    writer = Anthropic().stream("t", CALL)
    raw = (
        writer.start(1)
        + writer.delta("te", "th")
        + writer.delta("", "ink")
        + writer.finish(turn_of(reasoning_content="think!", content="text"))
    )
    blocks = fold(read(raw))
    assert "".join(b.get("thinking", "") for b in blocks) == "think!"
    assert "".join(b.get("text", "") for b in blocks) == "text"
    assert all(b["signature"] == signature(b["thinking"]) for b in blocks if b["type"] == "thinking")


def test_an_unknown_prompt_length_is_made_good_at_the_end() -> None:
    writer = Anthropic().stream("t", CALL)
    events = read(writer.start(None) + writer.finish(turn_of(content="x")))
    assert events[0]["message"]["usage"]["input_tokens"] == 0
    assert events[-2]["usage"]["input_tokens"] == 7


def test_a_reply_that_comes_without_a_start_has_one_all_the_same() -> None:
    events = read(Anthropic().stream("t", CALL).finish(turn_of(content="x")))
    assert [e["type"] for e in events].count("message_start") == 1 and events[0]["type"] == "message_start"


async def test_a_silent_engine_is_bridged_by_pings_that_the_sdk_skips(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold(piece: int) -> None:
        if piece == 1:
            await gate.wait()

    engine = ScriptedEngine([Reply(["first", "second"])], hold=hold, first_delay_s=0.15)
    async with served(engine, tmp_path / "s.sqlite", keepalive_s=0.04) as gw:
        session = await gw.mint()
        raw = b""
        async with (
            gw.http(session) as http,
            http.stream("POST", "/v1/messages", json=BODY, headers=HEADERS) as response,
        ):
            assert response.headers["content-type"].startswith("text/event-stream")
            async for chunk in response.aiter_bytes():
                raw += chunk
                if raw.partition(b"first")[2].count(b"event: ping") >= 2:
                    gate.set()
        client = anthropic.AsyncAnthropic(base_url=gw.agent_url, api_key=session.token, max_retries=0)
        async with client.messages.stream(**{k: v for k, v in BODY.items() if k != "stream"}) as stream:
            message = await stream.get_final_message()
        turns = (await gw.admin.capture("s1")).turns
    kinds = [e["type"] for e in read(raw)]
    assert kinds[0] == "ping" and kinds.count("message_start") == 1 and kinds[-1] == "message_stop"
    assert "".join(b["text"] for b in fold(read(raw))) == "firstsecond" == message.content[0].text  # type: ignore[union-attr]
    assert [t.completion_ids_T for t in turns] == [[*b"firstsecond", 260]] * 2


async def test_a_reply_that_breaks_off_ends_in_an_error_event(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply(["one", "two"], die_after=1)])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        async with gw.http(session) as http:
            response = await http.post("/v1/messages", json=BODY, headers=HEADERS)
        client = anthropic.AsyncAnthropic(base_url=gw.agent_url, api_key=session.token, max_retries=0)
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            async with client.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
                await stream.get_final_message()
        turns = (await gw.admin.capture("s1")).turns
    events = read(response.content)
    assert response.status_code == 200 and events[-1]["error"]["type"] == "api_error"
    assert not any(e["type"] in ("message_delta", "message_stop") for e in events)
    assert [t.status for t in turns] == [TurnStatus.FAILED] * 2


async def test_an_error_after_silence_is_an_event_too(tmp_path: Path) -> None:
    class Slow(ScriptedEngine):
        async def _events(self, request: Any, reply: Reply) -> Any:
            await asyncio.sleep(0.1)
            raise EngineUnreachable("gone")
            yield

    async with served(Slow(), tmp_path / "s.sqlite", keepalive_s=0.02) as gw, gw.http(await gw.mint()) as http:
        response = await http.post("/v1/messages", json=BODY, headers=HEADERS)
    events = read(response.content)
    assert events[0]["type"] == "ping" and events[-1]["type"] == "error"


async def drop_stream(gw: Served, engine: ScriptedEngine, token: str) -> None:
    async with gw.http() as http:
        headers = {"x-api-key": token}
        async with http.stream("POST", "/v1/messages?beta=true", json=BODY, headers=headers) as response:
            async for chunk in response.aiter_bytes():
                if b"tok2" in chunk:
                    break


async def drop_whole(gw: Served, engine: ScriptedEngine, token: str) -> None:
    async with gw.http() as http:
        ask = http.post("/v1/messages", json={**BODY, "stream": False}, headers={"x-api-key": token})
        task = asyncio.create_task(ask)
        await until(lambda: engine.in_flight == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("drop", [drop_stream, drop_whole])
async def test_hanging_up_stops_the_engine(
    tmp_path: Path, drop: Callable[[Served, ScriptedEngine, str], Awaitable[None]]
) -> None:
    engine = ScriptedEngine([Reply(["tok0", "tok1", "tok2"], stall=True)])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        await drop(gw, engine, session.token)
        await until(lambda: engine.in_flight == 0 and gw.gateway.sessions.num_in_flight == 0, timeout_s=2)
        (turn,) = (await gw.admin.capture("s1")).turns
    assert turn.status is TurnStatus.ABORTED and not turn.trainable

"""The official SDK as the agent: what it is shown, and what is recorded."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from capture_proxy.engines.scripted import END, Reply, ScriptedEngine, render
from capture_proxy.types import TurnRole, TurnStatus
from tests.capture.serving import served

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
USER = [{"role": "user", "content": "hi"}]


async def test_a_plain_reply_is_shown_and_recorded_token_by_token(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["héllo"]), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        reply = await gw.openai(session).chat.completions.create(model="m", messages=USER)
        turns = (await gw.admin.capture("s1")).turns
    assert reply.choices[0].message.content == "héllo"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None and reply.usage.completion_tokens == len("héllo".encode()) + 1
    (turn,) = turns
    assert turn.completion_ids_T == [*"héllo".encode(), END]
    assert turn.logprobs_T == [-(i % 7 + 1) / 10 for i in turn.completion_ids_T]
    assert turn.message["content"] == "héllo"
    assert (turn.status, turn.role, turn.trainable) == (TurnStatus.OK, TurnRole.AGENT, True)


async def test_a_stream_has_role_text_whole_calls_finish_usage_and_done(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply(["I ", "look."], [("bash", {"cmd": "ls"}), ("bash", {})], reasoning="hm")])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        body = {"model": "m", "messages": USER, "tools": TOOLS, "stream": True}
        async with gw.http(session) as http:
            raw = await http.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}})
            without = await http.post("/v1/chat/completions", json=body)
    lines = [line.removeprefix("data: ") for line in raw.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("content") or "" for d in deltas) == "I look."
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "hm"
    calls = [call for d in deltas for call in d.get("tool_calls", [])]
    assert [c["index"] for c in calls] == [0, 1]
    assert all(c["id"] and c["type"] == "function" and c["function"]["name"] == "bash" for c in calls)
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"cmd": "ls"}, {}]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["total_tokens"] > 0 and chunks[-1]["choices"] == []
    assert "usage" not in without.text


async def test_streamed_and_whole_replies_leave_the_same_record(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply(["a", "b"], [("bash", {"x": 1})])])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        async with await client.chat.completions.create(model="m", messages=USER, tools=TOOLS, stream=True) as stream:
            async for _ in stream:
                pass
        one, two = (await gw.admin.capture("s1")).turns
    for turn in (one, two):
        for call in turn.message["tool_calls"]:
            call.pop("id")
    assert one.message == two.message
    assert one.completion_ids_T == two.completion_ids_T


async def test_text_reaches_the_agent_while_the_engine_still_samples(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold(piece: int) -> None:
        if piece == 1:
            await gate.wait()

    engine = ScriptedEngine([Reply(["first", "second"])], hold=hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        async with await client.chat.completions.create(model="m", messages=USER, stream=True) as stream:
            seen = ""
            async for chunk in stream:
                seen += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if seen == "first" and not gate.is_set():
                    assert (await gw.admin.capture("s1")).turns == []  # nothing is committed yet
                    gate.set()
    assert seen == "firstsecond"


async def test_the_turn_is_in_the_store_before_the_agent_sees_the_finish(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply("text", [("bash", {})])])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        body = {"model": "m", "messages": USER, "tools": TOOLS, "stream": True}
        async with gw.http(session) as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if "tool_calls" in line:
                    assert len((await gw.admin.capture("s1")).turns) == 1
                    break
            else:
                pytest.fail("no tool call arrived")


async def test_a_history_that_is_echoed_extends_the_prompt_by_prefix(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply("Looking.", [("bash", {"cmd": "ls"})]), "done"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        first = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        message = first.choices[0].message
        assert message.tool_calls
        history = [
            *USER,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.txt"},
        ]
        await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
        one, two = (await gw.admin.capture("s1")).turns
    whole = one.prompt_ids_P + one.completion_ids_T
    assert two.prompt_ids_P[: len(whole)] == whole


@pytest.mark.parametrize("choice", ["auto", "none", "required", {"type": "function", "function": {"name": "bash"}}])
async def test_a_forced_tool_choice_shapes_the_sampling(tmp_path: Path, choice: Any) -> None:
    async with served(ScriptedEngine(["ok"]), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        await client.chat.completions.create(model="m", messages=USER, tools=TOOLS, tool_choice=choice)
        (turn,) = (await gw.admin.capture("s1")).turns
    shaped = [f.detail for f in turn.findings if f.code == "shaped_sampling"]
    assert shaped == ([] if choice in ("auto", "none") else ["tool_choice"])


async def test_a_weight_update_in_the_middle_of_a_reply_gives_two_spans(tmp_path: Path) -> None:
    async def hold(piece: int) -> None:
        if piece == 1:
            engine.version = "v2"

    engine = ScriptedEngine([Reply(["abc", "de"])], version="v1", hold=hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        await gw.openai(await gw.mint()).chat.completions.create(model="m", messages=USER)
        (turn,) = (await gw.admin.capture("s1")).turns
    assert [(s.version, s.start, s.end) for s in turn.version_spans] == [("v1", 0, 3), ("v2", 3, 6)]


async def test_the_policy_decides_sampling_and_the_wish_is_recorded(tmp_path: Path) -> None:
    engine = ScriptedEngine(["ok"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint(sampling={"temperature": 1.0, "top_p": 0.9}, max_tokens=50)
        await gw.openai(session).chat.completions.create(
            model="m", messages=USER, temperature=0.1, top_p=0.8, max_tokens=64, seed=7, stop=["x"]
        )
        (turn,) = (await gw.admin.capture("s1")).turns
    asked = engine.requests[0]
    assert asked.sampling["temperature"] == 1.0 and asked.sampling["top_p"] == 0.9
    assert asked.sampling["top_k"] == 0 and "seed" not in asked.sampling and asked.sampling["stop"] == ["x"]
    assert asked.max_tokens == 50
    assert turn.requested_sampling == {
        "temperature": 0.1,
        "top_p": 0.8,
        "seed": 7,
        "stop": ["x"],
        "max_tokens": 64,
    }
    assert turn.sampling["temperature"] == 1.0 and turn.sampling["max_tokens"] == 50
    assert [f.code for f in turn.findings] == ["shaped_sampling"]
    assert turn.trainable


async def test_an_empty_policy_leaves_the_agent_its_wishes(tmp_path: Path) -> None:
    engine = ScriptedEngine(["ok"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        await gw.openai(await gw.mint()).chat.completions.create(model="m", messages=USER, temperature=0.3)
    assert engine.requests[0].sampling == {"temperature": 0.3}


async def test_max_tokens_is_clamped_to_the_window_and_the_cut_is_a_truncation(tmp_path: Path) -> None:
    engine = ScriptedEngine(["a long answer"])
    engine.max_model_len = len(render_of(USER)) + 4
    async with served(engine, tmp_path / "s.sqlite") as gw:
        reply = await gw.openai(await gw.mint()).chat.completions.create(model="m", messages=USER, max_tokens=900)
        capture = await gw.admin.capture("s1")
    assert reply.choices[0].finish_reason == "length"
    assert len(capture.turns[0].completion_ids_T) == 4
    assert [f.code for f in capture.turns[0].findings] == ["clamped"]
    assert capture.session.limit_hit == "context_length"


async def test_a_prompt_beyond_the_window_is_the_dialects_own_error(tmp_path: Path) -> None:
    engine = ScriptedEngine(["x"], max_model_len=3)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        with pytest.raises(openai.BadRequestError) as caught:
            await gw.openai(await gw.mint()).chat.completions.create(model="m", messages=USER, stream=True)
        capture = await gw.admin.capture("s1")
    assert caught.value.code == "context_length_exceeded"
    assert capture.session.limit_hit == "context_length"
    assert capture.session.last_fault is None
    assert capture.turns[0].status is TurnStatus.FAILED


async def test_models_are_the_engines(tmp_path: Path) -> None:
    async with served(ScriptedEngine(model="smol"), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        assert [m.id async for m in client.models.list()] == ["smol"]
        assert (await client.models.retrieve("smol")).id == "smol"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


def render_of(messages: list[dict[str, str]]) -> list[int]:
    from capture_proxy.engines.base import ChatRequest

    return render(ChatRequest("m", messages, [], None, {}, None))

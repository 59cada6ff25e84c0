"""The official Anthropic SDK as the agent: what it is shown, and what is recorded."""

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from capture_proxy.dialects.anthropic import Anthropic
from capture_proxy.dialects.anthropic_content import signature
from capture_proxy.dialects.base import Call
from capture_proxy.engines.base import ChatRequest
from capture_proxy.engines.scripted import END, Reply, ScriptedEngine, render
from capture_proxy.errors import CaptureError, EngineError, EngineUnreachable
from capture_proxy.types import Session, Turn, TurnRole, TurnStatus
from tests.capture.serving import Served, served

USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"name": "bash", "description": "d", "input_schema": {"type": "object"}}]
ASK: dict[str, Any] = {"model": "m", "max_tokens": 512, "messages": USER}


def sdk(gw: Served, session: Session, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gw.agent_url, api_key=session.token, max_retries=0, **options)


async def test_a_plain_reply_is_shown_and_recorded_token_by_token(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["héllo"]), tmp_path / "s.sqlite") as gw:
        reply = await sdk(gw, await gw.mint()).messages.create(**ASK)
        (turn,) = (await gw.admin.capture("s1")).turns
    assert reply.id == f"msg_{turn.turn_id}" and reply.type == "message" and reply.role == "assistant"
    assert [b.model_dump(exclude_none=True) for b in reply.content] == [{"type": "text", "text": "héllo"}]
    assert (reply.model, reply.stop_reason, reply.stop_sequence) == ("m", "end_turn", None)
    assert reply.usage.input_tokens == len(turn.prompt_ids_P) > 0
    assert reply.usage.output_tokens == len(turn.completion_ids_T)
    assert reply.usage.cache_read_input_tokens == reply.usage.cache_creation_input_tokens == 0
    assert turn.dialect == "anthropic" and turn.trainable
    assert turn.completion_ids_T == [*"héllo".encode(), END]
    assert turn.requested_sampling == {"max_tokens": 512}


async def test_thinking_text_and_calls_are_blocks_and_streaming_shows_the_same(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply(["I ", "look."], [("bash", {"cmd": "ls  -l"}), ("bash", {})], reasoning="hm")])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        client = sdk(gw, await gw.mint())
        whole = await client.messages.create(**ASK, tools=TOOLS)
        async with client.messages.stream(**ASK, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
        async with client.beta.messages.stream(**ASK, tools=TOOLS, betas=["interleaved-thinking-2025-05-14"]) as stream:
            beta = await stream.get_final_message()
        turns = (await gw.admin.capture("s1")).turns
    for reply in (whole, streamed, beta):
        blocks = [b.model_dump(exclude_none=True) for b in reply.content]
        ids = [b.pop("id") for b in blocks if b["type"] == "tool_use"]
        assert len(set(ids)) == 2 and all(ids)
        assert [{k: v for k, v in b.items() if k not in ("caller", "parsed_output")} for b in blocks] == [
            {"type": "thinking", "thinking": "hm", "signature": signature("hm")},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "name": "bash", "input": {"cmd": "ls  -l"}},
            {"type": "tool_use", "name": "bash", "input": {}},
        ]
        assert reply.stop_reason == "tool_use"
        assert reply.usage.input_tokens == len(turns[0].prompt_ids_P)
        assert reply.usage.output_tokens == len(turns[0].completion_ids_T)
    for turn in turns:
        for call in turn.message["tool_calls"]:
            call.pop("id")
    assert turns[0].message == turns[1].message == turns[2].message


async def test_an_empty_reply_has_no_blocks(tmp_path: Path) -> None:
    async with served(ScriptedEngine([""]), tmp_path / "s.sqlite") as gw:
        client = sdk(gw, await gw.mint())
        whole = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            streamed = await stream.get_final_message()
    for reply in (whole, streamed):
        assert reply.content == [] and reply.stop_reason == "end_turn" and reply.usage.output_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_each_end_has_its_stop_reason(tmp_path: Path, stream: bool) -> None:
    script: list[Reply | str] = [
        "too long to fit",
        Reply("as far as", stop_sequence="STOP"),
        Reply("no", finish_reason="content_filter"),
    ]
    async with served(ScriptedEngine(script), tmp_path / "s.sqlite") as gw:
        client = sdk(gw, await gw.mint())
        seen = []
        for max_tokens in (5, 100, 100):
            ask: dict[str, Any] = {**ASK, "max_tokens": max_tokens, "stop_sequences": ["STOP", "HALT"]}
            if stream:
                async with client.messages.stream(**ask) as events:
                    reply: anthropic.types.Message = await events.get_final_message()
            else:
                reply = await client.messages.create(**ask)
            seen.append((reply.content[0].text, reply.stop_reason, reply.stop_sequence))  # type: ignore[union-attr]
        turns = (await gw.admin.capture("s1")).turns
    assert seen == [
        ("too l", "max_tokens", None),
        ("as far as", "stop_sequence", "STOP"),
        ("no", "refusal", None),
    ]
    assert [t.stop_sequence for t in turns] == [None, "STOP", None]
    assert turns[1].sampling["stop"] == ["STOP", "HALT"] and turns[1].completion_ids_T[-1] != END


async def test_calls_that_an_engine_ends_with_stop_still_ask_for_tools(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply("", [("bash", {})], finish_reason="stop")])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        reply = await sdk(gw, await gw.mint()).messages.create(**ASK, tools=TOOLS)
    assert reply.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", {}),
        ("  ", {}),
        ('{"a":   1}', {"a": 1}),
        ("[1]", [1]),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"a": "\\ud83', {"invalid_json": '{"a": "\\ud83'}),
        ('{"a": NaN}', {"invalid_json": '{"a": NaN}'}),
    ],
)
def test_arguments_are_always_valid_json_and_streamed_as_the_whole_reply_has_them(arguments: str, shown: Any) -> None:
    call = Call("m", USER, [], None, {}, 9, False, True)
    turn = turn_with(tool_calls=[{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}])
    (block,) = json.loads(Anthropic().reply(call, turn))["content"]
    assert block["input"] == shown
    events = Anthropic().stream("t", call).finish(turn).decode().split("\n\n")
    deltas = [json.loads(e.split("data: ")[1]) for e in events if "input_json_delta" in e]
    assert [json.loads(d["delta"]["partial_json"]) for d in deltas] == [shown]
    if shown == {"a": 1}:
        assert deltas[0]["delta"]["partial_json"] == arguments


def turn_with(**message: Any) -> Turn:
    whole = {"role": "assistant", "content": None, **message}
    ok, agent = TurnStatus.OK, TurnRole.AGENT
    return Turn("t", "s", 0, "anthropic", {}, {}, {}, [1], [2], [-0.1], [], whole, "tool_calls", ok, agent)


# --- tokens, counts, models, side calls


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_the_token_may_be_a_key_or_a_bearer(tmp_path: Path, header: str) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        if header == "authorization":
            client = anthropic.AsyncAnthropic(base_url=gw.agent_url, auth_token=session.token, max_retries=0)
        else:
            client = sdk(gw, session)
        assert (await client.messages.create(**ASK)).content
        assert [m.id async for m in client.models.list()] == ["scripted"]


async def test_the_count_is_the_length_of_the_prompt_that_the_same_body_has(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        client = sdk(gw, await gw.mint())
        tools = [{**TOOLS[0], "name": f"tool{i}", "description": "long " * 50} for i in range(5)]
        body: dict[str, Any] = {"model": "m", "messages": USER, "system": "be good " * 100, "tools": tools}
        counts = [(await client.messages.count_tokens(**body)).input_tokens]
        counts.append((await client.beta.messages.count_tokens(**body)).input_tokens)
        reply = await client.messages.create(**body, max_tokens=9)
        (turn,) = (await gw.admin.capture("s1")).turns
    assert counts == [reply.usage.input_tokens] * 2 == [len(turn.prompt_ids_P)] * 2


async def test_models_are_in_the_clients_own_shape(tmp_path: Path) -> None:
    async with served(ScriptedEngine(model="smol", max_model_len=777), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        client = sdk(gw, session)
        page = await client.models.list()
        (model,) = [m async for m in client.models.list(limit=1)]
        assert await client.models.retrieve("smol") == model
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("other")
        assert [m.object async for m in gw.openai(session).models.list()] == ["model"]
    assert (page.has_more, page.first_id, page.last_id) == (False, "smol", "smol")
    assert (model.type, model.id, model.display_name, model.max_input_tokens) == ("model", "smol", "smol", 777)
    assert model.created_at.year == 1970


async def test_a_quota_probe_and_a_title_are_recorded_beside_the_agents_work(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["q", "A title", Reply("", [("bash", {})])]), tmp_path / "s.sqlite") as gw:
        client = sdk(gw, await gw.mint())
        await client.messages.create(model="haiku", max_tokens=1, messages=[{"role": "user", "content": "quota"}])
        await client.messages.create(model="haiku", max_tokens=50, system="Write a 5 word title", messages=USER)
        await client.messages.create(**ASK, tools=TOOLS)
        turns = (await gw.admin.capture("s1")).turns
    assert [t.role for t in turns] == [TurnRole.SIDE, TurnRole.SIDE, TurnRole.AGENT]
    assert all(t.side_reason for t in turns[:2])


# --- errors


async def test_a_prompt_beyond_the_window_is_said_as_agents_expect_it(tmp_path: Path) -> None:
    engine = ScriptedEngine(["x"], max_model_len=3)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        client = sdk(gw, await gw.mint())
        num = (await client.messages.count_tokens(model="m", messages=USER)).input_tokens
        for stream in (True, False):
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(**ASK, stream=stream)
            assert caught.value.body == {
                "type": "error",
                "error": {"type": "invalid_request_error", "message": f"prompt is too long: {num} tokens > 3 maximum"},
                "request_id": None,
            }
        engine.max_model_len = num
        with pytest.raises(anthropic.BadRequestError, match=f"{num} tokens > {num - 1} maximum"):
            await client.messages.create(**ASK)
        capture = await gw.admin.capture("s1")
    assert capture.session.limit_hit == "context_length" and capture.session.last_fault is None


async def test_a_wish_beyond_the_window_is_clamped(tmp_path: Path) -> None:
    prompt = render(ChatRequest("m", USER, [], None, {}, None))
    engine = ScriptedEngine(["a long answer"], max_model_len=len(prompt) + 4)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        reply = await sdk(gw, await gw.mint()).messages.create(**{**ASK, "max_tokens": 9000})
        (turn,) = (await gw.admin.capture("s1")).turns
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 4)
    assert [f.code for f in turn.findings] == ["clamped"] and turn.requested_sampling["max_tokens"] == 9000


@pytest.mark.parametrize("fault", [EngineError("bad"), EngineUnreachable("gone")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_engine_is_an_api_error(tmp_path: Path, fault: Exception, stream: bool) -> None:
    async with served(ScriptedEngine(faults={0: fault}), tmp_path / "s.sqlite") as gw:
        with pytest.raises(anthropic.InternalServerError) as caught:
            await sdk(gw, await gw.mint()).messages.create(**ASK, stream=stream)
    assert isinstance(caught.value.body, dict) and caught.value.body["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_each_status_has_its_error_type(status: int, kind: str) -> None:
    error = CaptureError("why")
    error.status = status
    assert json.loads(Anthropic().error(error)) == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
        "request_id": None,
    }


async def test_refusals_are_in_the_dialects_own_shape(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite", max_body=3000) as gw:
        session = await gw.mint(max_turns=1)
        client = sdk(gw, session)
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await anthropic.AsyncAnthropic(base_url=gw.agent_url, api_key="x", max_retries=0).messages.create(**ASK)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens: field required"):
            await client.post("/v1/messages", body={"model": "m", "messages": USER}, cast_to=object)
        with pytest.raises(anthropic.RequestTooLargeError, match="request_too_large"):
            await client.messages.create(**ASK, system="x" * 4000)
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.post("/v1/messages/batches", body={}, cast_to=object)
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.get("/api/claude_code/settings", cast_to=object)
        await client.messages.create(**ASK)
        with pytest.raises(anthropic.PermissionDeniedError, match="permission_error"):
            await client.messages.create(**ASK, stream=True)

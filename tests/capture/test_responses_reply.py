"""What a reply looks like in the Responses API, whole and as a stream, to the official SDK and byte for byte."""

import asyncio
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import openai
import pytest

from capture_proxy.dialects.base import Head
from capture_proxy.dialects.openai_responses import OpenAIResponses
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import BadRequest, EngineError, PromptTooLong
from capture_proxy.types import Turn, TurnRole, TurnStatus
from tests.capture.responses_events import create, read_events, stream, without_ids
from tests.capture.serving import served, until

PATCH = '*** Begin Patch\n*** Add File: a.txt\n+"quoted" \\ caf\u00e9 \U0001f600\n*** End Patch\n'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
    },
    {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}},
    {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "web_search"},
]
BUSY = Reply(
    ["\nI will ", "write it.\n\n"],
    reasoning="Let me think.",
    tool_calls=[("apply_patch", {"input": PATCH}), ("shell", {}), ("agents__spawn", {"n": [1, {"a": None}]})],
)


async def test_a_stream_has_every_event_in_order_and_says_what_the_whole_reply_says(tmp_path: Path) -> None:
    async with served(ScriptedEngine([BUSY]), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            events = await stream(http, input="go", tools=TOOLS)
            whole = await create(http, input="go", tools=TOOLS)
        turn = (await gw.admin.capture("s1")).turns[0]
    names = [name for name, _ in groupby(e["type"].removeprefix("response.") for e in events)]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    expected = ["created", "in_progress", *[n.format("reasoning_text") for n in text]]
    expected += [n.format("output_text") for n in text]
    expected += [n.format(kind) for kind in ("custom_tool_call_input", *["function_call_arguments"] * 2) for n in call]
    assert names == [*expected, "completed"]
    added = [e for e in events if e["type"] == "response.output_item.added"]
    assert [e["output_index"] for e in added] == list(range(5))
    final = events[-1]["response"]
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == final["output"]
    assert len({item["id"] for item in final["output"]}) == 5
    assert without_ids(final["output"]) == without_ids(whole["output"])
    ours = {"id", "created_at", "completed_at", "output", "usage"}
    assert {k: v for k, v in final.items() if k not in ours} == {k: v for k, v in whole.items() if k not in ours}
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == turn.message["content"]
    assert final["usage"]["input_tokens"] == len(turn.prompt_ids_P)
    assert final["usage"]["output_tokens"] == len(turn.completion_ids_T)
    assert final["id"] == f"resp_{turn.turn_id}"


async def test_a_custom_tool_is_called_with_raw_text_and_a_hosted_one_is_never_dropped_silently(tmp_path: Path) -> None:
    engine = ScriptedEngine([BUSY])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            events = await stream(http, input="go", tools=TOOLS)
        (turn,) = (await gw.admin.capture("s1")).turns
    offered = {tool["function"]["name"]: tool["function"] for tool in engine.requests[0].tools}
    assert list(offered) == ["apply_patch", "shell", "agents__spawn"]
    assert list(offered["apply_patch"]["parameters"]["properties"]) == ["input"]
    assert "start: /.+/s" in offered["apply_patch"]["description"]
    _, _, patch, shell, spawn = events[-1]["response"]["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert (shell["type"], shell["arguments"]) == ("function_call", "{}")
    assert (spawn["name"], spawn["namespace"], json.loads(spawn["arguments"])) == (
        "spawn",
        "agents",
        {"n": [1, {"a": None}]},
    )
    by_code = {f.code: f.detail for f in turn.findings}
    assert "web_search" in by_code["tool_dropped"] and "agents" in by_code["tool_namespace_flattened"]
    assert turn.trainable
    assert bytes(i for i in turn.completion_ids_T if i < 256).decode().count("<tool_call>") == 3


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ({"input": "a\nb\n"}, "a\nb\n"),
        ({"input": ""}, ""),
        ({"patch": "a\nb"}, "a\nb"),  # the one string it wrote
        ({"input": "a", "why": "b"}, "a"),
        ({"input": {"x": 1}}, '{"input": {"x": 1}}'),
        ({"x": "1", "y": "2"}, '{"x": "1", "y": "2"}'),
        ({}, "{}"),
    ],
)
async def test_a_custom_tool_gets_what_the_model_meant(tmp_path: Path, arguments: dict[str, Any], given: str) -> None:
    engine = ScriptedEngine([Reply(tool_calls=[("apply_patch", arguments)])])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            (item,) = (await create(http, input="go", tools=TOOLS))["output"]
    assert item["input"] == given


async def test_the_official_client_accumulates_a_stream_into_the_same_reply(tmp_path: Path) -> None:
    async with served(ScriptedEngine([BUSY]), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        async with client.responses.stream(model="m", input="go", tools=TOOLS) as events:  # type: ignore[arg-type]
            texts = [e.delta async for e in events if e.type == "response.output_text.delta"]
            final = await events.get_final_response()
        whole = await client.responses.create(model="m", input="go", tools=TOOLS)  # type: ignore[call-overload]
    assert "".join(texts) == final.output_text == whole.output_text == "\nI will write it.\n\n"
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output[2].input == PATCH  # type: ignore[union-attr]
    assert final.status == whole.status == "completed"


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_cut_reply_is_incomplete(tmp_path: Path, streamed: bool) -> None:
    async with served(ScriptedEngine(["a long answer"]), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            ask = {"input": "go", "max_output_tokens": 6}
            events = await stream(http, **ask) if streamed else []
            reply = events[-1]["response"] if streamed else await create(http, **ask)
    assert not streamed or events[-1]["type"] == "response.incomplete"
    assert reply["status"] == "incomplete" and reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["output"][0]["content"][0]["text"] == "a long" and reply["output"][0]["status"] == "incomplete"
    assert reply["max_output_tokens"] == 6


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_empty_reply_is_an_empty_message_and_can_be_echoed(tmp_path: Path, streamed: bool) -> None:
    async with served(ScriptedEngine(["", "more"]), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            ask = {"input": [{"role": "user", "content": "go"}]}
            reply = (await stream(http, **ask))[-1]["response"] if streamed else await create(http, **ask)
            await create(http, input=[*ask["input"], *reply["output"], {"role": "user", "content": "on"}])
        one, two = (await gw.admin.capture("s1")).turns
    assert [i["type"] for i in reply["output"]] == ["message"] and reply["output"][0]["content"][0]["text"] == ""
    whole = one.prompt_ids_P + one.completion_ids_T
    assert two.prompt_ids_P[: len(whole)] == whole


async def test_text_leaves_before_the_engine_has_finished_and_calls_after(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold(piece: int) -> None:
        if piece == 2:
            await gate.wait()

    engine = ScriptedEngine([Reply("now", reasoning="why", tool_calls=[("shell", {})])], hold=hold)
    async with served(engine, tmp_path / "s.sqlite", keepalive_s=0.05) as gw:
        client = gw.openai(await gw.mint())
        seen = []
        async for event in await client.responses.create(model="m", input="go", tools=TOOLS, stream=True):  # type: ignore[call-overload]
            seen.append(event.type)
            if event.type == "response.output_text.delta":
                await asyncio.sleep(0.12)  # long enough for a keep-alive, which the client must not show
                assert not any("call" in name for name in seen)
                gate.set()
    assert seen[-1] == "response.completed" and "response.function_call_arguments.done" in seen


def test_reasoning_that_comes_after_text_follows_it_as_an_item_of_the_same_turn() -> None:
    dialect = OpenAIResponses()
    call = dialect.parse(Head({}, {}, {}), b'{"model": "m", "input": "go"}')
    message = {"role": "assistant", "content": "ab", "reasoning_content": "one two three"}
    writer = dialect.stream("s1-0000", call)
    body = writer.start(3) + writer.delta("", "one") + writer.delta("a", " two") + writer.delta("b", "")
    events = read_events((body + writer.finish(_turn(message))).decode())
    items = events[-1]["response"]["output"]
    assert [i["content"][0]["text"] for i in items] == ["one two", "ab", " three"]
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.done"] == [0, 1, 2]
    again = dialect.parse(Head({}, {}, {}), json.dumps({"input": [{"role": "user", "content": "go"}, *items]}).encode())
    assert again.messages[1:] == [message]


def _turn(message: dict[str, Any]) -> Turn:
    return Turn(
        turn_id="s1-0000",
        session_id="s1",
        index=0,
        dialect="openai_responses",
        request={},
        requested_sampling={},
        sampling={},
        prompt_ids_P=[1, 2, 3],
        completion_ids_T=[4],
        logprobs_T=[-0.1],
        version_spans=[],
        message=message,
        finish_reason="stop",
        status=TurnStatus.OK,
        role=TurnRole.AGENT,
    )


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (EngineError("boom"), "server_error"),
        (PromptTooLong("9 of 5"), "context_length_exceeded"),
        (BadRequest("no"), "invalid_prompt"),
    ],
)
async def test_a_stream_that_breaks_ends_in_a_failed_response(tmp_path: Path, fault: Exception, code: str) -> None:
    async def hold(piece: int) -> None:
        if piece == 1:
            raise fault

    async with served(ScriptedEngine([Reply(["par", "tial"])], hold=hold), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            events = await stream(http, input="go")
        (turn,) = (await gw.admin.capture("s1")).turns
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed" and events[-1]["response"]["error"]["code"] == code
    assert not any(e["type"] in ("response.completed", "response.output_item.done") for e in events)
    assert turn.status is TurnStatus.FAILED and not turn.trainable


async def test_a_failure_after_only_keepalives_is_still_a_whole_stream(tmp_path: Path) -> None:
    engine = ScriptedEngine(["x"], max_model_len=1, first_delay_s=0)
    gate = asyncio.Event()

    class Slow(ScriptedEngine):
        async def sample(self, request: Any) -> Any:
            await gate.wait()
            async for event in engine.sample(request):
                yield event

    async with served(Slow(), tmp_path / "s.sqlite", keepalive_s=0.02) as gw:
        async with gw.http(await gw.mint()) as http:
            asked = asyncio.create_task(stream(http, input="go"))
            await until(lambda: gw.gateway.sessions.num_in_flight == 1)
            await asyncio.sleep(0.1)
            gate.set()
            events = await asked
    assert [e["type"] for e in events] == ["response.created", "response.in_progress", "response.failed"]


async def test_a_prompt_beyond_the_window_is_said_in_the_apis_own_words(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["x"], max_model_len=3), tmp_path / "s.sqlite") as gw:
        with pytest.raises(openai.BadRequestError) as caught:
            await gw.openai(await gw.mint()).responses.create(model="m", input="hello", stream=True)
    assert caught.value.code == "context_length_exceeded"
    assert "exceeds the context window" in str(caught.value)


async def test_input_tokens_are_the_length_of_the_prompt_that_would_be_sent(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["x"]), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        ask: dict[str, Any] = {"model": "m", "input": "hello", "instructions": "be brief", "tools": TOOLS}
        counted = await client.responses.input_tokens.count(**ask)
        reply = await client.responses.create(**ask)
    assert counted.input_tokens == reply.usage.input_tokens > 100
    assert counted.object == "response.input_tokens"


async def test_both_spellings_of_the_path_are_served(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["x"]), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            response = await http.post("/responses", json={"model": "m", "input": "hi"})
    assert response.status_code == 200 and response.json()["object"] == "response"

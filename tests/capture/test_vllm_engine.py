"""The vLLM engine against a stand-in of its wire protocol, the nasty replies first."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.engines.base import ChatRequest, DeltaEvent, FinishEvent, PromptEvent, SampleEvent
from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.errors import BadRequest, EngineError, EngineUnreachable, PromptTooLong
from capture_proxy.types import VersionSpan
from tests.capture.serving import listening, served, until
from tests.capture.stub_vllm import END, StubVllm, chunk, final, reply

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
GENERATE = "/inference/v1/generate"
RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"


@pytest.fixture
async def stub() -> StubVllm:
    return StubVllm()


@pytest.fixture
async def engine(stub: StubVllm) -> AsyncIterator[VllmEngine]:
    async with listening(stub.app()) as url:
        engine = VllmEngine(url)
        async with engine.running():
            yield engine


def request(*, tools: bool = False, **more: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return ChatRequest("m", messages, TOOLS if tools else [], None, {"temperature": 0.7}, None, **more)


async def sample(engine: VllmEngine, asked: ChatRequest | None = None) -> list[SampleEvent]:
    return [event async for event in engine.sample(asked or request())]


def parts(events: list[SampleEvent]) -> tuple[PromptEvent, list[DeltaEvent], FinishEvent]:
    prompt, *deltas, finish = events
    assert isinstance(prompt, PromptEvent) and isinstance(finish, FinishEvent)
    assert all(isinstance(d, DeltaEvent) and len(d.ids) == len(d.logprobs) for d in deltas)
    return prompt, deltas, finish  # type: ignore[return-value]


def logprobs(deltas: list[DeltaEvent]) -> list[float | None]:
    return [x for delta in deltas for x in delta.logprobs]


async def test_ids_logprobs_and_versions_are_the_engines(stub: StubVllm, engine: VllmEngine) -> None:
    spans = [{"version": "v1", "start": 0, "end": 4}, {"version": "v2", "start": 4, "end": 6}]
    stub.chunks = [chunk("he", logprobs=[-0.1, -0.2]), chunk("llo"), *final(6, spans=spans)]
    prompt, deltas, finish = parts(await sample(engine))
    assert prompt.prompt_ids_P == list(b"hi")
    assert (prompt.max_tokens, prompt.clamped, prompt.sampling["temperature"]) == (1000, False, 0.7)
    assert [i for d in deltas for i in d.ids] == [*b"hello", END]
    assert logprobs(deltas)[:2] == [-0.1, -0.2]
    assert "".join(d.content for d in deltas) == "hello"
    assert finish.message == {"role": "assistant", "content": "hello"}
    assert finish.version_spans == [VersionSpan("v1", 0, 4), VersionSpan("v2", 4, 6)]
    assert finish.findings == []
    sent = stub.bodies(GENERATE)[0]
    assert sent["stream"] and sent["output_mode"] == "text" and sent["sampling_params"]["logprobs"] == 0
    assert "token_offsets" not in sent and stub.bodies(DERENDER) == []


async def test_bad_logprobs_become_none_and_rounding_becomes_zero(stub: StubVllm, engine: VllmEngine) -> None:
    values = [-0.1, math.nan, -9999.0, -math.inf, None, 0.0002, 3.0, "x", True]
    stub.chunks = [chunk("", list(range(9)), values), *final(10)]
    _, deltas, _ = parts(await sample(engine))
    assert logprobs(deltas)[:9] == [-0.1, None, None, None, None, 0.0, 3.0, None, None]


@pytest.mark.parametrize(
    ("chunks", "code", "numbers"),
    [
        ([chunk("", [1, 2, 3, 4, 5], [-1.0] * 4), *final(6)], "misaligned", ("5 ids", "4 logprobs")),
        ([chunk("hello"), *final(12)], "missing_ids", ("12", "6")),
        ([chunk("ab", [], []), chunk("cd"), *final(5)], "missing_ids", ("5", "3")),
    ],
)
async def test_what_does_not_add_up_is_a_fatal_finding(
    stub: StubVllm, engine: VllmEngine, chunks: list[str], code: str, numbers: tuple[str, str]
) -> None:
    stub.chunks = [*chunks]
    _, _, finish = parts(await sample(engine))
    assert code in [f.code for f in finish.findings if f.severity == "FATAL"]
    detail = next(f.detail for f in finish.findings if f.code == code)
    assert all(number in detail for number in numbers)


async def test_a_misaligned_chunk_does_not_hide_behind_equal_totals(stub: StubVllm, engine: VllmEngine) -> None:
    stub.chunks = [chunk("", [1, 2], [-1.0]), chunk("", [3], [-1.0, -1.0]), *final(4)]
    _, deltas, finish = parts(await sample(engine))
    assert logprobs(deltas)[:3] == [None, None, None]
    assert len([f for f in finish.findings if f.code == "misaligned"]) == 2


async def test_ids_named_otherwise_than_they_are_is_fatal(stub: StubVllm, engine: VllmEngine) -> None:
    stub.chunks = [chunk("a").replace('"token": "x"', '"token": "token_id:5"'), *final(2)]
    _, _, finish = parts(await sample(engine))
    assert [f.code for f in finish.findings] == ["misaligned"]


async def test_multi_id_chunks_and_split_characters_keep_every_id(stub: StubVllm, engine: VllmEngine) -> None:
    snow = list("☃".encode())
    stub.chunks = [chunk("", snow[:1]), chunk("", snow[1:2]), chunk("☃ok", [snow[2], 111, 107]), *final(6)]
    _, deltas, finish = parts(await sample(engine))
    assert [i for d in deltas for i in d.ids] == [*snow, 111, 107, END]
    assert finish.message["content"] == "☃ok" and finish.findings == []


async def test_a_tool_call_is_held_back_and_comes_whole_from_the_parser(stub: StubVllm, engine: VllmEngine) -> None:
    stub.chunks = reply("Let me ", "look.\n<to", "ol_call>", '{"name": "bash"', "}</tool_call>")
    calls = [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": ""}}]
    stub.message = {"role": "assistant", "content": "Let me look.\n", "tool_calls": calls}
    _, deltas, finish = parts(await sample(engine, request(tools=True)))
    assert "".join(d.content for d in deltas) == "Let me look."
    assert finish.finish_reason == "tool_calls"
    assert finish.message["content"] == "Let me look.\n"
    assert finish.message["tool_calls"][0]["function"] == {"name": "bash", "arguments": "{}"}
    sent = stub.bodies(DERENDER)[0]
    assert sent["generate_response"]["choices"][0]["token_ids"][-1] != END  # the end token is not text
    assert sent["chat_request"]["tools"] == TOOLS


async def test_a_parser_that_fails_leaves_the_text_and_a_warning(stub: StubVllm, engine: VllmEngine) -> None:
    stub.chunks = reply("<tool_call>{]")
    stub.errors[DERENDER] = (500, {"message": "parser exploded"})
    _, _, finish = parts(await sample(engine, request(tools=True)))
    assert finish.message["content"] == "<tool_call>{]"
    assert [(f.severity, f.code) for f in finish.findings] == [("WARN", "unparsed")]


async def test_reasoning_is_streamed_apart_and_history_keeps_it(stub: StubVllm, engine: VllmEngine) -> None:
    stub.reasoning = True
    stub.chunks = reply("<think>", "\nhm m", "\n</th", "ink>\n\n", "Yes.")
    stub.message = {"role": "assistant", "content": "\n\nYes.", "reasoning": "\nhm m\n"}
    old = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    asked = request()
    asked.messages.append(old)
    _, deltas, finish = parts(await sample(engine, asked))
    assert "".join(d.reasoning for d in deltas) == "\nhm m"
    assert "".join(d.content for d in deltas) == "Yes." == finish.message["content"]
    assert finish.message["reasoning_content"] == "\nhm m\n"
    assert stub.bodies(RENDER)[0]["messages"][1]["reasoning"] == "why"


async def test_a_stop_string_is_cut_from_the_message_and_its_ids_are_kept(stub: StubVllm, engine: VllmEngine) -> None:
    stub.chunks = [chunk("ab"), chunk("", list(b"##")), *final(4, end=False, stop="##")]
    _, deltas, finish = parts(await sample(engine, request(tools=True)))
    assert [i for d in deltas for i in d.ids] == list(b"ab##")
    assert finish.message["content"] == "ab"


async def test_max_tokens_is_clamped_to_the_room(stub: StubVllm, engine: VllmEngine) -> None:
    stub.room = 400
    prompt, _, _ = parts(await sample(engine, ChatRequest("m", [{"role": "user", "content": "hi"}], [], None, {}, 900)))
    assert (prompt.max_tokens, prompt.clamped) == (400, True)
    assert stub.bodies(GENERATE)[0]["sampling_params"]["max_tokens"] == 400
    assert "max_tokens" not in stub.bodies(RENDER)[0]


@pytest.mark.parametrize(
    ("path", "status", "body", "error"),
    [
        (RENDER, 400, {"message": "This model's maximum context length is 8 tokens."}, PromptTooLong),
        (RENDER, 400, {"message": "max_tokens must be at least 1, got 0."}, PromptTooLong),
        (RENDER, 400, {"message": "Conversation roles must alternate"}, BadRequest),
        (RENDER, 404, "<html>nothing here</html>", EngineError),
        (RENDER, 500, {"message": "Out of range float values are not JSON compliant"}, EngineError),
        (GENERATE, 401, {"message": "no key"}, EngineError),
        (GENERATE, 503, {"message": "loading"}, EngineError),
        (GENERATE, 422, {"message": "bad stop"}, BadRequest),
    ],
)
async def test_engine_errors_are_mapped(
    stub: StubVllm, engine: VllmEngine, path: str, status: int, body: Any, error: type[Exception]
) -> None:
    stub.errors[path] = (status, body)
    with pytest.raises(error) as caught:
        await sample(engine)
    assert type(caught.value) is error


async def test_no_room_at_all_is_too_long(stub: StubVllm, engine: VllmEngine) -> None:
    stub.room = 0
    with pytest.raises(PromptTooLong):
        await sample(engine)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([chunk("half")], EngineUnreachable),
        ([chunk("half"), 'data: {"error": {"message": "engine died", "code": 500}}\n\n'], EngineError),
        ([chunk("half"), *final(5, reason="abort")], EngineError),
        (["data: {nonsense\n\n"], EngineError),
        ([chunk("a", [-4])], EngineError),
    ],
)
async def test_a_reply_that_breaks_off_is_an_error(
    stub: StubVllm, engine: VllmEngine, chunks: list[str], error: type[Exception]
) -> None:
    stub.chunks = [*chunks]
    with pytest.raises(error):
        await sample(engine)


async def test_nobody_there_is_unreachable() -> None:
    engine = VllmEngine("http://127.0.0.1:9")
    async with engine.running():
        assert not await engine.healthy()
        with pytest.raises(EngineUnreachable):
            await sample(engine)


async def test_closing_the_generator_closes_the_stream_at_the_engine(stub: StubVllm, engine: VllmEngine) -> None:
    stub.chunks = [chunk("a"), asyncio.Event()]
    events = engine.sample(request())
    async for event in events:
        if isinstance(event, DeltaEvent):
            break
    assert stub.streaming == 1
    await events.aclose()
    await until(lambda: stub.streaming == 0, 2.0)


async def test_a_server_without_token_routes_is_used_through_chat(stub: StubVllm, engine: VllmEngine) -> None:
    stub.scale_out = False
    one = '{"token": "token_id:%d", "logprob": -0.5}'
    call = '{"index": 0, "id": "c", "type": "function", "function": {"name": "%s", "arguments": "%s"}}'
    event = 'data: {"choices": [{"index": 0, "delta": {%s}, "token_ids": [%d], "logprobs": {"content": [%s]}}]}\n\n'
    stub.chunks = [
        'data: {"prompt_token_ids": [7, 8], "choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n',
        event % ('"content": "ok"', 5, one % 5),
        event % ('"tool_calls": [%s]' % (call % ("bash", "")), 6, one % 6),
        event % ('"tool_calls": [%s]' % (call % ("", '{\\"a\\": 1}')), 7, one % 7),
        'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls", "token_ids": []}]}\n\n',
        'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n',
        "data: [DONE]\n\n",
    ]
    prompt, deltas, finish = parts(await sample(engine, request(tools=True)))
    assert prompt.prompt_ids_P == [7, 8]
    assert [i for d in deltas for i in d.ids] == [5, 6, 7]
    assert finish.message["content"] == "ok"
    assert finish.message["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}
    ]
    assert finish.version_spans == [] and finish.findings == []
    assert stub.bodies("/v1/chat/completions")[0]["return_token_ids"] is True


async def test_a_whole_reply_is_the_same_turn_as_a_stream(stub: StubVllm, engine: VllmEngine) -> None:
    stub.chunks = reply("he", "llo")
    streamed, whole = await sample(engine), await sample(engine, request(stream=False))
    assert parts(streamed)[0] == parts(whole)[0] and parts(streamed)[2] == parts(whole)[2]
    assert [i for d in parts(whole)[1] for i in d.ids] == [i for d in parts(streamed)[1] for i in d.ids]
    assert [body["stream"] for body in stub.bodies(GENERATE)] == [True, False]


async def test_the_length_of_a_prompt_beyond_the_window_is_told(stub: StubVllm, engine: VllmEngine) -> None:
    stub.errors[RENDER] = (400, {"message": "This model's maximum context length is 8 tokens."})
    assert await engine.render(request()) == list(b"hi")
    assert stub.bodies("/tokenize")[0]["messages"] == [{"role": "user", "content": "hi"}]


async def test_a_kept_connection_that_the_engine_closed_is_no_fault() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Each connection answers one request, and is closed under the next one.
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head.split(b" ")[1])
        body = b'{"data": [{"id": "m"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        await closing.wait()
        writer.close()

    seen: list[bytes] = []
    closing = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    engine = VllmEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server, engine.running():
        await engine.models()
        asking = asyncio.create_task(engine.models())  # on the same connection, which is closed under it
        await asyncio.sleep(0.05)
        closing.set()
        assert await asking == [{"id": "m"}]
    assert seen == [b"/v1/models"] * 2


@pytest.mark.parametrize("ids", [[1, "2"], [-1], [1.5], [None], "12", [2**31]])
async def test_a_prompt_of_what_is_no_ids_is_the_engines_fault(stub: StubVllm, tmp_path: Path, ids: Any) -> None:
    stub.rendered = {"token_ids": ids}
    async with listening(stub.app()) as url, served(VllmEngine(url), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 502
        capture = await gw.admin.capture("s1")
    assert capture.turns[0].status.value == "failed" and (capture.session.last_fault or "").startswith("EngineError")

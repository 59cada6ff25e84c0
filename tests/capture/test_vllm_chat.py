"""An engine through its chat route: broken deltas are mended for the agent, ids are the engine's or nobody's."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.engines.base import ChatRequest, DeltaEvent, FinishEvent, PromptEvent, SampleEvent
from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.errors import BadRequest, EngineError, EngineUnreachable, PromptTooLong
from tests.capture.serving import listening, served
from tests.capture.stub_vllm import StubVllm

CHAT = "/v1/chat/completions"
TOOLS: list[Any] = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
USER: list[Any] = [{"role": "user", "content": "hi"}]
DONE = "data: [DONE]\n\n"


def event(
    delta: dict[str, Any] | None = None, ids: list[int] | None = None, logprobs: list[Any] | None = None, **more: Any
) -> str:
    """One chunk; `ids` None = the chunk has no ids, `logprobs` None = one for each id."""
    choice: dict[str, Any] = {"index": 0, "delta": delta or {}, **more}
    if ids is not None:
        values = [-0.5] * len(ids) if logprobs is None else logprobs
        choice |= {"token_ids": ids, "logprobs": {"content": [{"token": "x", "logprob": x} for x in values]}}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def stream(*chunks: str, usage: int | None, reason: str | None = "stop", prompt: Any = (7, 8)) -> list[Any]:
    head = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    head |= {} if prompt is None else {"prompt_token_ids": list(prompt)}
    tail = [] if usage is None else [f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': usage}})}\n\n"]
    return [f"data: {json.dumps(head)}\n\n", *chunks, event({}, [], finish_reason=reason), *tail, DONE]


def call(index: Any, call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@asynccontextmanager
async def running(stub: StubVllm, transport: str = "chat") -> AsyncIterator[VllmEngine]:
    async with listening(stub.app()) as url:
        engine = VllmEngine(url, transport=transport)
        async with engine.running():
            yield engine


async def sample(engine: VllmEngine, **more: Any) -> list[SampleEvent]:
    request = ChatRequest(
        "m", USER, TOOLS, None, {"temperature": 1.0, "top_k": 5}, more.pop("max_tokens", None), **more
    )
    return [event async for event in engine.sample(request)]


def finish(events: list[SampleEvent]) -> FinishEvent:
    assert isinstance(events[0], PromptEvent) and isinstance(events[-1], FinishEvent)
    return events[-1]


def ids(events: list[SampleEvent]) -> list[int]:
    return [i for event in events if isinstance(event, DeltaEvent) for i in event.ids]


BROKEN = {
    "an empty name, then the real one": [[call(0, "a", "", "")], [call(0, None, "bash", '{"x": 1}')]],
    "arguments alone after the opening": [
        [call(0, "a", "bash", "")],
        [call(0, None, None, '{"x"')],
        [call(0, None, None, ": 1}")],
    ],
    "index null": [[call(None, "a", "bash", "")], [call(None, None, None, '{"x": 1}')]],
    "the first call at index 1": [[call(1, "a", "bash", '{"x": 1}')]],
    "the id on every chunk": [[call(0, "a", "bash", '{"x"')], [call(0, "a", None, ": 1}")]],
    "id and name on every chunk": [[call(0, "a", "bash", '{"x"')], [call(0, "a", "bash", ": 1}")]],
    "whole in one delta": [[call(0, "a", "bash", '{"x": 1}')]],
    "arguments as an object": [[call(0, "a", "bash", {"x": 1})]],
    "the index forgotten later": [[call(0, "a", "bash", '{"x"')], [{"function": {"arguments": ": 1}"}}]],
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_call_reaches_the_agent_once_and_whole(name: str) -> None:
    deltas = BROKEN[name]
    stub = StubVllm(stream(*(event({"tool_calls": d}, [i]) for i, d in enumerate(deltas)), usage=len(deltas)))
    async with running(stub) as engine:
        events = await sample(engine)
    (made,) = finish(events).message["tool_calls"]
    assert (made["id"], made["function"]["name"], json.loads(made["function"]["arguments"])) == ("a", "bash", {"x": 1})
    assert finish(events).finish_reason == "tool_calls" and finish(events).findings == []
    assert ids(events) == list(range(len(deltas)))  # nothing of this touches the tokens


SEVERAL = {
    "two ids under index 0": [[call(0, "a", "f", '{"k": 1}')], [call(0, "b", "g", '{"k": 2}')]],
    "two ids under index 0, interleaved": [
        [call(0, "a", "f", '{"k"')],
        [call(0, "b", "g", '{"k"')],
        [call(0, "a", None, ": 1}")],
        [call(0, "b", None, ": 2}")],
    ],
    "no ids at all": [[call(0, None, "f", '{"k": 1}')], [call(0, None, "g", '{"k": 2}')]],
    "index null twice": [[call(None, "a", "f", '{"k": 1}'), call(None, "b", "g", '{"k": 2}')]],
    "as it should be": [[call(0, "a", "f", '{"k": 1}')], [call(1, "b", "g", '{"k": 2}')]],
}


@pytest.mark.parametrize("name", SEVERAL)
async def test_calls_are_never_run_together(name: str) -> None:
    stub = StubVllm(stream(*(event({"tool_calls": d}, [1]) for d in SEVERAL[name]), usage=len(SEVERAL[name])))
    async with running(stub) as engine:
        made = finish(await sample(engine)).message["tool_calls"]
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])["k"]) for c in made] == [("f", 1), ("g", 2)]
    assert len({c["id"] for c in made}) == 2 and all(c["id"] for c in made)


async def test_a_call_without_arguments_has_an_empty_object() -> None:
    stub = StubVllm(stream(event({"tool_calls": [call(0, "a", "bash", "")]}, [1]), usage=1))
    async with running(stub) as engine:
        (made,) = finish(await sample(engine)).message["tool_calls"]
    assert made["function"] == {"name": "bash", "arguments": "{}"}


@pytest.mark.parametrize(
    "broken", [call(0, "a", "bash", '{"x": "\\u00'), call(0, "a", "", "{}"), call(0, "a", None, None)]
)
async def test_what_cannot_be_mended_is_an_error_unless_the_reply_was_cut(broken: dict[str, Any]) -> None:
    stub = StubVllm(stream(event({"content": "so", "tool_calls": [broken]}, [1]), usage=1, reason="tool_calls"))
    async with running(stub) as engine:
        with pytest.raises(EngineError, match="tool call"):
            await sample(engine)
        stub.chunks = stream(event({"content": "so", "tool_calls": [broken]}, [1]), usage=1, reason="length")
        end = finish(await sample(engine))
    assert end.finish_reason == "length" and "tool_calls" not in end.message and end.message["content"] == "so"
    assert [f.code for f in end.findings] == ["tool_call_dropped"]


@pytest.mark.parametrize(
    ("chunks", "usage", "code", "numbers"),
    [
        ([event({"content": "hello"}, [1, 2, 3, 4, 5])], 12, "missing_ids", ("12", "5")),
        ([event({"content": "a"}, [1, 2, 3, 4, 5], [-1.0] * 4)], 5, "misaligned", ("5 ids", "4 logprobs")),
        ([event({"content": "a"}, [1, 2], [])], 2, "misaligned", ("2 ids", "0 logprobs")),
        (
            [event({"content": "a"}, [1], [-1.0, -1.0]), event({}, [2, 3], [-1.0])],
            3,
            "misaligned",
            ("1 ids", "2 logprobs"),
        ),
    ],
)
async def test_ids_that_do_not_add_up_make_the_turn_untrainable_and_the_agent_is_served(
    tmp_path: Path, chunks: list[str], usage: int, code: str, numbers: tuple[str, str]
) -> None:
    stub = StubVllm(stream(*chunks, usage=usage))
    async with listening(stub.app()) as url, served(VllmEngine(url, transport="chat"), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        parts = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS, stream=True)
        text = "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])
        (turn,) = (await gw.admin.capture("s1")).turns
    assert text and turn.message["content"] == text and not turn.trainable
    detail = next(f.detail for f in turn.findings if f.code == code and f.severity == "FATAL")
    assert all(number in detail for number in numbers)
    assert len(turn.completion_ids_T) == len(turn.logprobs_T)


async def test_ids_that_come_late_or_many_at_once_are_all_kept_in_order() -> None:
    stub = StubVllm(
        stream(
            event({"content": "he"}),
            f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': 'll'}, 'token_ids': None}]})}\n\n",
            event({"content": "o"}, [1, 2, 3, 4]),
            event({}, [5]),
            usage=5,
        )
    )
    async with running(stub) as engine:
        events = await sample(engine)
    assert ids(events) == [1, 2, 3, 4, 5] and finish(events).findings == []
    assert finish(events).message["content"] == "hello"


@pytest.mark.parametrize("streams", [True, False])
async def test_a_reply_without_prompt_ids_is_kept_and_never_trained(tmp_path: Path, streams: bool) -> None:
    stub = StubVllm(stream(event({"content": "ok"}, [1]), usage=1, prompt=None))
    async with listening(stub.app()) as url, served(VllmEngine(url, transport="chat"), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            body = {"model": "m", "messages": USER, "stream": streams}
            assert (await http.post(CHAT, json=body)).status_code == 200
        (turn,) = (await gw.admin.capture("s1")).turns
    assert "no_prompt_ids" in [f.code for f in turn.findings] and not turn.trainable and turn.capture_level == "text"


async def test_a_whole_reply_is_the_same_turn_as_a_stream() -> None:
    deltas = [event({"reasoning": "hm"}, [1]), event({"content": "ok"}, [2])]
    stub = StubVllm(stream(*deltas, usage=2))
    async with running(stub) as engine:
        streamed = await sample(engine)
        message = {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": []}
        logprobs = {"content": [{"token": "x", "logprob": -0.5}] * 2}
        choice = {"index": 0, "message": message, "token_ids": [1, 2], "logprobs": logprobs, "finish_reason": "stop"}
        stub.whole = {"choices": [choice], "prompt_token_ids": [7, 8], "usage": {"completion_tokens": 2}}
        whole = await sample(engine, stream=False)
    assert ids(streamed) == ids(whole) and finish(streamed) == finish(whole)
    assert streamed[0] == whole[0]
    assert [body["stream"] for body in stub.bodies(CHAT)] == [True, False]


async def test_two_calls_of_a_whole_reply_without_ids_or_indices_stay_two() -> None:
    calls = [{"function": {"name": n, "arguments": "{}"}} for n in ("f", "g")]
    choice = {"index": 0, "message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
    stub = StubVllm(whole={"choices": [choice | {"token_ids": []}], "prompt_token_ids": [1], "usage": None})
    async with running(stub) as engine:
        made = finish(await sample(engine, stream=False)).message["tool_calls"]
    assert [c["function"]["name"] for c in made] == ["f", "g"]


async def test_a_cap_that_the_server_refuses_is_left_out_and_told() -> None:
    class Strict(StubVllm):
        async def _take(self, request: Any) -> Any:
            body = await request.json()
            too_much = (body.get("max_tokens") or 0) > 100
            message = "'max_tokens' is too large: This model's maximum context length is 4096 tokens"
            self.errors = {CHAT: (400, {"message": message})} if too_much else {}
            return await super()._take(request)

    stub = Strict(stream(event({"content": "ok"}, [1]), usage=1, prompt=range(4090)))
    async with running(stub) as engine:
        events = await sample(engine, max_tokens=900)
        stub.errors = {CHAT: (400, {"message": "maximum context length"})}
    prompt = events[0]
    assert isinstance(prompt, PromptEvent) and (prompt.max_tokens, prompt.clamped) == (6, True)
    assert ["max_tokens" in body for body in stub.bodies(CHAT)] == [True, False]


# --- servers that give no ids


@pytest.mark.parametrize("streams", [True, False])
async def test_a_text_engine_serves_the_agent_and_trains_nothing(tmp_path: Path, streams: bool) -> None:
    deltas = [event({"content": "I look"}), event({"tool_calls": [call(0, "a", "bash", "{}")]})]
    stub = StubVllm(stream(*deltas, usage=2, prompt=None, reason="tool_calls"))
    if not streams:
        message = {"content": "I look", "tool_calls": [call(0, "a", "bash", "{}")]}
        stub.whole = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    async with listening(stub.app()) as url:
        engine = VllmEngine(url, transport="text", api_key="sk-provider")
        async with served(engine, tmp_path / "s.sqlite") as gw:
            client = gw.openai(await gw.mint(sampling={"temperature": 0.5}))
            if streams:
                parts = [
                    part.choices[0].delta
                    async for part in await client.chat.completions.create(
                        model="m", messages=USER, tools=TOOLS, stream=True
                    )
                ]
                text = "".join(part.content or "" for part in parts)
                names = [c.function.name for part in parts for c in part.tool_calls or [] if c.function]
            else:
                whole = (await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)).choices[0].message
                text, names = whole.content or "", [c.function.name for c in whole.tool_calls or []]  # type: ignore[union-attr]
            (turn,) = (await gw.admin.capture("s1")).turns
    assert (text, names) == ("I look", ["bash"])
    assert turn.capture_level == "text" and not turn.trainable and turn.prompt_ids_P == turn.completion_ids_T == []
    assert "text_only" in [f.code for f in turn.findings]
    (sent,) = stub.bodies(CHAT)
    unknown = set(sent) - {"model", "messages", "tools", "tool_choice", "stream", "stream_options"}
    assert unknown <= {"temperature", "top_p", "presence_penalty", "frequency_penalty"}, unknown


async def test_auto_falls_back_to_text_when_the_token_fields_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    stub = StubVllm(stream(event({"content": "ok"}), usage=1, prompt=None), scale_out=False)
    async with running(stub, "auto") as engine:
        with caplog.at_level(logging.WARNING):
            await sample(engine)
            await sample(engine)
    assert [m for m in caplog.messages if "evaluation" in m] == [
        "the engine ignores return_token_ids: its turns are text for evaluation, none can be trained on"
    ]
    assert ["return_token_ids" in body for body in stub.bodies(CHAT)] == [True, False]


async def test_auto_falls_back_to_text_when_the_token_fields_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(StubVllm):
        async def _take(self, request: Any) -> Any:
            unknown = "return_token_ids" in await request.json()
            self.errors = {CHAT: (400, {"message": "Unknown parameter: 'return_token_ids'."})} if unknown else {}
            return await super()._take(request)

    stub = Picky(stream(event({"content": "ok"}), usage=1, prompt=None), scale_out=False)
    async with running(stub, "auto") as engine:
        with caplog.at_level(logging.WARNING):
            assert finish(await sample(engine)).message["content"] == "ok"
            assert finish(await sample(engine)).message["content"] == "ok"
    assert any("refuses the token fields" in m for m in caplog.messages)
    assert ["return_token_ids" in body for body in stub.bodies(CHAT)] == [True, False, False]


async def test_auto_stays_with_ids_after_a_bad_request_or_a_fault() -> None:
    stub = StubVllm(stream(event({"content": "ok"}, [1]), usage=1), scale_out=False)
    async with running(stub, "auto") as engine:
        for status, error in ((400, BadRequest), (500, EngineError), (503, EngineError)):
            stub.errors = {CHAT: (status, {"message": "no"})}
            with pytest.raises(error):
                await sample(engine)
        stub.errors = {}
        assert ids(await sample(engine)) == [1]
        stub.chunks = stream(event({"content": "ok"}), usage=1, prompt=None)
        await sample(engine)  # one reply without ids does not make it a text engine
        assert stub.bodies(CHAT)[-1]["return_token_ids"] is True


async def test_a_stream_without_an_end_mark_is_whole_only_for_text_that_said_how_it_ended() -> None:
    whole = stream(event({"content": "ok"}), usage=None, prompt=None)[:-1]
    async with running(StubVllm(whole), "text") as engine:
        assert finish(await sample(engine)).message["content"] == "ok"
    async with running(StubVllm(whole[:-1]), "text") as engine:
        with pytest.raises(EngineUnreachable):
            await sample(engine)
    async with running(StubVllm(stream(event({"content": "ok"}, [1]), usage=1)[:-1])) as engine:
        with pytest.raises(EngineUnreachable):
            await sample(engine)


async def test_a_prompt_that_is_too_long_is_never_taken_for_a_refusal_of_the_fields() -> None:
    stub = StubVllm(scale_out=False, errors={CHAT: (400, {"message": "maximum context length is 8 tokens"})})
    async with running(stub, "auto") as engine:
        with pytest.raises(PromptTooLong):
            await sample(engine)
    assert len(stub.bodies(CHAT)) == 1


async def test_the_key_of_a_provider_is_sent_and_its_refusal_is_a_fault() -> None:
    stub = StubVllm(errors={CHAT: (401, {"message": "key rotated"})})
    async with running(stub, "text") as engine:
        with pytest.raises(EngineError, match="401"):
            await sample(engine)


@pytest.mark.parametrize(
    "chunk", ['{"choices": [3]}', '{"choices": [{"delta": {"tool_calls": [7]}}]}', '{"choices": 5}']
)
async def test_events_of_another_shape_are_the_engines_fault(chunk: str) -> None:
    async with running(StubVllm([f"data: {chunk}\n\n", DONE])) as engine:
        with pytest.raises(EngineError):
            await sample(engine)

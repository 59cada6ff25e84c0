"""Token in for vLLM: exactly the given ids are sampled from, and nothing of the messages is rendered for it."""

from __future__ import annotations

import asyncio

import pytest

from capture_proxy.engines.base import ChatRequest, DeltaEvent, Example, FinishEvent, PromptEvent
from capture_proxy.engines.splitter import HarmonySplitter, splitter_for
from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.errors import PromptTooLong
from capture_proxy.types import Finding, Severity
from tests.capture.serving import listening
from tests.capture.stub_vllm import END, StubVllm, chunk, final, reply

RENDER, DERENDER, GENERATE = "/v1/chat/completions/render", "/v1/chat/completions/derender", "/inference/v1/generate"
TOOLS = [{"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}]


def asked(ids=(5, 6, 7), **more):
    values = {"tools": [], "tool_choice": None, "sampling": {"temperature": 0.5}, "max_tokens": 8, **more}
    return ChatRequest("m", [{"role": "user", "content": "a long history"}], prompt_ids_P=list(ids), **values)


async def sampled(engine, request):
    return [event async for event in engine.sample(request)]


def with_engine(stub):
    return listening(stub.app())


async def test_exactly_the_given_ids_are_sampled_from_and_the_messages_are_not_rendered():
    stub = StubVllm()
    async with with_engine(stub) as url, (engine := VllmEngine(url)).running():
        assert await engine.takes_ids()
        events = await sampled(engine, asked())

    (body,) = stub.bodies(GENERATE)
    assert body["token_ids"] == [5, 6, 7]
    assert body["sampling_params"]["temperature"] == 0.5
    assert body["sampling_params"]["max_tokens"] == 8
    assert [b["messages"] for b in stub.bodies(RENDER)] == [[{"role": "user", "content": "-"}]]
    assert events[0] == PromptEvent([5, 6, 7], 8, False, {"temperature": 0.5, "top_p": 1.0})
    assert events[-1].message["content"] == "hello"


async def test_the_server_is_asked_once_for_each_kind_of_request():
    stub = StubVllm()
    async with with_engine(stub) as url, (engine := VllmEngine(url)).running():
        for k in range(3):
            await sampled(engine, asked([1] * (k + 1), sampling={"temperature": 0.5, "seed": k}, max_tokens=k + 1))
            await sampled(engine, asked([1], tools=TOOLS))
    assert len(stub.bodies(RENDER)) == 2
    assert [b["sampling_params"].get("seed") for b in stub.bodies(GENERATE)][::2] == [0, 1, 2]


async def test_the_reply_is_cut_to_what_the_window_leaves_after_these_ids():
    async with with_engine(StubVllm(room=4095)) as url, (engine := VllmEngine(url)).running():
        events = await sampled(engine, asked([1] * 4090, max_tokens=100))
        assert events[0].max_tokens == 6
        assert events[0].clamped
        with pytest.raises(PromptTooLong) as caught:
            await sampled(engine, asked([1] * 4096))
    assert (caught.value.num_tokens, caught.value.max_tokens) == (4096, 4096)


async def test_a_servers_own_cap_below_the_window_stays():
    async with with_engine(StubVllm(room=32)) as url, (engine := VllmEngine(url)).running():
        events = await sampled(engine, asked([1] * 50, max_tokens=None))
    assert events[0].max_tokens == 32


async def test_text_leaves_before_the_reply_has_ended():
    gate = asyncio.Event()
    stub = StubVllm(chunks=[chunk("hel"), gate, chunk("lo"), *final(6)])
    async with with_engine(stub) as url, (engine := VllmEngine(url)).running():
        events = engine.sample(asked())
        assert isinstance(await anext(events), PromptEvent)
        assert (await anext(events)).content == "hel"
        gate.set()
        assert "".join([e.content async for e in events if isinstance(e, DeltaEvent)]) == "lo"


async def test_reasoning_of_earlier_replies_in_the_prompt_does_not_end_that_of_this_one():
    """The frame's header decides; the ids hold closing markers of the past."""
    stub = StubVllm(reasoning=True, chunks=reply("<think>hm</think>yes"))
    stub.message = {"role": "assistant", "content": "yes", "reasoning": "hm", "tool_calls": []}
    async with with_engine(stub) as url, (engine := VllmEngine(url)).running():
        events = await sampled(engine, asked(b"<think>old</think>"))
    assert "".join(e.reasoning for e in events if isinstance(e, DeltaEvent)) == "hm"
    assert stub.bodies(GENERATE)[0]["reasoning_ended"] is False
    assert stub.bodies(DERENDER)[0]["generate_response"]["prompt_token_ids"] == [ord("-")]


async def test_a_server_without_the_token_routes_takes_no_ids():
    async with with_engine(StubVllm(scale_out=False)) as url, (engine := VllmEngine(url)).running():
        assert not await engine.takes_ids()


class Shouting:
    """A reader that reads every reply as one call."""

    def __init__(self, *, plain=True):
        self.read_ids, self.plain = None, plain

    async def example(self):
        return Example([1], [65], [{"role": "user", "content": "x"}], TOOLS, ("sh", {"a": 1}), self.plain)

    async def splitter(self, prompt_ids):
        return splitter_for("qwen3", opened=False)

    async def read(self, prompt_ids, completion_ids, tools):
        self.read_ids = completion_ids
        call = {"id": "c", "type": "function", "function": {"name": "sh", "arguments": "{}"}}
        findings = [Finding(Severity.WARN, "odd", "x")]
        return {"role": "assistant", "content": "I look. STOP", "tool_calls": [call]}, findings


async def test_a_family_reader_reads_what_the_engines_parser_does_not():
    stub = StubVllm(chunks=reply("I look. ", "<tool_call>{}"))  # its derender answers the example with plain text
    reader = Shouting()
    async with with_engine(stub) as url, (engine := VllmEngine(url)).running():
        engine.read_with(reader)
        events = await sampled(engine, asked(tools=TOOLS))
        await sampled(engine, asked(tools=TOOLS))

    assert len(stub.bodies(DERENDER)) == 1  # the example, once
    assert reader.read_ids[-1] == END
    assert events[-1].finish_reason == "tool_calls"
    assert events[-1].message["tool_calls"][0]["function"]["name"] == "sh"
    assert [f.code for f in events[-1].findings] == ["odd"]
    assert "".join(e.content for e in events if isinstance(e, DeltaEvent)) == "I look."
    assert stub.bodies(GENERATE)[0]["sampling_params"]["skip_special_tokens"] is False
    assert {b.get("tool_choice") for b in stub.bodies(RENDER)} == {"none"}


async def test_an_engine_whose_parser_reads_the_example_reads_for_itself():
    call = {"id": "c", "type": "function", "function": {"name": "sh", "arguments": '{"a":  1}'}}
    stub = StubVllm(message={"role": "assistant", "content": None, "tool_calls": [call]})
    async with with_engine(stub) as url, (engine := VllmEngine(url)).running():
        engine.read_with(reader := Shouting())
        await sampled(engine, asked(tools=TOOLS))
    assert reader.read_ids is None
    assert len(stub.bodies(DERENDER)) == 2
    assert stub.bodies(RENDER)[0]["tool_choice"] == "auto"


async def test_replies_in_channels_are_the_readers_whatever_the_engine_reads():
    call = {"id": "c", "type": "function", "function": {"name": "sh", "arguments": '{"a": 1}'}}
    stub = StubVllm(message={"role": "assistant", "content": None, "tool_calls": [call]})
    reader = Shouting(plain=False)
    async with with_engine(stub) as url, (engine := VllmEngine(url)).running():
        engine.read_with(reader)
        await sampled(engine, asked(tools=TOOLS))
    assert reader.read_ids is not None
    assert not stub.bodies(DERENDER)


async def test_a_stop_string_is_not_shown_by_a_reader_either():
    stub = StubVllm(chunks=[chunk("I look. "), *final(8, end=False, stop="STOP")])
    async with with_engine(stub) as url, (engine := VllmEngine(url)).running():
        engine.read_with(Shouting())
        (*_, finish) = await sampled(engine, asked(tools=TOOLS))
    assert isinstance(finish, FinishEvent)
    assert finish.message["content"] == "I look. "
    assert finish.stop_sequence == "STOP"


HARMONY = [
    ("<|channel|>final<|message|>hi there <|return|>", "hi there", ""),
    ("<|channel|>analysis<|message|> hm\n<|end|><|start|>assistant<|channel|>final<|message|>yes", "yes", "hm"),
    ("<|channel|>commentary to=functions.sh <|constrain|>json<|message|>{}<|call|>", "", ""),
    (" to=functions.sh<|channel|>commentary<|message|>{}<|call|>", "", ""),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>so",
        "I look.",
        "so",
    ),
    ("no channel at all", "", ""),
    ("<|channel|><|message|>nowhere", "", ""),
    ("<|channel|>commentary<|message|>a \n<|end|><|start|>assistant<|channel|>final<|message|> b", "a \n b", ""),
    ("<|channel|>final<|message|>a <|b c", "a <|b c", ""),
    ("<|channel|>final<|message|>a <|en", "a", ""),
]


@pytest.mark.parametrize(("text", "content", "reasoning"), HARMONY)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_harmony_channels_stream_whatever_the_pieces(text, content, reasoning, size):
    splitter = HarmonySplitter()
    parts = [splitter.feed(text[i : i + size]) for i in range(0, len(text), size)]
    assert ("".join(c for c, _ in parts), "".join(r for _, r in parts)) == (content, reasoning)


READ = [
    ("plain text ", False, "plain text", ""),
    ("<think>\nhm\n</think>\n\nyes", False, "yes", "hm"),
    ("hm\n</think>\n\nyes", True, "yes", "hm"),
    ("<thin", False, "", ""),
    ("<thinker> is a word", False, "<thinker> is a word", ""),
    ("I look.\n<tool_call>\n{}", False, "I look.", ""),
    ('{"name": "sh"}', False, "", ""),
]


@pytest.mark.parametrize(("text", "opened", "content", "reasoning"), READ)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_readers_reply_streams_as_soon_as_its_first_word_tells_what_it_is(text, opened, content, reasoning, size):
    splitter = splitter_for("qwen3", opened=opened)
    parts = [splitter.feed(text[i : i + size]) for i in range(0, len(text), size)]
    got = "".join(c for c, _ in parts), "".join(r for _, r in parts)
    assert got == (content, reasoning)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_call_from_inside_the_reasoning_shows_no_markup(size):
    text, splitter = "<think>\nhm <tool_call>{}", splitter_for("qwen3", opened=False)
    parts = [splitter.feed(text[i : i + size]) for i in range(0, len(text), size)]
    assert "hm".startswith("".join(r for _, r in parts))
    assert not any(c for c, _ in parts)

"""Token in, token out with a real vLLM: tiny random models under the real tokenizers of four families.

A random model calls no tools by itself: the agent goes on from whatever was sampled, or the engine is told to sample a
call (`tool_choice: required`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from family_models import make_family_model

from capture_proxy import graph
from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.families import harmony_vocabulary, load
from capture_proxy.rendering import Bridging
from harness_trainer.engine.config import EngineConfig
from harness_trainer.engine.launch import Engine
from tests.capture.rendering_cases import FAMILIES, respelled, tokenizer_folder
from tests.capture.serving import served

PARSERS = {"qwen3": "hermes", "deepseek_v3": "deepseek_v3", "llama_3": "llama3_json", "gpt_oss": "openai"}
SYSTEM = {"role": "system", "content": "You are an agent."}
TASK = {"role": "user", "content": "Look around."}
TOOL = {
    "type": "function",
    "function": {
        "name": "sh",
        "description": "Run a command",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "maxLength": 8}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}
shared_load = cache(load)


@dataclass(frozen=True)
class FamilyEngine:
    name: str
    url: str
    folder: Path  # of the model; the gateway finds it by asking the engine

    def bridging(self, mode="auto"):
        return Bridging(mode, self.name, load=shared_load)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.engine) for name in FAMILIES])
def engine(request, tmp_path_factory, engine_environment) -> Iterator[FamilyEngine]:
    name, scratch = request.param, tmp_path_factory.mktemp("family")
    tokenizer = tokenizer_folder(FAMILIES[name], scratch)
    model = make_family_model(name, tokenizer, scratch / "model")
    config = EngineConfig(kv_cache_gib=0.25, cpu_threads=1, tool_call_parser=PARSERS[name])
    with contextlib.ExitStack() as stack:
        if name == "gpt_oss":  # the engine's harmony encoder has no network either
            stack.enter_context(harmony_vocabulary(shared_load("gpt_oss", model.path, "all").tokenizer))
        running = Engine(config, model=model, log_path=scratch / "engine.log", registry=scratch / "owned")
        stack.enter_context(running)
        yield FamilyEngine(name, running.base_url, model.path)


@cache
def no_white_space(name: str, folder: Path) -> dict[str, int]:
    """A bias against the tokens of white space alone: a random model fills JSON with them to no end."""
    tokenizer = shared_load(name, folder, "all").tokenizer
    return {str(i): -100 for i in tokenizer.get_vocab().values() if tokenizer.decode([i]).isspace()}


async def converse(gateway, num_turns, *, tool_choice="auto", max_tokens=12, **sampling):
    """A streaming agent's turns, and what it was sent. It answers calls with results, and text with a user message."""
    session = await gateway.mint(sampling={"temperature": 1.0, **sampling}, max_tokens=max_tokens)
    client, messages, received = gateway.openai(session), [SYSTEM, TASK], []
    for k in range(num_turns):
        stream = await client.chat.completions.create(
            model="m", messages=messages, tools=[TOOL], tool_choice=tool_choice, stream=True
        )
        said = {"content": "", "reasoning_content": "", "tool_calls": []}
        async for chunk in stream:
            delta = chunk.choices[0].delta
            said["content"] += delta.content or ""
            said["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            said["tool_calls"] += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or []]
        received.append(said)
        messages.append(respelled(said))
        results = [{"role": "tool", "tool_call_id": c["id"], "content": f"file{k} ü"} for c in said["tool_calls"]]
        messages += results or [{"role": "user", "content": f"And then? {k}"}]
    capture = await gateway.gateway.sessions.capture(session.session_id)
    return sorted(capture.turns, key=lambda t: t.index), received


def assert_one_exact_row(turns):
    assert [t.bridge_refusal for t in turns] == [None] * len(turns)
    assert len(graph.build(turns).lineages) == 1
    for before, turn in itertools.pairwise(turns):
        whole = before.prompt_ids_P + before.completion_ids_T
        assert turn.bridged_from == before.turn_id
        assert turn.prompt_ids_P[: len(whole)] == whole
    assert all(t.trainable for t in turns)
    assert not [f for t in turns for f in t.findings if f.code in ("stream_mismatch", "bridging_unproven")]


async def test_a_conversation_is_one_row_and_is_streamed_as_it_is_recorded(engine, tmp_path):
    async with served(VllmEngine(engine.url), tmp_path / "s.sqlite", bridging=engine.bridging()) as gateway:
        assert await gateway.gateway.bridger.ready() == engine.name.replace("_", "-")
        turns, received = await converse(gateway, 30 if engine.name == "qwen3" else 8)

    assert_one_exact_row(turns)
    for turn, said in zip(turns, received, strict=True):
        assert (turn.message.get("content") or "", turn.message.get("reasoning_content") or "") == (
            said["content"],
            said["reasoning_content"],
        )


async def test_calls_that_the_engine_was_told_to_sample_come_back_respelled_and_stay_one_row(engine, tmp_path):
    if engine.name == "gpt_oss":
        pytest.skip("harmony calls cannot be forced by a grammar")
    bias = no_white_space(engine.name, engine.folder)
    async with served(VllmEngine(engine.url), tmp_path / "s.sqlite", bridging=engine.bridging()) as gateway:
        await gateway.gateway.bridger.ready()
        turns, received = await converse(gateway, 6, tool_choice="required", max_tokens=150, logit_bias=bias)

    calls = [call for said in received for call in said["tool_calls"]]
    assert calls
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    assert_one_exact_row(turns)


async def test_the_window_left_by_a_prompt_of_ids_is_the_engines_own(engine, tmp_path):
    async with served(VllmEngine(engine.url), tmp_path / "s.sqlite", bridging=engine.bridging()) as gateway:
        await gateway.gateway.bridger.ready()
        turns, _ = await converse(gateway, 2)
        client = gateway.openai(await gateway.mint("s2"))
        reply = await client.chat.completions.create(model="m", messages=[SYSTEM, TASK], tools=[TOOL], max_tokens=3)
        assert reply.usage is not None
    assert turns[1].sampling["max_tokens"] == 12
    assert turns[1].sampling["temperature"] == 1.0

"""A white-box rollout gives the same rows as the same conversation of an agent by HTTP, token for token."""

from __future__ import annotations

import json
from functools import cache

import pytest

from benchmarks.template_engine import TemplateEngine
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.families import load
from capture_proxy.rendering import Bridging
from capture_proxy.types import SessionPolicy
from harness_trainer.loops.base import LoopLimits, ToolReply
from harness_trainer.loops.tool_loop import run_episode
from tests.capture.rendering_cases import FAMILIES, tokenizer_folder
from tests.loops.both_ways import by_http, in_process, rows
from tests.loops.playing import Game, tool

POLICY = SessionPolicy(sampling={"temperature": 1.0, "top_p": 1.0}, max_tokens=512, max_turns=20)
OPENING = [
    {"role": "system", "content": "You are an agent."},
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Look around. \u2028 Ünïcödé"}]},
]
shared_load = cache(load)  # a tokenizer takes a second to load


def shell():
    async def run(arguments):
        return ToolReply(f"ran {json.dumps(arguments)} \ud83d", failed="3" in str(arguments))

    return Game([tool("sh", run, command="string")])


async def play(model):
    await run_episode(shell(), OPENING, model, LoopLimits())


async def both(make_engine, folder, bridging):
    made = []
    for way in (by_http, in_process):
        engine = make_engine()
        made.append((engine, await way(engine, folder, play, bridging, POLICY)))
    return made


async def test_with_prompts_that_the_engine_renders(tmp_path):
    replies = [
        Reply("I look.", [("sh", {"command": "ls", "n": 1.0}), ("sh", {"command": "pwd"})], reasoning="Hm."),
        Reply("", [("nope", {})]),
        Reply("Done."),
    ]
    (agents, http), (ours, own) = await both(
        lambda: ScriptedEngine(list(replies), version="v3"), tmp_path, Bridging("never")
    )
    assert rows(own) == rows(http) and rows(own)
    assert [(r.messages, r.tools, r.sampling, r.max_tokens) for r in ours.requests] == [
        (r.messages, r.tools, r.sampling, r.max_tokens) for r in agents.requests
    ]


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
async def test_with_bridged_prompts_and_one_row_an_episode(tmp_path, family):
    case = FAMILIES[family]
    folder = tokenizer_folder(case, tmp_path)

    def make():
        return TemplateEngine(folder, lambda k, _: case.sampled_call(k) if k < 5 else case.sampled_text(k), family)

    bridging = Bridging("auto", family, folder, load=shared_load)
    (_, http), (engine, own) = await both(make, tmp_path, bridging)
    assert rows(own) == rows(http)
    (row,) = rows(own)
    assert len(row["turns"]) == 6 == len(engine.requests)
    assert [turn.bridged_from is not None for turn in own.turns] == [False] + [True] * 5


async def test_counting_a_prompt_gives_what_the_call_then_has_and_records_nothing(tmp_path):
    from tests.loops.playing import model_side

    case = FAMILIES["qwen3"]
    folder = tokenizer_folder(case, tmp_path)
    engine = TemplateEngine(folder, lambda k, _: case.sampled_call(k), "qwen3")
    bridging = Bridging("auto", "qwen3", folder, load=shared_load)
    async with model_side(engine, tmp_path / "store", bridging=bridging) as side:
        async with side.session("s", POLICY, {}) as session:
            specs = [tool("sh", None, command="string").spec()]
            first = await session.endpoint.chat(OPENING, specs)
            call_id = first.message["tool_calls"][0]["id"]
            more = [*OPENING, first.message, {"role": "tool", "tool_call_id": call_id, "content": "ok"}]
            counted = await session.endpoint.count(more, specs)
            second = await session.endpoint.chat(more, specs)
            capture = await session.capture()
    assert counted == second.num_prompt_tokens > first.num_prompt_tokens
    assert len(capture.turns) == 2

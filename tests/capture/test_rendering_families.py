"""Real tokenizers of four families through the real gateway: every prompt is the recorded ids and what is new."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.template_engine import TemplateEngine
from capture_proxy import graph
from capture_proxy.families import load
from capture_proxy.rendering import Bridging
from tests.capture.rendering_cases import FAMILIES, TOOL, respelled, tokenizer_folder
from tests.capture.serving import served

shared_load = cache(load)

SYSTEM = {"role": "system", "content": "You are an agent."}
TASK = {"role": "user", "content": "Look around."}


@pytest.fixture(params=FAMILIES)
def case(request):
    return FAMILIES[request.param]


@pytest.fixture
def folder(case, tmp_path):
    return tokenizer_folder(case, tmp_path)


async def converse(gateway, session, client, num_turns, *, stream=False, after=None):
    """A tool conversation as an agent that spells everything its own way has it; gives the captured turns."""
    messages = [SYSTEM, TASK]
    for k in range(num_turns):
        tools = [TOOL]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        said = reply.choices[0].message.model_dump()
        messages.append(respelled(said))
        for call in said["tool_calls"] or []:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"file{k}.txt\nüñï  \n"})
        if after is not None:
            messages += after(k)
    return sorted((await gateway.sessions.capture(session.session_id)).turns, key=lambda t: t.index)


def assert_invariants(turns):
    for turn in turns:
        assert len(turn.completion_ids_T) == len(turn.logprobs_T)
        assert turn.status == "ok"
    position = {t.turn_id: t for t in turns}
    for turn in turns:
        if turn.bridged_from is not None:
            before = position[turn.bridged_from]
            known = before.prompt_ids_P + before.completion_ids_T
            assert turn.prompt_ids_P[: len(known)] == known


def num_rows(turns):
    return len(graph.build(turns).lineages)


@pytest.mark.parametrize(("mode", "num_turns"), [("auto", 30), ("always", 3)])
async def test_a_tool_conversation_is_one_row(case, folder, tmp_path, mode, num_turns):
    engine = TemplateEngine(folder, lambda k, _: case.sampled_call(k), case.renderer)
    bridging = Bridging(mode, case.renderer, folder, load=shared_load)
    async with served(engine, tmp_path / "s.sqlite", bridging=bridging) as gateway:
        assert await gateway.gateway.bridger.ready() == case.renderer.replace("_", "-")
        session = await gateway.mint()
        turns = await converse(gateway.gateway, session, gateway.openai(session), num_turns)

    assert_invariants(turns)
    assert num_rows(turns) == 1
    assert [t.bridged_from for t in turns[1:]] == [t.turn_id for t in turns[:-1]]
    assert all(t.bridge_refusal is None for t in turns)
    assert all(t.message["tool_calls"] for t in turns)
    # The root, and in auto mode one proof for the only shape there is.
    assert engine.num_rendered == (1 if mode == "always" else 2)


async def test_without_bridging_the_same_conversation_falls_apart_for_the_agents_spelling_alone(case, folder, tmp_path):
    engine = TemplateEngine(folder, lambda k, _: case.sampled_call(k), case.renderer)
    async with served(engine, tmp_path / "s.sqlite", bridging=Bridging("never")) as gateway:
        session = await gateway.mint()
        turns = await converse(gateway.gateway, session, gateway.openai(session), 6)

    assert_invariants(turns)
    assert num_rows(turns) == 6
    assert all(t.bridged_from is None for t in turns)


async def test_a_new_user_message_keeps_the_reasoning_that_was_sampled(case, folder, tmp_path):
    engine = TemplateEngine(folder, lambda k, _: case.sampled_text(k), case.renderer)
    bridging = Bridging("auto", case.renderer, folder, load=shared_load)
    async with served(engine, tmp_path / "s.sqlite", bridging=bridging) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint()
        more = lambda k: [{"role": "user", "content": f"And then? {k}"}]  # noqa: E731
        turns = await converse(gateway.gateway, session, gateway.openai(session), 5, after=more)

    assert_invariants(turns)
    assert num_rows(turns) == 1


async def test_with_the_templates_own_retention_a_user_message_forks_where_reasoning_goes(tmp_path):
    case = FAMILIES["qwen3"]
    folder = tokenizer_folder(case, tmp_path)
    engine = TemplateEngine(folder, lambda k, _: case.sampled_text(k), case.renderer)
    bridging = Bridging("auto", case.renderer, folder, thinking_retention="tool_cycle", load=shared_load)
    async with served(engine, tmp_path / "s.sqlite", bridging=bridging) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint()
        more = lambda k: [{"role": "user", "content": "And then?"}]  # noqa: E731
        turns = await converse(gateway.gateway, session, gateway.openai(session), 2, after=more)

    assert turns[1].bridge_refusal == "qwen3 does not continue this reply with a user message"
    fork = graph.build(turns).nodes[turns[1].turn_id].fork
    assert fork.position == len(turns[0].prompt_ids_P)


HOLDS = """
import ctypes, sys
from pathlib import Path
from capture_proxy import families

def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS:"))
    return int(line.split()[1]) // 1024

kept = families.load("qwen3", Path(sys.argv[1]), None)
before = resident()
ctypes.CDLL(None).malloc_trim(0)
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc, which alone keeps so much")
def test_what_reading_a_tokenizer_took_is_not_kept(tmp_path):
    folder = tokenizer_folder(FAMILIES["qwen3"], tmp_path)
    argv = [sys.executable, "-c", HOLDS, str(folder)]
    done = subprocess.run(argv, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10, "MB that could have been given back"

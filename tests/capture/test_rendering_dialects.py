"""One conversation is one row in every dialect, streaming or not, with two calls in a reply answered out of order."""

from __future__ import annotations

import pytest

from benchmarks.bridging import AGENTS, extensions, measure
from benchmarks.template_engine import Sampled, TemplateEngine
from capture_proxy import graph
from capture_proxy.rendering import Bridging
from tests.capture.rendering_cases import FAMILIES, TOOL, respelled, tokenizer_folder
from tests.capture.serving import served


@pytest.mark.parametrize("dialect", AGENTS)
async def test_a_tool_conversation_is_one_row_in_every_dialect(dialect, tmp_path):
    folder = tokenizer_folder(FAMILIES["qwen3"], tmp_path)
    turns, _ = await measure(folder, dialect, "auto", 5, tmp_path / "s.sqlite")
    assert [t.bridge_refusal for t in turns] == [None] * 5
    assert (len(graph.build(turns).lineages), extensions(turns)) == (1, 4)
    assert {t.dialect for t in turns} == {dialect}


async def test_parallel_calls_answered_out_of_order_are_continued(tmp_path):
    folder = tokenizer_folder(FAMILIES["qwen3"], tmp_path)
    two = [f'<tool_call>\n{{"name": "sh", "arguments": {{"command":  "{c}"}}}}\n</tool_call>' for c in "ab"]
    engine = TemplateEngine(folder, lambda *_: Sampled([two[0], "\n", two[1]]), "qwen3")
    async with served(engine, tmp_path / "s", bridging=Bridging("auto", "qwen3", folder)) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint()
        client, messages = gateway.openai(session), [{"role": "user", "content": "Look."}]
        for _ in range(3):
            reply = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            said = reply.choices[0].message.model_dump()
            first, second = ({"role": "tool", "tool_call_id": c["id"], "content": c["id"]} for c in said["tool_calls"])
            messages += [respelled(said), second, first]
        turns = (await gateway.gateway.sessions.capture(session.session_id)).turns
    assert [t.bridge_refusal for t in turns] == [None] * 3
    assert (len(graph.build(turns).lineages), extensions(turns)) == (1, 2)

"""Whole agent loops in the Responses API: however an agent echoes a turn, the next prompt goes on from it."""

import json
import uuid
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.types import Turn
from tests.capture.responses_events import create, stream
from tests.capture.serving import served

Item = dict[str, Any]
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+caf\u00e9 "x"\n*** End Patch\n'
TOOLS: list[Item] = [
    {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": {"type": "text"}},
    {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
    {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", "name": "spawn"}]},
]
SCRIPT = [
    Reply(
        "\nI will look.\n\n",
        reasoning="Two things at once.\n",
        tool_calls=[
            ("shell", {"cmd": "ls  # é", "n": 1.0}),
            ("apply_patch", {"input": PATCH}),
            ("shell", {"cmd": "id"}),
        ],
    ),
    Reply(reasoning="Now delegate.", tool_calls=[("agents__spawn", {"task": "t"})]),
    Reply("Done.", reasoning="All is well."),
    Reply("Bye."),
]


def codex(item: Item) -> list[Item]:
    """Verbatim, without what it has no type for."""
    return [{k: v for k, v in item.items() if not (item["type"] == "reasoning" and k == "status")}]


def pi(item: Item) -> list[Item]:
    """Arguments as it parsed and wrote them again, text parts without log-probabilities."""
    if item["type"] == "function_call":
        arguments = json.dumps(json.loads(item["arguments"]), separators=(",", ":"), ensure_ascii=False)
        return [{**item, "arguments": arguments}]
    if item["type"] == "message":
        return [{**item, "content": [{k: v for k, v in p.items() if k != "logprobs"} for p in item["content"]]}]
    return [item]


def copilot(item: Item) -> list[Item]:
    """Ids of its own for all but reasoning."""
    if item["type"] == "reasoning":
        return [item]
    own = f"fc_{item['call_id']}" if "call_id" in item else f"msg_{uuid.uuid4()}"
    return [{**item, "id": own}]


def opencode(item: Item) -> list[Item]:
    """No ids and no types of messages; of reasoning only the sealed part."""
    if item["type"] == "message":
        return [{"role": "assistant", "content": [{"type": "output_text", "text": item["content"][0]["text"]}]}]
    if item["type"] == "reasoning":
        return [{"type": "reasoning", "encrypted_content": item["encrypted_content"], "summary": []}]
    return [{k: v for k, v in item.items() if k not in ("id", "status")}]


def mini(item: Item) -> list[Item]:
    """Fields that were never sent, as nulls, in an order of its own."""
    return [dict(sorted({**item, "phase": None, "caller": None, "async_": None}.items()))]


def kimi(item: Item) -> list[Item]:
    """Empty readable reasoning beside the sealed one."""
    if item["type"] == "reasoning":
        summary = [{"type": "summary_text", "text": ""}]
        return [{"type": "reasoning", "summary": summary, "encrypted_content": item["encrypted_content"]}]
    return [{k: v for k, v in item.items() if k not in ("id", "status")}]


def interleaving(item: Item) -> list[Item]:
    """Each call directly followed by its output."""
    return [item, *outputs([item])]


def outputs(items: list[Item]) -> list[Item]:
    made = []
    for item in items:
        if "call_id" in item:
            kind = f"{item['type']}_output"
            made.append({"type": kind, "call_id": item["call_id"], "output": f"result of {item['name']}"})
    return made


def extends(one: Turn, two: Turn) -> bool:
    whole = one.prompt_ids_P + one.completion_ids_T
    return two.prompt_ids_P[: len(whole)] == whole


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("echo", [codex, pi, copilot, opencode, mini, kimi, interleaving])
async def test_every_prompt_of_a_loop_extends_the_turn_before(
    tmp_path: Path, echo: Callable[[Item], list[Item]], streamed: bool
) -> None:
    head: list[Item] = [
        {
            "type": "message",
            "role": "developer",
            "id": "msg_1",
            "content": [{"type": "input_text", "text": "Be a coder."}],
        },
        {"type": "message", "role": "user", "id": "msg_2", "content": [{"type": "input_text", "text": "Go."}]},
    ]
    history = list(head)
    engine = ScriptedEngine(SCRIPT)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            for turn in range(4):
                ask = {"input": history, "tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}
                items = (await stream(http, **ask))[-1]["response"]["output"] if streamed else None
                items = items or (await create(http, **ask))["output"]
                history += [echoed for item in items for echoed in echo(item)]
                if echo is not interleaving:
                    history += reversed(outputs(items))  # they ran at the same time and ended in this order
                if turn == 1:
                    history.append({"type": "message", "role": "developer", "content": "Hurry."})
                if turn == 2:
                    history.append({"role": "user", "content": [{"type": "input_text", "text": "Thanks."}]})
        turns = (await gw.admin.capture("s1")).turns
    assert len(turns) == 4 and all(extends(one, two) for one, two in pairwise(turns))
    assert all(turn.trainable for turn in turns)
    roles = [m["role"] for m in engine.requests[3].messages]
    assert roles == ["system", "user", "assistant", *["tool"] * 3, "assistant", "tool", "user", "assistant", "user"]
    assert [m.get("tool_calls", [])[1:] == [] for m in engine.requests[3].messages].count(False) == 1


async def test_an_agent_that_loses_reasoning_forks_there_and_nowhere_else(tmp_path: Path) -> None:
    history: list[Item] = [{"role": "user", "content": "Go."}]
    async with served(ScriptedEngine(SCRIPT), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            for _ in range(2):
                items = (await create(http, input=history, tools=TOOLS))["output"]
                history += [item for item in items if item["type"] != "reasoning"] + outputs(items)
        one, two = (await gw.admin.capture("s1")).turns
    assert not extends(one, two)
    assert two.prompt_ids_P[: len(one.prompt_ids_P)] == one.prompt_ids_P


async def test_a_conversation_continued_by_id_extends_its_turns(tmp_path: Path) -> None:
    engine = ScriptedEngine(SCRIPT)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        ask: dict[str, Any] = {"model": "m", "tools": TOOLS, "instructions": "Be a coder."}
        reply = await client.responses.create(input="Go.", **ask)
        for _ in range(2):
            given = outputs([item.to_dict() for item in reply.output])
            reply = await client.responses.create(input=given, previous_response_id=reply.id, **ask)
        assert reply.output_text == "Done." and reply.previous_response_id is not None
        last = await client.responses.create(input="Thanks.", previous_response_id=reply.id, **ask)
        turns = (await gw.admin.capture("s1")).turns
    assert last.output_text == "Bye."
    assert len(turns) == 4 and all(extends(one, two) for one, two in pairwise(turns))
    assert [m["role"] for m in engine.requests[3].messages].count("system") == 1


@pytest.mark.parametrize("previous", ["resp_s1-0009", "resp_other-0000", "msg_1", "resp_"])
async def test_going_on_from_an_unknown_reply_is_the_apis_own_error(tmp_path: Path, previous: str) -> None:
    async with served(ScriptedEngine(["x"]), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        await gw.openai(await gw.mint("other")).responses.create(model="m", input="secret")
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(model="m", input="hi", previous_response_id=previous)
    assert caught.value.code == "previous_response_not_found" and caught.value.status_code in (400, 404)


async def test_a_reply_that_was_not_to_be_stored_cannot_be_continued(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["x"]), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        reply = await client.responses.create(model="m", input="hi", store=False)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(model="m", input="on", previous_response_id=reply.id)
    assert caught.value.code == "previous_response_not_found"

"""`previous_response_id`: a request that goes on from a recorded turn sees that turn's history and reply."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineError
from tests.capture.serving import Served, served

TOOLS = [{"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}}]


async def ask(gw: Served, token: str, text: Any, previous: str | None = None, **more: Any) -> httpx.Response:
    body: dict[str, Any] = {"model": "m", "input": text, "tools": TOOLS, **more}
    if previous is not None:
        body["previous_response_id"] = previous
    async with httpx.AsyncClient(base_url=gw.agent_url, headers={"authorization": f"Bearer {token}"}) as http:
        return await http.post("/v1/responses", json=body)


def roles(messages: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(m["role"], m.get("content")) for m in messages]


@pytest.mark.parametrize("restart", [False, True])
async def test_history_reply_and_new_input_in_order_with_the_new_instructions(tmp_path: Path, restart: bool) -> None:
    engine = ScriptedEngine([Reply("I look.", [("bash", {"cmd": "ls"})]), "done", "more"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        token = (await gw.mint()).token
        first = (await ask(gw, token, "list the files", instructions="old")).json()
        call_id = next(item["call_id"] for item in first["output"] if item["type"] == "function_call")
        output = [{"type": "function_call_output", "call_id": call_id, "output": "a.txt"}]
        if not restart:
            second = await ask(gw, token, output, first["id"], instructions="new")
    if restart:
        async with served(engine, tmp_path / "s.sqlite") as gw:
            second = await ask(gw, token, output, first["id"], instructions="new")
    assert second.status_code == 200, second.text
    sent = engine.requests[1].messages
    assert roles(sent) == [
        ("system", "new"),
        ("user", "list the files"),
        ("assistant", "I look."),
        ("tool", "a.txt"),
    ]
    assert sent[2]["tool_calls"][0]["function"]["name"] == "bash"


async def test_a_chain_holds_everything_once(tmp_path: Path) -> None:
    engine = ScriptedEngine(["one", "two", "three"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        token = (await gw.mint()).token
        previous = None
        for text in ("a", "b", "c"):
            previous = (await ask(gw, token, text, previous, instructions="be brief")).json()["id"]
        turns = (await gw.admin.capture("s1")).turns
    contents = ["be brief", "a", "one", "b", "two", "c"]
    assert [m["content"] for m in engine.requests[2].messages] == contents
    assert [m["content"] for m in turns[2].request["messages"]] == contents  # recorded whole, not as a reference
    whole = turns[0].prompt_ids_P + turns[0].completion_ids_T
    assert turns[1].prompt_ids_P[: len(whole)] == whole


async def test_what_cannot_be_gone_on_from_is_not_found(tmp_path: Path) -> None:
    engine = ScriptedEngine(["ok"], faults={2: EngineError("boom")})
    async with served(engine, tmp_path / "s.sqlite") as gw:
        token, other = (await gw.mint("a")).token, (await gw.mint("b")).token
        foreign = (await ask(gw, other, "hi")).json()["id"]
        unstored = (await ask(gw, token, "hi", store=False)).json()["id"]
        assert (await ask(gw, token, "fails")).status_code == 502
        failed = unstored.replace("-0000", "-0001")
        assert failed != unstored
        for previous in (foreign, unstored, failed, "resp_unknown", "resp_a-9999"):
            response = await ask(gw, token, "go on", previous)
            assert response.status_code in (400, 404), (previous, response.text)
            assert response.json()["error"]["code"] == "previous_response_not_found", previous
        turns = (await gw.admin.capture("a")).turns
    assert [t.status.value for t in turns][:2] == ["ok", "failed"] and len(turns) <= 3

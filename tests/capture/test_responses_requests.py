"""Parameters of a Responses request: what is passed on, what is noted, and what is refused in the API's own shape."""

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from pydantic import BaseModel

from capture_proxy.dialects.base import Call, Head
from capture_proxy.dialects.openai_responses import OpenAIResponses
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import BadRequest
from tests.capture.serving import served

SH: dict[str, Any] = {
    "type": "function",
    "name": "sh",
    "description": "d",
    "parameters": {"type": "object"},
    "strict": True,
}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch"}
SEARCH: dict[str, Any] = {"type": "web_search", "external_web_access": False}


def parse(**body: Any) -> Call:
    return OpenAIResponses().parse(Head({}, {}, {}), json.dumps({"model": "m", "input": "hi", **body}).encode())


def offered(call: Call) -> list[str]:
    return [tool["function"]["name"] for tool in call.tools]


def test_a_function_is_nested_as_chat_completions_has_it() -> None:
    assert parse(tools=[SH]).tools == [
        {"type": "function", "function": {"name": "sh", "description": "d", "parameters": {"type": "object"}}}
    ]
    nested = {"type": "function", "function": {"name": "sh"}}
    assert parse(tools=[nested], tool_choice=nested).tool_choice == {"type": "function", "function": {"name": "sh"}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "sh"}, {"type": "function", "function": {"name": "sh"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
    ],
)
def test_every_form_of_tool_choice_is_understood(choice: Any, expected: Any) -> None:
    got = parse(tools=[SH, PATCH, SEARCH], tool_choice=choice)
    assert got.tool_choice == expected and offered(got) == ["sh", "patch"]


def test_allowed_tools_are_the_only_ones_offered() -> None:
    allowed = [{"type": "custom", "name": "patch"}, {"type": "web_search"}]
    got = parse(tools=[SH, PATCH, SEARCH], tool_choice={"type": "allowed_tools", "mode": "required", "tools": allowed})
    assert got.tool_choice == "required" and offered(got) == ["patch"]
    assert [f.code for f in got.findings] == ["tool_dropped", "tools_restricted"]


def test_a_choice_among_no_tools_is_dropped() -> None:
    got = parse(tools=[], tool_choice="auto", parallel_tool_calls=True)
    assert (got.tools, got.tool_choice, got.parallel_tool_calls) == ([], None, None)
    assert parse(tools=[SEARCH], tool_choice="auto").tool_choice is None


def test_a_response_format_becomes_the_engines() -> None:
    class Answer(BaseModel):
        value: int

    schema = Answer.model_json_schema()
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    assert parse(text={"format": form, "verbosity": "low"}).sampling["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    assert parse(text={"format": {"type": "json_object"}}).sampling["response_format"] == {"type": "json_object"}
    for nothing in (None, {}, {"format": None}, {"format": {"type": "text"}}):
        assert "response_format" not in parse(text=nothing).sampling


def test_sampling_and_the_output_cap_are_recorded_as_asked() -> None:
    got = parse(temperature=0.7, top_p=0.9, max_output_tokens=64, top_k=5, metadata={"a": "b"}, user="u")
    assert got.sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 64} and got.max_tokens == 64
    assert parse(tools=[SH], parallel_tool_calls=False).parallel_tool_calls is False


def test_what_is_asked_and_not_done_is_noted() -> None:
    got = parse(reasoning={"effort": "high", "summary": "auto"}, truncation="auto", top_logprobs=3)
    assert [f.code for f in got.findings] == ["not_applied"] * 3
    assert got.chat_template_kwargs == {}
    assert parse(reasoning={"summary": "auto"}, truncation="disabled", include=["x"]).findings == ()


@pytest.mark.parametrize(
    "body",
    [
        {"input": None},
        {"input": ""},
        {"input": []},
        {"input": 3},
        {"input": ["hi"]},
        {"input": [{}]},
        {"input": [{"type": ["message"], "role": "user"}]},
        {"input": [{"type": "web_search_call"}]},
        {"input": [{"role": "wizard", "content": "x"}]},
        {"input": [{"role": ["user"], "content": "x"}]},
        {"input": [{"role": "user", "content": 3}]},
        {"input": [{"role": "user", "content": [3]}]},
        {"input": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"type": "compaction", "encrypted_content": "x"}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "cut'}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "NaN"}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 3}]},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": {}}]},
        {"instructions": ["x"]},
        {"model": 3},
        {"n": 2},
        {"n": True},
        {"background": True},
        {"conversation": "conv_1"},
        {"prompt": {"id": "pmpt_1"}},
        {"previous_response_id": 3},
        {"previous_response_id": ""},
        {"max_output_tokens": 0},
        {"max_output_tokens": "9"},
        {"max_output_tokens": True},
        {"temperature": "hot"},
        {"text": {"format": "json"}},
        {"text": {"format": {"type": "json_schema"}}},
        {"text": {"format": {"type": "grammar"}}},
        {"tools": {}},
        {"tools": ["sh"]},
        {"tools": [{"name": "sh"}]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "name": "sh", "parameters": "x"}]},
        {"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]},
        {"tools": [{"type": "custom", "name": "p", "format": "lark"}]},
        {"tools": [{"type": "namespace", "tools": [{"type": "function", "name": "x"}]}]},
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": ["function"]}]}]},
        {"tools": [SH], "tool_choice": 3},
        {"tools": [SH], "tool_choice": {}},
        {"tools": [SH], "tool_choice": {"type": ["function"]}},
        {"tools": [SH], "tool_choice": {"type": "function", "name": "other"}},
        {"tools": [SH], "tool_choice": {"type": "web_search"}},
        {"tools": [SH], "tool_choice": {"type": "mcp", "server_label": "x"}},
        {"tools": [SEARCH], "tool_choice": "required"},
        {"tools": [SH, SEARCH], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]}},
        {"tools": [SH], "tool_choice": {"type": "allowed_tools", "tools": [3]}},
        {"tools": [SH], "tool_choice": {"type": "allowed_tools", "mode": "often", "tools": [SH]}},
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_a_400_that_says_so(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert 10 < len(str(caught.value)) < 200 and "\n" not in str(caught.value)


async def test_errors_have_the_apis_shape(tmp_path: Path) -> None:
    engine = ScriptedEngine(["x"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        async with gw.http(session) as http, gw.http() as stranger:
            bad = await http.post("/v1/responses", content=b"{")
            unknown = await stranger.post("/v1/responses", json={"input": "hi"})
            await gw.admin.seal("s1")
            sealed = await http.post("/v1/responses", json={"input": "hi"})
    for response, status in ((bad, 400), (unknown, 401), (sealed, 403)):
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] != "server_error"
    assert engine.requests == []


@pytest.mark.parametrize("coding", ["identity", "gzip", "zstd"])
async def test_a_compressed_body_is_the_same_turn(tmp_path: Path, coding: str) -> None:
    body = json.dumps({"model": "m", "input": "h\u00e9", "tools": [PATCH]}).encode()
    sent = {"identity": body, "gzip": gzip.compress(body), "zstd": zstandard.compress(body)}[coding]
    async with served(ScriptedEngine([Reply(tool_calls=[("patch", {"input": "p"})])]), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            response: httpx.Response = await http.post(
                "/v1/responses", content=sent, headers={"content-encoding": coding}
            )
        (turn,) = (await gw.admin.capture("s1")).turns
    assert response.status_code == 200 and response.json()["output"][0]["input"] == "p"
    assert turn.request["messages"] == [{"role": "user", "content": "h\u00e9"}] and turn.dialect == "openai_responses"

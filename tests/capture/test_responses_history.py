"""What the items of a Responses conversation mean to the model, whoever echoes them."""

import json
from typing import Any

import pytest

from capture_proxy.dialects.base import Call, Head
from capture_proxy.dialects.openai_responses import OpenAIResponses
from capture_proxy.dialects.openai_responses_items import seal_reasoning
from capture_proxy.types import Severity

USER = {"role": "user", "content": [{"type": "input_text", "text": "go"}]}
T1, T2 = "00000000000000a1", "00000000000000b2"


def parse(*items: Any, **body: Any) -> Call:
    data = {"model": "m", "input": list(items), **body}
    return OpenAIResponses().parse(Head({}, {}, {}), json.dumps(data).encode())


def call(call_id: str, name: str = "sh", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def output(call_id: str, text: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def reasoning(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **more}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def shape(parsed: Call) -> list[Any]:
    """Each message as role, or (role, what it holds)."""
    out: list[Any] = []
    for m in parsed.messages:
        if m["role"] == "assistant":
            calls = [c["id"] for c in m.get("tool_calls", [])]
            out.append((m.get("reasoning_content"), m["content"], calls))
        else:
            out.append(m.get("tool_call_id") or m["role"])
    return out


def test_the_items_of_one_turn_are_one_message_and_its_outputs_follow_in_the_order_of_the_calls() -> None:
    got = parse(USER, reasoning("hm"), said("both"), call("a"), call("b"), output("b", "B"), output("a", "A"))
    assert shape(got) == ["user", ("hm", "both", ["a", "b"]), "a", "b"]
    assert [m["content"] for m in got.messages[2:]] == ["A", "B"]


def test_calls_after_an_output_are_a_new_turn_unless_their_ids_say_otherwise() -> None:
    assert shape(parse(USER, call("a"), output("a"), call("b"), output("b"))) == [
        "user",
        (None, None, ["a"]),
        "a",
        (None, None, ["b"]),
        "b",
    ]
    mixed = [call("a", id=f"fc_{T1}_0"), output("a"), call("b", id=f"fc_{T1}_1"), output("b")]
    assert shape(parse(USER, *mixed)) == ["user", (None, None, ["a", "b"]), "a", "b"]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([said("a"), said("b")], [(None, "a", []), (None, "b", [])]),
        ([said("a"), call("x", id=f"fc_{T2}_0")], [(None, "a", ["x"])]),
        ([said("a", id=f"msg_{T1}_0"), call("x", id=f"fc_{T2}_0")], [(None, "a", []), (None, None, ["x"])]),
        ([call("x"), said("a")], [(None, None, ["x"]), (None, "a", [])]),
        ([reasoning("r"), reasoning("s"), said("a")], [("r", None, []), ("s", "a", [])]),
        ([said("a", id="msg_made-up"), call("x", id="fc_call_x")], [(None, "a", ["x"])]),
        (
            [reasoning("r", id=f"rs_{T1}_0"), said("a", id="msg_1"), call("x", id="fc_call_x")],
            [("r", "a", ["x"])],
        ),
    ],
)
def test_neighbouring_replies_stay_apart(items: list[dict[str, Any]], expected: list[Any]) -> None:
    assert shape(parse(USER, *items)) == ["user", *expected]


def test_call_ids_that_models_use_again_pair_with_the_latest_call() -> None:
    got = parse(USER, call("0"), output("0", "first"), call("0"), output("0", "second"))
    assert [m["content"] for m in got.messages if m["role"] == "tool"] == ["first", "second"]
    twice = parse(USER, call("0"), call("0"), output("0", "first"), output("0", "second"))
    assert [m["content"] for m in twice.messages if m["role"] == "tool"] == ["first", "second"]


def test_an_output_without_its_call_and_a_call_without_output_are_kept() -> None:
    assert shape(parse(output("gone"), USER, call("a"), USER)) == ["gone", "user", (None, None, ["a"]), "user"]


@pytest.mark.parametrize(
    "item",
    [
        reasoning("because"),
        reasoning("because", status="completed", encrypted_content=None, id="rs_1"),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "because"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": seal_reasoning("because")},
        {"type": "reasoning", "summary": [{"text": ""}], "encrypted_content": seal_reasoning("because")},
        reasoning("because", encrypted_content="gAAAAAforeign"),
        reasoning("because", encrypted_content=seal_reasoning("because")[:-3] + "!"),
    ],
)  # fmt: skip
def test_reasoning_is_found_wherever_a_client_kept_it(item: dict[str, Any]) -> None:
    got = parse(USER, item, said("x"))
    assert shape(got)[1] == ("because", "x", [])
    assert got.findings == ()


def test_reasoning_that_cannot_be_read_is_left_out_and_the_turn_stays_whole() -> None:
    empty = {"type": "reasoning", "summary": [{"type": "summary_text", "text": ""}]}
    assert shape(parse(USER, empty, said("x"), call("a"))) == ["user", (None, "x", ["a"])]
    assert shape(parse(USER, empty, USER)) == ["user", "user"]
    foreign = parse(USER, {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, said("x"))
    assert shape(foreign) == ["user", (None, "x", [])]
    assert [(f.severity, f.code) for f in foreign.findings] == [(Severity.WARN, "item_dropped")]


def test_a_custom_call_is_the_function_call_that_the_model_wrote() -> None:
    raw = 'line one\n"two" \\ é\n'
    got = parse(
        USER,
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": raw, "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Done"}]},
    )
    (made,) = got.messages[1]["tool_calls"]
    assert made["function"]["name"] == "apply_patch" and json.loads(made["function"]["arguments"]) == {"input": raw}
    assert got.messages[2] == {"role": "tool", "content": "Done", "tool_call_id": "c"}


def test_a_namespaced_call_keeps_the_models_own_name_for_it() -> None:
    got = parse(USER, call("a", "spawn", namespace="agents"), call("b", "sh", namespace=None))
    assert [c["function"]["name"] for c in got.messages[1]["tool_calls"]] == ["agents__spawn", "sh"]


@pytest.mark.parametrize(
    ("arguments", "kept"), [("", "{}"), (" ", "{}"), (None, "{}"), ('{"a": 1}', '{"a": 1}'), ("[1]", "[1]")]
)
def test_arguments_are_kept_as_written(arguments: Any, kept: str) -> None:
    got = parse(USER, {**call("a"), "arguments": arguments})
    assert got.messages[1]["tool_calls"][0]["function"]["arguments"] == kept


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("plain", "plain"),
        (None, ""),
        ([], ""),
        ([{"type": "input_text", "text": "one"}], "one"),
        ({"exit": 0}, '{"exit":0}'),
        (
            [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:,x", "detail": "low"}],
            [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}},
            ],
        ),
    ],
)
def test_an_output_is_text_or_parts(sent: Any, kept: Any) -> None:
    assert parse(USER, call("a"), output("a", sent)).messages[2]["content"] == kept


def test_a_late_developer_item_stays_in_its_place() -> None:
    system = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]}
    got = parse(system, USER, said("x"), {"role": "developer", "content": "be brief"}, USER)
    assert [m["role"] for m in got.messages] == ["system", "user", "assistant", "user", "user"]
    assert got.messages[3]["content"] == "<system>\nbe brief\n</system>"
    assert [f.code for f in got.findings] == ["system_in_place"]


def test_instructions_are_the_system_message_of_this_request_alone() -> None:
    developer = {"role": "developer", "content": "rules"}
    got = parse(developer, USER, instructions="be a pirate")
    assert got.instructions and got.messages[0] == {"role": "system", "content": "be a pirate"}
    assert [m["role"] for m in got.messages] == ["system", "user", "user"]
    assert "rules" in got.messages[1]["content"]
    assert not parse(USER).instructions and not parse(USER, instructions=None).instructions


def test_a_continued_request_names_the_turn_and_leads_with_no_system_of_its_own() -> None:
    got = parse({"role": "developer", "content": "new rule"}, USER, previous_response_id="resp_s1-0003")
    assert got.continues == "s1-0003" and got.messages[0]["role"] == "user" and got.store
    own = parse(USER, instructions="now", previous_response_id="resp_s1-0003", store=False)
    assert [m["role"] for m in own.messages] == ["system", "user"] and own.instructions and not own.store


def test_items_of_hosted_tools_are_left_out_with_a_finding() -> None:
    got = parse(USER, {"type": "web_search_call", "id": "ws", "status": "completed"}, said("x"))
    assert shape(got) == ["user", (None, "x", [])]
    assert [f.code for f in got.findings] == ["item_dropped"] and "web_search_call" in got.findings[0].detail


def test_a_string_is_one_user_message() -> None:
    body = json.dumps(
        {"model": "m", "input": "hi", "metadata": {"a": "b"}, "tools": [], "tool_choice": "auto"}
    ).encode()
    got = OpenAIResponses().parse(Head({}, {}, {}), body)
    assert got.messages == [{"role": "user", "content": "hi"}] and got.tools == [] and got.tool_choice is None

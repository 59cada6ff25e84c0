"""What an Anthropic request says, in chat-completions terms."""

import json
from typing import Any

import pytest

from capture_proxy.dialects.anthropic import Anthropic
from capture_proxy.dialects.anthropic_content import signature, strip_attribution
from capture_proxy.dialects.base import Call, Head
from capture_proxy.errors import BadRequest, NotFound
from capture_proxy.types import Severity

HEAD = Head({}, {"beta": "true"}, {})
USER = [{"role": "user", "content": "hi"}]
BASH = {
    "name": "Bash",
    "description": "run",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}


def parse(head: Head = HEAD, /, **body: Any) -> Call:
    return Anthropic().parse(head, json.dumps({"model": "m", "max_tokens": 9, "messages": USER, **body}).encode())


def codes(call: Call) -> list[str]:
    return [finding.code for finding in call.findings]


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def use(call_id: str, name: str = "Bash", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content: Any = "out", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


# --- system


@pytest.mark.parametrize("system", ["be good", [block("be good")], [block("be good", cache_control={"type": "x"})]])
def test_a_system_string_and_its_blocks_are_one_leading_message(system: Any) -> None:
    assert parse(system=system).messages == [{"role": "system", "content": "be good"}, *USER]


@pytest.mark.parametrize("system", [None, "", [], [block("")]])
def test_an_empty_system_is_no_message(system: Any) -> None:
    assert parse(system=system).messages == USER


LINE = "x-anthropic-billing-header: cc_version=2.1.332.78f; cc_entrypoint=sdk-cli; cch=a9f==;"


@pytest.mark.parametrize(
    "system",
    [
        [block(LINE, cache_control={"type": "ephemeral"}), block("You are.")],
        [block(LINE + "\n"), block("You are.")],
        LINE + "\nYou are.",
        LINE + "\r\n\r\nYou are.",
        LINE + " You are.",
        LINE + "You are.",
        LINE.removesuffix(";") + "\nYou are.",
        "\n" + LINE.upper() + "\nYou are.",
        LINE.replace("a9f==", "two words") + "\nYou are.",
        LINE + "\n" + LINE + "\nYou are.",
        [block(LINE + "\nYou are.")],
        "x-anthropic-billing-header: some later form\nYou are.",
    ],
)
def test_the_attribution_line_is_left_out_of_the_prompt_and_noted(system: Any) -> None:
    call = parse(system=system)
    assert call.messages[0] == {"role": "system", "content": "You are."}
    assert codes(call) == ["attribution_removed"] and call.findings[0].severity is Severity.INFO


def test_the_attribution_line_alone_leaves_no_system_message() -> None:
    assert parse(system=LINE).messages == USER
    assert parse(system="x-anthropic-billing-header:").messages == USER


@pytest.mark.parametrize("text", [f"You are.\n{LINE}", f"The line `{LINE}` changes.", "x-anthropic-billing: a=b;", ""])
def test_a_system_text_that_does_not_begin_with_the_line_is_untouched(text: str) -> None:
    assert strip_attribution(text) == text


def test_a_user_that_quotes_the_attribution_line_is_untouched() -> None:
    messages = [{"role": "user", "content": LINE}, {"role": "assistant", "content": LINE}, *USER]
    call = parse(messages=messages)
    assert call.messages == messages and codes(call) == []
    call = parse(
        messages=[{"role": "user", "content": [block(LINE)]}, {"role": "user", "content": [result("x", LINE)]}]
    )
    assert [m["content"] for m in call.messages] == [LINE, LINE]


def test_a_system_message_in_the_middle_stays_in_its_place_without_the_attribution_line() -> None:
    middle = {"role": "system", "content": [block(f"{LINE}\nenv"), block("two")]}
    call = parse(system="top", messages=[*USER, middle, {"role": "assistant", "content": "a"}, *USER])
    assert [m["role"] for m in call.messages] == ["system", "user", "user", "assistant", "user"]
    assert call.messages[0]["content"] == "top"
    assert call.messages[2]["content"] == "<system>\nenv\n\ntwo\n</system>"
    assert codes(call) == ["attribution_removed", "system_in_place"]


def test_a_system_message_that_was_only_the_attribution_line_is_gone() -> None:
    assert parse(messages=[*USER, {"role": "system", "content": LINE}]).messages == USER


# --- content blocks


def test_one_text_block_is_the_plain_string() -> None:
    marked = [{"role": "user", "content": [block("hi", cache_control={"type": "ephemeral"}, citations=None)]}]
    assert parse(messages=marked).messages == parse(messages=USER).messages == USER


def test_cache_control_anywhere_changes_nothing() -> None:
    def history(mark: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": [block("a", **mark), {"type": "image", "source": IMAGE, **mark}]},
            {"role": "assistant", "content": [block("b", **mark), {**use("t1"), **mark}]},
            {"role": "user", "content": [result("t1", [block("c", **mark)], **mark)]},
        ]

    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    one, two = parse(messages=history({}), tools=[BASH]), parse(messages=history(mark), tools=[{**BASH, **mark}])
    assert one == two
    assert "cache_control" not in json.dumps(one.record())


IMAGE = {"type": "base64", "media_type": "image/jpeg", "data": "QUJD"}


def test_images_become_image_parts_in_user_text_and_in_tool_results() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    content = [block("see"), {"type": "image", "source": IMAGE}, url]
    call = parse(messages=[{"role": "user", "content": content}, {"role": "user", "content": [result("t", content)]}])
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,QUJD"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    ]
    assert call.messages == [
        {"role": "user", "content": parts},
        {"role": "tool", "tool_call_id": "t", "content": parts},
    ]


def test_documents_are_their_text_and_what_cannot_be_read_is_said() -> None:
    pdf = {
        "type": "document",
        "title": "Spec",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "Q"},
    }
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "plain"}}
    nested = {"type": "document", "source": {"type": "content", "content": [block("inner")]}}
    found = {"type": "search_result", "title": "T", "source": "http://s", "content": [block("hit")]}
    upload = {"type": "container_upload", "file_id": "f1"}
    call = parse(messages=[{"role": "user", "content": [pdf, text, nested, found, upload]}])
    assert call.messages[0]["content"].split("\n\n") == [
        "Spec",
        "[document application/pdf omitted]",
        "plain",
        "inner",
        "T\nhttp://s\nhit",
        "[file f1 omitted]",
    ]
    assert codes(call) == ["content_omitted", "content_omitted"]
    assert all(f.severity is Severity.WARN for f in call.findings)


def test_thinking_text_and_calls_of_an_assistant_are_one_message() -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "AAAA"},
        block("I "),
        block("look."),
        use("t1", cmd="ls  -l", text="é"),
        use("t2"),
    ]
    call = parse(messages=[*USER, {"role": "assistant", "content": content}, *USER])
    (message,) = [m for m in call.messages if m["role"] == "assistant"]
    assert message["reasoning_content"] == "hm" and message["content"] == "I look."
    assert [c["id"] for c in message["tool_calls"]] == ["t1", "t2"]
    assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [
        {"cmd": "ls  -l", "text": "é"},
        {},
    ]
    assert codes(call) == ["redacted_thinking"]


def test_thinking_is_taken_as_sent_and_a_broken_seal_of_ours_is_noted() -> None:
    def thinking(text: str, mark: Any) -> list[dict[str, Any]]:
        return [
            *USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": mark}]},
            *USER,
        ]

    for mark in (signature("hm"), "another vendor's", "", None, 3):
        call = parse(messages=thinking("hm", mark))
        assert call.messages[1]["reasoning_content"] == "hm" and codes(call) == []
    call = parse(messages=thinking("changed", signature("hm")))
    assert call.messages[1]["reasoning_content"] == "changed" and codes(call) == ["thinking_rewritten"]


def test_several_tool_results_come_in_the_order_of_the_calls_and_text_beside_them_follows() -> None:
    messages = [
        *USER,
        {"role": "assistant", "content": [use("a"), use("b"), use("c")]},
        {
            "role": "user",
            "content": [
                block("<system-reminder>x</system-reminder>"),
                result("c", [block("C1"), block("C2")]),
                result("stray", "S"),
                result("b", None),
                result("a", "A"),
                block("and go on"),
            ],
        },
    ]
    call = parse(messages=messages)
    assert [(m.get("tool_call_id"), m["content"]) for m in call.messages[2:]] == [
        ("a", "A"),
        ("b", ""),
        ("c", "C1\n\nC2"),
        ("stray", "S"),
        (None, "<system-reminder>x</system-reminder>\n\nand go on"),
    ]
    assert call.messages[-1]["role"] == "user"


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no such file", "Error: no such file"),
        ("Error: no such file", "Error: no such file"),
        ("", "Error:"),
        ([block("boom")], "Error: boom"),
    ],
)
def test_a_failed_tool_result_says_that_it_is_an_error(content: Any, shown: str) -> None:
    messages = [{"role": "user", "content": [result("t", content, is_error=True)]}]
    assert parse(messages=messages).messages[0]["content"] == shown
    messages = [{"role": "user", "content": [result("t", content, is_error=False)]}]
    assert parse(messages=messages).messages[0]["content"] in (content, "boom")


def test_a_tool_that_a_provider_ran_becomes_a_call_and_its_result() -> None:
    search = {"type": "server_tool_use", "id": "srv1", "name": "web_search", "input": {"query": "q"}}
    hits = {
        "type": "web_search_tool_result",
        "tool_use_id": "srv1",
        "content": [{"type": "web_search_result", "url": "u"}],
    }
    content = [block("searching"), search, hits, block("found it")]
    call = parse(messages=[*USER, {"role": "assistant", "content": content}, *USER])
    assert [m["role"] for m in call.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert call.messages[1]["tool_calls"][0]["function"]["name"] == "web_search"
    assert "web_search_result" in call.messages[2]["content"] and call.messages[2]["tool_call_id"] == "srv1"
    assert call.messages[3]["content"] == "found it"


def test_an_assistant_that_said_nothing_is_kept() -> None:
    empty: list[Any] = [[], "", None]
    for content in empty:
        call = parse(messages=[*USER, {"role": "assistant", "content": content}, *USER])
        assert call.messages[1] == {"role": "assistant", "content": ""}


def test_a_last_assistant_message_is_closed_and_noted() -> None:
    call = parse(messages=[*USER, {"role": "assistant", "content": [block("I will wri")]}])
    assert call.messages[-1] == {"role": "assistant", "content": "I will wri"}
    assert codes(call) == ["prefill_closed"]


# --- tools and choices


def test_tools_are_functions_and_what_we_cannot_serve_is_dropped_with_a_finding() -> None:
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "mcp_toolset", "mcp_server_name": "jira"},
    ]
    call = parse(tools=[BASH, *hosted, {**BASH, "type": "custom", "name": "Read", "strict": True}])
    parameters = {"type": "object"}
    assert call.tools == [
        {"type": "function", "function": {"name": "Bash", "description": "run", "parameters": parameters}},
        {"type": "function", "function": {"name": "Read", "description": "run", "parameters": parameters}},
    ]
    assert codes(call) == ["tool_dropped"] * 7
    assert "jira" in call.findings[-1].detail and all(f.severity is Severity.WARN for f in call.findings)


@pytest.mark.parametrize(
    ("choice", "tool_choice", "parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, "auto", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "Bash"}, {"type": "function", "function": {"name": "Bash"}}, None),
    ],
)
def test_tool_choice(choice: Any, tool_choice: Any, parallel: Any) -> None:
    call = parse(tools=[BASH], tool_choice=choice)
    assert (call.tool_choice, call.parallel_tool_calls) == (tool_choice, parallel)


def test_a_choice_among_no_tools_is_dropped() -> None:
    call = parse(tools=[], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert (call.tools, call.tool_choice, call.parallel_tool_calls) == ([], None, None)


# --- the other fields


def test_sampling_fields_keep_their_meaning_under_chat_names() -> None:
    call = parse(
        temperature=0, top_p=0.9, top_k=40, stop_sequences=["X"], metadata={"user_id": "u"}, service_tier="auto"
    )
    assert call.sampling == {"temperature": 0, "top_p": 0.9, "top_k": 40, "stop": ["X"], "max_tokens": 9}
    assert call.max_tokens == 9 and not call.stream and codes(call) == []
    assert "stop" not in parse(stop_sequences=[]).sampling


@pytest.mark.parametrize("where", ["output_format", "output_config"])
def test_a_json_schema_is_the_response_format(where: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    call = parse(**{where: form if where == "output_format" else {"format": form}})
    assert call.sampling["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_wishes_about_thinking_are_recorded_and_not_obeyed() -> None:
    wishes: list[Any] = [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 2000}, {"type": "disabled"}]
    for thinking in wishes:
        call = parse(thinking=thinking, output_config={"effort": "high"})
        assert call.chat_template_kwargs == {} and codes(call) == ["thinking_asked"]
        assert thinking["type"] in call.findings[0].detail and "high" in call.findings[0].detail


def test_what_only_a_provider_can_do_is_noted() -> None:
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert codes(parse(context_management=keep)) == []
    clear = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    assert codes(parse(context_management=clear)) == ["not_served"]
    assert codes(parse(mcp_servers=[{"name": "jira", "url": "http://x"}])) == ["not_served"]


def test_counting_needs_no_max_tokens_and_other_actions_are_unknown() -> None:
    body = json.dumps({"model": "m", "messages": USER}).encode()
    assert Anthropic().parse(Head({"action": "count_tokens"}, {}, {}), body).messages == USER
    with pytest.raises(NotFound):
        Anthropic().parse(Head({"action": "batches"}, {}, {}), body)


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"max_tokens": "9"},
        {"max_tokens": 1.5},
        {"model": 3},
        {"messages": []},
        {"messages": None},
        {"messages": {}},
        {"messages": ["hi"]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [3]}]},
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"messages": [{"role": "user", "content": [result("t", 3)]}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "search_result", "content": 3}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "t"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": None}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "image", "source": IMAGE}]}]},
        {"messages": [{"role": "system", "content": [{"type": "image", "source": IMAGE}]}]},
        {"system": 3},
        {"system": [{"type": "image", "source": IMAGE}]},
        {"tools": {}},
        {"tools": ["Bash"]},
        {"tools": [{"name": "Bash"}]},
        {"tools": [{"input_schema": {}}]},
        {"tools": [{**BASH, "type": 3}]},
        {"tools": [BASH], "tool_choice": "auto"},
        {"tools": [BASH], "tool_choice": {"type": "maybe"}},
        {"tools": [BASH], "tool_choice": {"type": ["any"]}},
        {"tools": [BASH], "tool_choice": {"type": "tool", "name": "Read"}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}},
        {"temperature": "hot"},
        {"top_k": 1.5},
        {"top_p": True},
        {"stop_sequences": "X"},
        {"stop_sequences": [""]},
        {"output_format": {"type": "xml"}},
        {"thread": {"type": "continue", "previous_message_id": "msg_1"}},
    ],
)
def test_what_is_not_a_valid_request_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        parse(**body)


def test_nesting_too_deep_to_be_written_again_is_refused() -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep}
    for body in (
        {"messages": [{"role": "assistant", "content": [{**use("t"), "input": deep}]}]},
        {"tools": [{**BASH, "input_schema": deep}]},
        {"output_format": {"type": "json_schema", "schema": deep}},
    ):
        with pytest.raises(BadRequest, match="nested"):
            parse(**body)

"""What a Gemini request becomes: messages, tools, sampling, and clear refusals."""

import base64
import json
from typing import Any

import pytest

from capture_proxy.dialects.base import Call, Head
from capture_proxy.dialects.gemini import Gemini
from capture_proxy.errors import BadRequest, NotFound

HI = [{"role": "user", "parts": [{"text": "hi"}]}]
BASH = {"name": "bash", "parametersJsonSchema": {"type": "object", "properties": {"cmd": {"type": "string"}}}}
READ = {"name": "read", "description": "Reads."}


def parse(body: dict[str, Any], method: str = "generateContent", model: str = "smol", **query: str) -> Call:
    return Gemini().parse(Head({"model": model, "method": method}, query, {}), json.dumps(body).encode())


def messages(*contents: Any, **rest: Any) -> list[dict[str, Any]]:
    return parse({"contents": list(contents), **rest}).messages


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Any, role: str | None = "user") -> dict[str, Any]:
    return {"role": role, "parts": list(parts)} if role else {"parts": list(parts)}


def call(name: str, call_id: str | None = None, **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args} | ({"id": call_id} if call_id else {})}


def answer(name: str, output: Any, call_id: str | None = None) -> dict[str, Any]:
    response = output if isinstance(output, dict) else {"output": output}
    return {"functionResponse": {"name": name, "response": response} | ({"id": call_id} if call_id else {})}


def codes(parsed: Call) -> list[str]:
    return [finding.code for finding in parsed.findings]


def test_a_tool_turn_of_gemini_cli_is_one_assistant_message_and_its_results() -> None:
    """As recorded: the first content, invented ids, a signature that only switches a check off."""
    signed = call("run_shell_command", "run_shell_command_17_0", command="ls") | {
        "thoughtSignature": "skip_thought_signature_validator"
    }
    got = messages(
        {"parts": [{"text": "<session_context>\nx\n</session_context>"}], "role": "user"},
        user({"text": "Write it"}),
        model({"text": "\nI will.\n\n"}, signed),
        user(answer("run_shell_command", "<untrusted_context>\na.txt\n</untrusted_context>", "run_shell_command_17_0")),
        systemInstruction={"parts": [{"text": "You are an agent."}]},
    )
    assert [m["role"] for m in got] == ["system", "user", "user", "assistant", "tool"]
    assert got[3]["content"] == "\nI will.\n\n"
    (made,) = got[3]["tool_calls"]
    assert made["id"] == got[4]["tool_call_id"] == "run_shell_command_17_0"
    assert made["function"] == {"name": "run_shell_command", "arguments": '{"command":"ls"}'}
    assert got[4]["content"] == "<untrusted_context>\na.txt\n</untrusted_context>"


def test_results_follow_in_the_order_of_the_calls_by_id_and_else_by_name() -> None:
    got = messages(
        user({"text": "go"}),
        model(call("bash", "b", n=1), call("read"), call("read"), call("bash", "a", n=2)),
        user(answer("bash", "of a", "a"), answer("read", "first"), {"text": "hurry"}),
        user(answer("read", "second"), answer("bash", "of b", "b"), role="function"),
    )
    assert [m["role"] for m in got] == ["user", "assistant", "tool", "tool", "tool", "tool", "user"]
    calls = got[1]["tool_calls"]
    assert [m["content"] for m in got[2:6]] == ["of b", "first", "second", "of a"]
    assert [m["tool_call_id"] for m in got[2:6]] == [c["id"] for c in calls]
    assert len({c["id"] for c in calls}) == 4
    assert got[6]["content"] == "hurry"


def test_an_id_that_nobody_gave_still_answers_by_name() -> None:
    got = messages(user({"text": "go"}), model(call("bash", "ours")), user(answer("bash", "x", "theirs")))
    assert got[2]["tool_call_id"] == "ours"


def test_ids_made_up_for_calls_without_any_do_not_change_as_the_conversation_grows() -> None:
    first = [user({"text": "go"}), model(call("bash")), user(answer("bash", "x"))]
    short = messages(*first)
    longer = messages(*first, model(call("bash")), user(answer("bash", "y")))
    assert longer[: len(short)] == short
    assert longer[1]["tool_calls"][0]["id"] != longer[3]["tool_calls"][0]["id"]


def test_a_response_without_a_call_is_kept_and_reported() -> None:
    parsed = parse({"contents": [user({"text": "go"}), user(answer("bash", "x", "gone"))]})
    assert [m["role"] for m in parsed.messages] == ["tool", "user"]
    assert parsed.messages[0]["tool_call_id"] == "gone"
    assert codes(parsed) == ["orphan_tool_result"]


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "plain"}, "plain"),
        ({"result": "plain"}, "plain"),
        ({"name": "bash", "content": "plain"}, "plain"),
        ({"error": "no such file"}, '{"error":"no such file"}'),
        ({"output": {"a": 1}}, '{"output":{"a":1}}'),
        ({"stdout": "é", "code": 0}, '{"stdout":"é","code":0}'),
        ({}, "{}"),
        (None, ""),
    ],
)
def test_a_response_object_reads_as_its_text_or_as_json(response: Any, text: str) -> None:
    raw = {"functionResponse": {"name": "bash", "response": response, "parts": []}}
    assert messages(user({"text": "go"}), model(call("bash")), user(raw))[2]["content"] == text


def test_chunks_that_an_sdk_kept_of_a_stream_are_one_assistant_message() -> None:
    got = messages(
        user({"text": "go"}),
        model({"text": "hm", "thought": True}),
        model({"text": "I "}),
        model({"text": "look."}),
        user(call("bash", "c", x=1), role=None),  # lost its role
        model({"text": "", "thoughtSignature": "c2ln"}),
        user(answer("bash", "ok", "c")),
    )
    assert [m["role"] for m in got] == ["user", "assistant", "tool"]
    assert got[1]["content"] == "I look." and got[1]["reasoning_content"] == "hm"
    assert got[1]["tool_calls"][0]["id"] == "c"


def test_a_partial_reply_and_the_reply_that_came_when_asked_again_stay_two_messages() -> None:
    """So the second request, which ended with the partial reply, is still the beginning of the third."""
    asked_again = [user({"text": "go"}), model({"text": "Part of "})]
    before = messages(*asked_again)
    got = messages(*asked_again, model({"text": "I look."}, call("bash", "c")), user(answer("bash", "ok", "c")))
    assert got[: len(before)] == before
    assert [m["role"] for m in got] == ["user", "assistant", "assistant", "tool"]
    assert got[3]["tool_call_id"] == "c"


def test_a_content_without_a_role_is_the_users() -> None:
    assert messages(user({"text": "hi"}, role=None)) == [{"role": "user", "content": "hi"}]
    assert messages("hi") == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "system",
    ["Be brief.", {"parts": [{"text": "Be brief."}]}, {"role": "user", "parts": {"text": "Be brief."}}, ["Be brief."]],
)
@pytest.mark.parametrize("name", ["systemInstruction", "system_instruction"])
def test_the_system_instruction_comes_in_many_forms(name: str, system: Any) -> None:
    assert messages(*HI, **{name: system})[0] == {"role": "system", "content": "Be brief."}


def test_a_system_content_in_the_middle_stays_where_it_is() -> None:
    before = [user({"text": "a"}), model({"text": "b"})]
    parsed = parse({"contents": [*before, user({"text": "remember"}, role="system"), user({"text": "c"})]})
    assert [m["role"] for m in parsed.messages] == ["user", "assistant", "user", "user"]
    assert parsed.messages[2]["content"] == "<system>\nremember\n</system>"
    assert parsed.messages[:2] == messages(*before)
    assert codes(parsed) == ["system_in_place"]


def test_several_user_texts_stay_apart_and_pictures_become_data_urls() -> None:
    picture = base64.urlsafe_b64encode(b"\xfb\xff\xfe").decode()  # "-__-", an alphabet that data URLs do not know
    (got,) = messages(user({"text": "a"}, {"text": "b"}, {"inlineData": {"mimeType": "image/png", "data": picture}}))
    assert [part["type"] for part in got["content"]] == ["text", "text", "image_url"]
    assert got["content"][2]["image_url"]["url"] == "data:image/png;base64,+//+"


def test_attached_text_is_text_and_what_cannot_be_shown_says_so() -> None:
    note = {"inline_data": {"mime_type": "text/plain", "data": base64.b64encode("é".encode()).decode()}}
    pdf = {"inlineData": {"mimeType": "application/pdf", "data": "AAAA"}}
    stored = {"fileData": {"fileUri": "gs://bucket/x.png", "mimeType": "image/png"}}
    parsed = parse({"contents": [user(note, pdf, stored, {"toolResponse": {"id": "x"}}, {"text": "see"})]})
    texts = [part["text"] for part in parsed.messages[0]["content"]]
    assert texts == ["é", *["[an attachment that cannot be shown]"] * 2, "see"]
    assert codes(parsed) == ["content_omitted"] * 3
    assert "pdf" not in texts and "inlineData" in parsed.findings[0].detail


def test_code_that_google_ran_is_shown_as_text() -> None:
    ran = {"executableCode": {"language": "PYTHON", "code": "1+1"}}, {"codeExecutionResult": {"output": "2"}}
    assert messages(*HI, model(*ran), *HI)[1]["content"] == "```python\n1+1\n``````\n2\n```"


def test_a_tool_result_may_hold_a_picture() -> None:
    raw = answer("read", "see") | {}
    raw["functionResponse"]["parts"] = [{"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]
    content = messages(*HI, model(call("read")), user(raw))[2]["content"]
    assert [part["type"] for part in content] == ["text", "image_url"]


def test_snake_case_means_the_same_as_camel_case() -> None:
    camel = {
        "contents": [*HI, model(call("bash", n=1)), user(answer("bash", "x"))],
        "systemInstruction": "s",
        "tools": [{"functionDeclarations": [BASH, READ]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["bash", "read"]}},
        "generationConfig": {
            "topP": 0.5,
            "topK": 3,
            "maxOutputTokens": 9,
            "stopSequences": ["x"],
            "responseMimeType": "application/json",
            "responseSchema": {"type": "ARRAY", "maxItems": "2", "items": {"type": "STRING"}},
            "thinkingConfig": {"thinkingBudget": 0, "includeThoughts": False},
        },
    }
    one, two = parse(camel), parse(_snaked(camel))
    assert one == two
    assert one.sampling["max_tokens"] == 9
    assert codes(one) == ["thinking_asked"] and not one.context.thoughts


def _snaked(value: Any) -> Any:
    if isinstance(value, list):
        return [_snaked(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {"".join("_" + c.lower() if c.isupper() else c for c in key): _snaked(item) for key, item in value.items()}


def test_sampling_goes_under_chat_completions_names() -> None:
    config = {
        "temperature": 1,
        "topP": 0.95,
        "topK": 64.0,  # Google's Python SDK declares it as a float
        "seed": 7,
        "presencePenalty": 0.1,
        "frequencyPenalty": 0.2,
        "stopSequences": ["END", ""],
        "maxOutputTokens": 2048,
        "candidateCount": 1,
        "responseMimeType": "text/plain",
        "thinkingConfig": {"includeThoughts": True},
    }
    parsed = parse({"contents": HI, "generationConfig": config, "safetySettings": [{"category": "x"}]})
    assert parsed.sampling == {
        "temperature": 1,
        "top_p": 0.95,
        "top_k": 64,
        "seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "stop": ["END"],
        "max_tokens": 2048,
    }
    assert parsed.max_tokens == 2048 and parsed.findings == () and parsed.chat_template_kwargs == {}


def test_how_to_think_is_not_the_agents_to_decide_but_it_is_noted() -> None:
    for wish in ({"thinkingBudget": 0}, {"thinkingLevel": "HIGH"}):
        parsed = parse({"contents": HI, "generationConfig": {"thinkingConfig": wish}})
        assert codes(parsed) == ["thinking_asked"] and parsed.chat_template_kwargs == {}
        assert next(iter(wish)) in parsed.findings[0].detail


def test_a_conversation_that_ends_with_the_model_is_not_continued_in_mid_message() -> None:
    parsed = parse({"contents": [*HI, model({"text": "I was say"})]})
    assert parsed.messages[-1] == {"role": "assistant", "content": "I was say"}
    assert codes(parsed) == ["prefill_closed"]


def test_json_may_be_asked_for_with_a_schema_of_either_kind() -> None:
    asked = {"responseMimeType": "application/json"}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    ours = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}

    def form(**config: Any) -> Any:
        return parse({"contents": HI, "generationConfig": config}).sampling.get("response_format")

    assert form(**asked) == {"type": "json_object"}
    for config in ({"responseSchema": ours}, {"responseJsonSchema": schema}):
        assert form(**asked, **config) == form(**config)
        assert form(**config)["json_schema"]["schema"] == schema
    assert form() is None


def test_functions_are_offered_and_hosted_tools_are_dropped_with_a_finding() -> None:
    tools = [{"functionDeclarations": [BASH]}, {"functionDeclarations": [READ]}, {"googleSearch": {}}]
    parsed = parse({"contents": HI, "tools": tools})
    assert [t["function"]["name"] for t in parsed.tools] == ["bash", "read"]
    assert parsed.tools[0]["function"]["parameters"] == BASH["parametersJsonSchema"]
    assert parsed.tools[1]["function"] == READ | {"parameters": {"type": "object", "properties": {}}}
    assert codes(parsed) == ["tool_dropped"] and "googleSearch" in parsed.findings[0].detail


@pytest.mark.parametrize(
    ("mode", "choice"),
    [(None, None), ("AUTO", "auto"), ("auto", "auto"), ("VALIDATED", "auto"), ("NONE", "none"), ("ANY", "required")],
)
def test_the_calling_mode_is_the_tool_choice(mode: str | None, choice: Any) -> None:
    config = {"functionCallingConfig": {"mode": mode}}
    parsed = parse({"contents": HI, "tools": [{"functionDeclarations": [BASH, READ]}], "toolConfig": config})
    assert parsed.tool_choice == choice and len(parsed.tools) == 2
    assert parse({"contents": HI, "tools": [], "toolConfig": config}).tool_choice is None


def test_one_allowed_function_is_named_and_the_others_are_not_offered() -> None:
    config = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["read"]}}
    parsed = parse({"contents": HI, "tools": [{"functionDeclarations": [BASH, READ]}], "toolConfig": config})
    assert parsed.tool_choice == {"type": "function", "function": {"name": "read"}}
    assert [t["function"]["name"] for t in parsed.tools] == ["read"]
    assert codes(parsed) == ["tools_restricted"]


def test_the_path_says_the_model_and_whether_to_stream() -> None:
    plain = parse({"contents": HI}, model="models/org/name:7b")
    assert plain.model == "org/name:7b" and not plain.stream
    assert parse({"contents": HI}, "streamGenerateContent").stream
    with pytest.raises(NotFound, match="embedContent"):
        parse({"contents": HI}, "embedContent")


def test_count_tokens_takes_contents_or_a_whole_request() -> None:
    head = Head({"model": "m"}, {}, {})
    bare = Gemini().parse(head, json.dumps({"contents": HI}).encode())
    inner = {"model": "models/m", "contents": HI, "tools": [{"functionDeclarations": [BASH]}]}
    whole = Gemini().parse(head, json.dumps({"generateContentRequest": inner}).encode())
    assert bare.messages == whole.messages and len(whole.tools) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"contents": None}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": [7]}, r"contents\[0\]"),
        ({"contents": [{"role": "user", "parts": []}]}, "at least one part"),
        ({"contents": [{"role": "wizard", "parts": [{"text": "x"}]}]}, "wizard"),
        ({"contents": [{"role": ["user"], "parts": [{"text": "x"}]}]}, "role"),
        ({"contents": [{"parts": [{"text": 1}]}]}, "text must be a string"),
        ({"contents": [{"parts": [{"text": "a", "functionCall": {"name": "f"}}]}]}, "both"),
        ({"contents": [user(call("f"))]}, "role model"),
        ({"contents": [*HI, model(answer("f", "x"))]}, "role user"),
        ({"contents": [*HI, model({"functionCall": {"args": {}}})]}, "name"),
        ({"contents": [*HI, model({"functionCall": {"name": "f", "args": []}})]}, "args"),
        ({"contents": [user({"inlineData": {"mimeType": "image/png", "data": "é?"}})]}, "base64"),
        ({"contents": HI, "systemInstruction": 5}, "systemInstruction"),
        ({"contents": HI, "cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"contents": HI, "tools": ["x"]}, r"tools\[0\]"),
        ({"contents": HI, "tools": [{"functionDeclarations": [{"description": "x"}]}]}, "name"),
        ({"contents": HI, "tools": [{"functionDeclarations": [{"name": "f", "parameters": 1}]}]}, "schema"),
        (
            {
                "contents": HI,
                "tools": [{"googleSearch": {}}],
                "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
            },
            "googleSearch",
        ),
        (
            {
                "contents": HI,
                "tools": [{"functionDeclarations": [BASH]}],
                "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["rm"]}},
            },
            "rm",
        ),
        ({"contents": HI, "toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}}, "SOMETIMES"),
        ({"contents": HI, "generationConfig": "x"}, "generationConfig"),
        ({"contents": HI, "generationConfig": {"candidateCount": 3}}, "candidateCount"),
        ({"contents": HI, "generationConfig": {"candidateCount": True}}, "candidateCount"),
        ({"contents": HI, "generationConfig": {"temperature": "hot"}}, "temperature"),
        ({"contents": HI, "generationConfig": {"topK": 1.5}}, "topK"),
        ({"contents": HI, "generationConfig": {"seed": 1e30}}, "64 bits"),
        ({"contents": HI, "generationConfig": {"maxOutputTokens": 0}}, "positive"),
        ({"contents": HI, "generationConfig": {"stopSequences": [1]}}, "stopSequences"),
        ({"contents": HI, "generationConfig": {"responseMimeType": "text/x.enum"}}, "text/x.enum"),
        ({"contents": HI, "generationConfig": {"responseModalities": ["IMAGE"]}}, "IMAGE"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        parse(change)


def test_numbers_that_json_cannot_hold_and_nesting_without_end_are_refused() -> None:
    head = Head({"model": "m", "method": "generateContent"}, {}, {})
    deep = '{"type":"ARRAY","items":' * 300 + "{}" + "}" * 300
    declared = '{"contents":["x"],"tools":[{"functionDeclarations":[{"name":"f","parameters":'
    called = '{"contents":[{"role":"model","parts":[{"functionCall":{"name":"f","args":{"a":'
    for body in (
        '{"contents":["x"],"generationConfig":{"temperature":1e999}}',
        declared + deep + "}]}]}",
        called + deep + "}}}]}]}",
        "[" * 100_000,
    ):
        with pytest.raises(BadRequest):
            Gemini().parse(head, body.encode())

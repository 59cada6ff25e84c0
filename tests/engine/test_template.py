"""The demo model's chat template: what it renders, and that a re-rendered history repeats what was sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tokenizer

WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Write a file.\nA page of advice follows that a small model cannot use.",
        "parameters": {
            "$schema": "x",
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}
USER = {"role": "user", "content": "Write a poem."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(Path(path))
    return AutoTokenizer.from_pretrained(path)


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, prompt: bool = True) -> str:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
    assert isinstance(text, str)
    return text


def call(arguments: Any, name: str = "write") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def sampled_call(arguments: dict[str, Any], name: str = "write") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def test_tools_come_before_the_system_text(tokenizer: Any) -> None:
    one = render(tokenizer, [{"role": "system", "content": "Be brief."}, USER], [WRITE])
    two = render(tokenizer, [{"role": "system", "content": "Be loud."}, USER], [WRITE])
    assert one.startswith("<|im_start|>system\n<tools>\n")
    shared = one[: one.index("Be brief.")]
    assert two.startswith(shared)
    assert '"name": "write"' in shared
    assert one.endswith("<|im_start|>user\nWrite a poem.<|im_end|>\n<|im_start|>assistant\n")


def test_a_tool_is_one_line_of_json_with_the_first_line_of_its_description(tokenizer: Any) -> None:
    line = render(tokenizer, [USER], [WRITE]).split("<tools>\n")[1].splitlines()[0]
    assert json.loads(line) == {
        "name": "write",
        "description": "Write a file.",
        "parameters": {"path": {"type": "string"}},
        "required": ["path"],
    }


@pytest.mark.parametrize(
    "function",
    [{"name": "ls"}, {"name": "ls", "description": None, "parameters": None}, {"name": "ls", "parameters": {}}],
)
def test_a_tool_without_parameters_renders(tokenizer: Any, function: dict[str, Any]) -> None:
    line = render(tokenizer, [USER], [{"type": "function", "function": function}]).split("<tools>\n")[1].splitlines()[0]
    assert json.loads(line) == {"name": "ls", "description": "", "parameters": {}, "required": []}


@pytest.mark.parametrize(
    "arguments", [{"path": "a.txt"}, {}, {"path": 'say "hi"\n\té <b>&', "n": [1, 2.5, None, True]}]
)
@pytest.mark.parametrize("before", ["", "I will write.\n", "I will write. "])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_history_extends_what_was_sampled(
    tokenizer: Any, arguments: dict[str, Any], before: str, as_text: bool
) -> None:
    first = render(tokenizer, [USER], [WRITE])
    sampled = f"{before}{sampled_call(arguments)}<|im_end|>"
    given = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    reply = {"role": "assistant", "content": before or None, "tool_calls": [call(given)]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "wrote it"}
    later = render(tokenizer, [USER, reply, result], [WRITE])
    assert later.startswith(first + sampled)
    assert later.removeprefix(first + sampled) == (
        "\n<|im_start|>user\n<tool_response>\nwrote it\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    ids = (
        tokenizer(first, add_special_tokens=False)["input_ids"]
        + tokenizer(sampled, add_special_tokens=False)["input_ids"]
    )
    assert tokenizer(later, add_special_tokens=False)["input_ids"][: len(ids)] == ids


def test_parallel_calls_and_their_results_share_one_turn_each(tokenizer: Any) -> None:
    reply = {"role": "assistant", "content": "", "tool_calls": [call({"path": "a"}), call({"path": "b"})]}
    results = [{"role": "tool", "tool_call_id": "c1", "content": text} for text in ("one", "two")]
    text = render(tokenizer, [USER, reply, *results], [WRITE])
    assert f"assistant\n{sampled_call({'path': 'a'})}\n{sampled_call({'path': 'b'})}<|im_end|>\n" in text
    assert (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        in text
    )


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_in_the_middle_stays_in_its_place(tokenizer: Any, role: str) -> None:
    first = render(tokenizer, [USER, {"role": "assistant", "content": "Done."}], prompt=False)
    later = render(tokenizer, [USER, {"role": "assistant", "content": "Done."}, {"role": role, "content": "Stop."}])
    assert later == first + "<|im_start|>system\nStop.<|im_end|>\n<|im_start|>assistant\n"


def test_content_in_parts_is_its_text(tokenizer: Any) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Write a "}, {"type": "text", "text": "poem."}]}
    assert render(tokenizer, [parts]) == render(tokenizer, [USER])


def test_without_system_and_tools_there_is_no_system_turn(tokenizer: Any) -> None:
    assert render(tokenizer, [USER]) == "<|im_start|>user\nWrite a poem.<|im_end|>\n<|im_start|>assistant\n"


def test_an_empty_reply_is_an_empty_turn(tokenizer: Any) -> None:
    text = render(tokenizer, [USER, {"role": "assistant", "content": None}, USER])
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\n" in text

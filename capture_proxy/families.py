"""Model families: how the library `renderers` continues a prompt and reads a reply, for one tokenizer.

Owns choosing a family (by name, or by whose rendering equals the engine's own, id for id), and what the
library leaves to its callers: names on tool results, the header a prompt ends with, special tokens that a tokenizer
calls otherwise. Everything here blocks (imports take seconds): `rendering` calls it in a thread of its own.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from capture_proxy.engines.base import Example, TextSplitter
from capture_proxy.engines.splitter import THINK, splitter_for
from capture_proxy.errors import FamilyError
from capture_proxy.history import Match
from capture_proxy.types import Finding, Severity

NAMES = ("auto", "none", "qwen3", "gpt_oss", "deepseek_v3", "llama_3")  # and every other name the library knows
# Enough of a prompt to hold its generation header; the library's bridges copy and scan all that they are given.
_TAIL = 256
EXAMPLE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
ROOT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a pond?"}]


class Family:
    """One renderer of the library with its tokenizer. Not thread-safe: one thread uses it."""

    def __init__(self, name: str, tokenizer: Any, thinking_retention: str | None) -> None:
        """`name` as the library has it, e.g. "gpt-oss". Raises FamilyError when the tokenizer does not fit."""
        self.name = name
        if name == "llama-3":
            tokenizer = _with_eom(tokenizer)
        self.tokenizer = tokenizer
        self._thinking_retention = thinking_retention
        self._by_kwargs: dict[str, Any] = {}
        self._renderer = self._for_kwargs({})
        stops = list(self._renderer.get_stop_token_ids())
        self.stop_ids = frozenset(stops)
        self.end_id: int = stops[0]  # what the family ends a reply with
        # Ids that the library ends a generation prompt with and an engine may leave to the model.
        self.optional_tail: list[int] = []
        if name == "gpt-oss":
            self.optional_tail = list(tokenizer.encode("<|channel|>analysis<|message|>", add_special_tokens=False))

    def extend(self, match: Match, tools: list[dict[str, Any]], kwargs: dict[str, Any]) -> list[int]:
        """The ids that follow the recorded reply, up to where the next reply begins.

        The recorded prompt and reply stay as they are: what the template would put between (an end token that was not
        sampled, a newline) is part of what follows. Raises FamilyError where the family cannot continue.
        """
        head, body = self._split_header(match.prompt_ids_P[-_TAIL:])
        completion = body + match.completion_ids_T
        messages = _named(match)
        try:
            bridged = self._for_kwargs(kwargs).bridge_to_next_turn(head, completion, messages, tools=tools or None)
        except FamilyError:
            raise
        except Exception as error:  # templates in code raise what they like; the engine may still render it
            raise FamilyError(f"{self.name} cannot render the new messages: {error}") from error
        if bridged is None:
            raise FamilyError(f"{self.name} does not continue this reply with {_roles(messages)}")
        before = head + completion
        ids = list(bridged.token_ids)
        if ids[: len(before)] != before or len(ids) == len(before):
            raise FamilyError(f"{self.name} would not keep the sampled tokens")
        return ids[len(before) :]

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], kwargs: dict[str, Any]) -> list[int]:
        """The prompt's ids as the library has them. Raises FamilyError."""
        try:
            ids = self._for_kwargs(kwargs).render_ids(messages, tools=tools or None, add_generation_prompt=True)
        except FamilyError:
            raise
        except Exception as error:
            raise FamilyError(f"{self.name} cannot render the request: {error}") from error
        return list(ids)

    def closes(self, completion_ids: Sequence[int]) -> bool:
        """Whether the reply ended itself, so that a template would add nothing to close it."""
        return bool(completion_ids) and completion_ids[-1] in self.stop_ids

    def read(
        self, prompt_ids: list[int], completion_ids: list[int], tools: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[Finding]]:
        """The reply as a chat message, and what of it could not be read. Calls have ids and JSON arguments.

        Raises FamilyError.
        """
        prompt, header = self._split_header(prompt_ids[-_TAIL:])
        try:
            parsed = self._renderer.parse_response(header + completion_ids, tools=tools or None, prompt_ids=prompt)
        except Exception as error:  # a weak model's output must not end the rollout
            raise FamilyError(f"{self.name} cannot read the reply: {type(error).__name__}: {error}") from error
        calls, broken = [], []
        for call in parsed.tool_calls:
            arguments = _arguments(call.arguments)
            if str(call.status) == "ok" and call.name and arguments is not None:
                function = {"name": call.name, "arguments": arguments}
                calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
            else:
                broken.append(call)
        content = parsed.content
        findings = []
        if calls and not tools:  # to an agent that offered none a call would be an error of the protocol
            broken, calls = list(parsed.tool_calls), []
        if broken:
            kind = "broken" if tools else "to no tool that was offered"
            detail = f"{len(broken)} of {len(parsed.tool_calls)} calls are {kind}: {broken[0].raw[:80]!r}"
            findings.append(Finding(Severity.WARN, "tool_call_dropped", detail))
            if not calls:  # the agent may make something of it; an empty reply would only confuse it
                content = (content + "\n" if content else "") + "\n".join(call.raw for call in broken)
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if parsed.reasoning_content and parsed.reasoning_content.strip():
            message["reasoning_content"] = parsed.reasoning_content.strip()
        if calls:
            message["tool_calls"] = calls
        return message, findings

    def splitter(self, prompt_ids: list[int]) -> TextSplitter:
        """What may be streamed of the reply that `read` will read."""
        tail = self.tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False)
        return splitter_for(self.name, opened=tail.rstrip().endswith(THINK))

    def example(self) -> Example:
        """A reply with one tool call in this family's form. Raises FamilyError."""
        name, arguments = "look_up", {"word": "pond"}
        call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
        reply = {"role": "assistant", "content": None, "tool_calls": [call]}
        prompt = self._for_kwargs({}).render_ids(ROOT, tools=[EXAMPLE_TOOL], add_generation_prompt=False)
        whole = self._for_kwargs({}).render_ids([*ROOT, reply], tools=[EXAMPLE_TOOL], add_generation_prompt=False)
        header = self.render(ROOT, [EXAMPLE_TOOL], {})[len(prompt) :]
        tail = whole[len(prompt) :]
        while header and tail[: len(header)] != header:
            header.pop()
        end = next((i for i in range(len(tail) - 1, -1, -1) if tail[i] in self.stop_ids), len(tail))
        said = tail[len(header) : end]
        plain = self.name != "gpt-oss"
        return Example(prompt + header, said, list(ROOT), [EXAMPLE_TOOL], (name, arguments), plain)

    def _split_header(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """(the prompt, the header of the reply that it ends with): harmony is read from the header on."""
        if self.name != "gpt-oss":
            return prompt, []
        start = self.tokenizer.convert_tokens_to_ids("<|start|>")
        at = next((i for i in range(len(prompt) - 1, -1, -1) if prompt[i] == start), len(prompt))
        return (prompt[:at], prompt[at:]) if at else (prompt, [])

    def _for_kwargs(self, kwargs: dict[str, Any]) -> Any:
        key = json.dumps(kwargs, sort_keys=True, default=str)
        if (known := self._by_kwargs.get(key)) is None:
            from renderers.base import create_renderer  # type: ignore[import-untyped, unused-ignore]
            from renderers.configs import _config_class_for  # type: ignore[import-untyped, unused-ignore]

            try:
                config = _config_class_for(self.name)(thinking_retention=self._thinking_retention)
                with harmony_vocabulary(self.tokenizer if self.name == "gpt-oss" else None):
                    known = create_renderer(self.tokenizer, config, chat_template_kwargs=kwargs)
            # The library asserts that its special tokens exist; harmony's loader raises errors of its own.
            except Exception as error:
                raise FamilyError(f"{self.name}: {error or type(error).__name__}") from error
            if len(self._by_kwargs) < 64:  # kwargs come from agents
                self._by_kwargs[key] = known
        return known


def load(
    name: str, folder: Path, thinking_retention: str | None, engine_ids: Sequence[Sequence[int]] | None = None
) -> Family:
    """The family called `name` for the tokenizer in a folder. Takes about a second. Raises FamilyError.

    "auto" is the first family that renders the messages ROOT as the engine does: `engine_ids` are its renderings
    without tools and with EXAMPLE_TOOL.
    """
    from renderers.base import (  # type: ignore[import-untyped, unused-ignore]
        RENDERER_REGISTRY,
        _populate_registry,
    )

    tokenizer = _load_tokenizer(folder)
    _populate_registry()
    known = sorted(n for n in RENDERER_REGISTRY if n != "default")
    wanted = name.replace("_", "-")
    if name == "auto":
        names = [n for n in RENDERER_REGISTRY if n in known]
        family = _detect(tokenizer, names, thinking_retention, engine_ids or [])
    elif wanted in known:
        family = Family(wanted, tokenizer, thinking_retention)
    else:
        raise FamilyError(f"no renderer is called {name!r}: choose auto, none or one of {', '.join(known)}")
    _give_memory_back()
    return family


def _give_memory_back() -> None:
    """Reading a large tokenizer takes 50 to 90 MB that glibc would keep for the process's life."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and macOS have none, and keep less
    if trim is not None:
        trim(0)


def _detect(
    tokenizer: Any, names: list[str], thinking_retention: str | None, engine_ids: Sequence[Sequence[int]]
) -> Family:
    for name in names:
        try:
            family = Family(name, tokenizer, thinking_retention)
            ours = [family.render(ROOT, tools, {}) for tools in ([], [EXAMPLE_TOOL])]
        except FamilyError:
            continue
        cut = len(family.optional_tail)
        if any([ids[: len(ids) - n] for ids in ours] == [list(ids) for ids in engine_ids] for n in {0, cut}):
            return family
    raise FamilyError("no known family renders as the engine does: its prompts are rendered anew each time")


def _named(match: Match) -> list[dict[str, Any]]:
    """The new messages with content that is never null, and the function's name on each tool result."""
    unanswered = list(match.calls.values())
    named = []
    for message in match.new_messages:
        message = {**message, "content": message.get("content") or ""}
        if message.get("role") == "tool":
            name = match.calls.get(message.get("tool_call_id") or "") or message.get("name")
            name = name or (unanswered[0] if unanswered else None)
            if name in unanswered:
                unanswered.remove(name)
            if name:
                message["name"] = name
        named.append(message)
    return named


def _roles(messages: list[dict[str, Any]]) -> str:
    return " and ".join(dict.fromkeys(f"a {m.get('role')} message" for m in messages))


def _arguments(raw: Any) -> str | None:
    """Arguments as JSON text; None when they are not a JSON object."""
    if isinstance(raw, str):
        try:
            raw, text = json.loads(raw), raw
        except ValueError:
            return None
        return text if isinstance(raw, dict) else None
    return json.dumps(raw, ensure_ascii=False) if isinstance(raw, dict) else ("{}" if raw is None else None)


class _Tokenizer:
    """What the renderers need of a tokenizer, without transformers (and with it torch) in the gateway's process."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.name_or_path = str(folder)
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Any, *args: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items()}


def _load_tokenizer(folder: Path) -> Any:
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise FamilyError(f"there is no tokenizer in {folder}: give --tokenizer the folder of tokenizer.json")
    try:
        if (folder / "tokenizer.json").is_file():
            return _Tokenizer(folder)
        from renderers.base import load_tokenizer  # type: ignore[import-untyped, unused-ignore]

        return load_tokenizer(str(folder))
    except Exception as error:  # anything that a tokenizer's files may raise
        raise FamilyError(f"the tokenizer in {folder} does not load: {str(error).splitlines()[0]}") from error


class _Aliased:
    """A tokenizer under another name for one special token."""

    def __init__(self, tokenizer: Any, alias: str, token_id: int) -> None:
        self._tokenizer, self._alias, self._token_id = tokenizer, alias, token_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._token_id if tokens == self._alias else self._tokenizer.convert_tokens_to_ids(tokens)


def _with_eom(tokenizer: Any) -> Any:
    """Copies of Llama 3's tokenizer that still call <|eom_id|> reserved get by with <|eot_id|>: both end a turn."""
    vocabulary = tokenizer.get_vocab()
    if "<|eom_id|>" in vocabulary or "<|eot_id|>" not in vocabulary:
        return tokenizer
    return _Aliased(tokenizer, "<|eom_id|>", vocabulary["<|eot_id|>"])


@contextmanager
def harmony_vocabulary(tokenizer: Any | None) -> Iterator[None]:
    """Lets harmony's encoder load without the network: its vocabulary is written out from the tokenizer itself.

    The encoder checks the file by its hash, so a tokenizer with other ids is refused by it.
    """
    if tokenizer is None or os.environ.get("TIKTOKEN_ENCODINGS_BASE"):
        yield
        return
    special = set(tokenizer.get_added_vocab())
    byte_of = _byte_level()
    rows = sorted(
        (token_id, bytes(byte_of[c] for c in token))
        for token, token_id in tokenizer.get_vocab().items()
        if token not in special
    )
    lines = (base64.b64encode(data) + b" %d\n" % token_id for token_id, data in rows)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "o200k_base.tiktoken").write_bytes(b"".join(lines))
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
        try:
            yield
        finally:
            del os.environ["TIKTOKEN_ENCODINGS_BASE"]


def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level BPE vocabulary stands for (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {
        chr(c): b for b, c in [*zip(printable, printable, strict=True), *((b, 256 + i) for i, b in enumerate(rest))]
    }

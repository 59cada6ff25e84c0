"""The messages of an Anthropic request as chat-completions messages.

Owns content blocks: which become text, reasoning, tool calls, tool results or images, and which the model never sees
(each with a finding). It does not own the other fields of a request nor replies (`anthropic`). Block formats:
the types of the official SDK (`anthropic.types.beta`). Called by `anthropic`.

Everything here works message by message and in place, so a history that only grows is rendered as one that only grows.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import orjson

from capture_proxy.dialects.body import settle_system
from capture_proxy.errors import BadRequest
from capture_proxy.types import Finding, Severity

_SEPARATOR = "\n\n"  # between the text blocks of one user, system or tool text
# Claude Code's attribution line: `key=value;` pairs that change from request to request, which would make every
# prompt of a session differ near its start.
_ATTRIBUTION = re.compile(
    r"\s*x-anthropic-billing-header:(?P<pairs>(?:[ \t]*[\w.-]+=(?:[^;\n]{0,200};|\S*))*)[ \t]*", re.IGNORECASE
)
_SIGNATURE_MARK = b"ht1"  # three bytes, so that base64 keeps them apart from the digest
_UNSEEN = frozenset({"fallback", "mcp_tool_listing", "tool_addition", "tool_removal"})  # no text for the model


def read_messages(system: Any, messages: Any) -> tuple[list[dict[str, Any]], list[Finding]]:
    """The `system` and `messages` of a request, system text settled where strict templates take it.

    Raises BadRequest naming the block that is wrong, e.g. "messages.2.content.0: ...".
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: must be a non-empty list")
    found: list[Finding] = []
    out = _system(system, "system", found)
    pending: list[str] = []  # ids of the last assistant message's tool calls, in its order
    for i, raw in enumerate(messages):
        where = f"messages.{i}"
        if not isinstance(raw, dict):
            raise BadRequest(f"{where}: must be an object")
        role, content = raw.get("role"), raw.get("content")
        if role == "system":
            out += _system(content, f"{where}.content", found)
        elif role == "user":
            if content is None:
                raise BadRequest(f"{where}.content: field required")
            out += _user(content, f"{where}.content", pending, found)
        elif role == "assistant":
            spoken = _assistant(content, f"{where}.content", found)
            pending = [call["id"] for message in spoken for call in message.get("tool_calls", ())]
            out += spoken
        else:
            raise BadRequest(f"{where}.role: must be user, assistant or system, not {role!r}")
    if messages[-1]["role"] == "assistant":
        # Agents end a retry with what they received of a broken reply, and keep it as a message of its own.
        detail = "the last message is the assistant's: the model begins a new message after it, it does not continue it"
        found.append(Finding(Severity.INFO, "prefill_closed", detail))
    settled, moved = settle_system(out)
    return settled, [*dict.fromkeys(found), *moved]


def strip_attribution(text: str) -> str:
    """A system text without the attribution line it begins with; any other text is returned as it is."""
    end = 0
    while match := _ATTRIBUTION.match(text, end):
        end = match.end()
        if not match["pairs"]:  # a form of the line we have not seen: it ends where the line does
            newline = text.find("\n", end)
            end = newline if newline >= 0 else len(text)
    return text[end:].lstrip("\r\n") if end else text


def signature(thinking: str) -> str:
    """The opaque `signature` of a thinking block of ours. It proves nothing: an echo's text is what counts."""
    digest = hashlib.blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=24).digest()
    return base64.b64encode(_SIGNATURE_MARK + digest).decode()


def _system(raw: Any, where: str, found: list[Finding]) -> list[dict[str, Any]]:
    texts = []
    for block, at in _blocks(raw, where):
        text = _text(block, at)
        kept = strip_attribution(text)
        if kept != text:
            detail = f"{where}: the x-anthropic-billing-header line was left out of the prompt"
            found.append(Finding(Severity.INFO, "attribution_removed", detail))
        texts.append(kept)
    joined = _SEPARATOR.join(filter(None, texts))
    return [{"role": "system", "content": joined}] if joined else []


def _user(raw: Any, where: str, pending: list[str], found: list[Finding]) -> list[dict[str, Any]]:
    """Tool results first, one message each in the order of the calls they answer, then whatever stands beside them."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block, at in _blocks(raw, where):
        if block["type"] == "tool_result" or block["type"].endswith("_tool_result"):
            results.append(_tool_result(block, at, found))
        else:
            parts += _parts(block, at, found)
    order = {call_id: k for k, call_id in enumerate(pending)}
    results.sort(key=lambda message: order.get(message["tool_call_id"], len(order)))
    if parts or not results:
        results.append({"role": "user", "content": _joined(parts)})
    return results


def _assistant(raw: Any, where: str, found: list[Finding]) -> list[dict[str, Any]]:
    """One message, or several around the results of tools that another provider's server ran in between."""
    out: list[dict[str, Any]] = []
    draft = _Draft()
    for block, at in _blocks(raw, where):
        kind = block["type"]
        if kind == "thinking":
            draft.reasoning.append(_thinking(block, at, found))
        elif kind == "redacted_thinking":
            detail = f"{at}: encrypted thinking that the model cannot read was left out"
            found.append(Finding(Severity.INFO, "redacted_thinking", detail))
        elif kind == "tool_use" or kind.endswith("_tool_use"):
            draft.calls.append(_tool_call(block, at))
        elif kind.endswith("_tool_result"):
            out += [] if draft.empty else [draft.message()]
            out.append(_tool_result(block, at, found))
            draft = _Draft()
        else:
            draft.texts += [_only_text(part, at) for part in _parts(block, at, found)]
    return out if out and draft.empty else [*out, draft.message()]


class _Draft:
    """What has been read of one assistant message."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []

    @property
    def empty(self) -> bool:
        return not (self.texts or self.reasoning or self.calls)

    def message(self) -> dict[str, Any]:
        # Without a separator: a reply of one text may come back cut in several blocks.
        text, reasoning = "".join(self.texts), "".join(self.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if self.calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _thinking(block: dict[str, Any], where: str, found: list[Finding]) -> str:
    text, mark = block.get("thinking"), block.get("signature")
    if not isinstance(text, str):
        raise BadRequest(f"{where}.thinking: must be a string")
    ours = isinstance(mark, str) and mark.startswith(base64.b64encode(_SIGNATURE_MARK).decode())
    if ours and mark != signature(text):
        detail = f"{where}: the thinking is not the one that was signed; it is taken as sent"
        found.append(Finding(Severity.INFO, "thinking_rewritten", detail))
    return text


def _tool_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, call_id, arguments = block.get("name"), block.get("id"), block.get("input")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name: must be a non-empty string")
    if not isinstance(call_id, str):
        raise BadRequest(f"{where}.id: must be a string")
    text = "{}" if arguments is None else dump(arguments, f"{where}.input")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _tool_result(block: dict[str, Any], where: str, found: list[Finding]) -> dict[str, Any]:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise BadRequest(f"{where}.tool_use_id: must be a string")
    raw = block.get("content")
    if block["type"] not in ("tool_result", "mcp_tool_result"):
        # The result of a provider's own tool has a form of its own; as JSON the model sees all of it.
        content: Any = raw if isinstance(raw, str) else dump(raw, f"{where}.content")
    else:
        parts = [part for item, at in _blocks(raw, f"{where}.content") for part in _parts(item, at, found)]
        content = _joined(parts)
    if block.get("is_error") is True:
        content = _as_error(content)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _as_error(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Chat messages have no error flag, so a result that does not call itself an error is told to be one."""
    if isinstance(content, list):
        return [{"type": "text", "text": "Error:"}, *content]
    return content if content.lstrip().lower().startswith("error") else f"Error: {content}".rstrip()


def _parts(block: dict[str, Any], where: str, found: list[Finding]) -> list[dict[str, Any]]:
    """A block as chat content parts; [] for one that has nothing for the model."""
    kind = block["type"]
    if kind == "text":
        return [_part(_text(block, where))]
    if kind == "image":
        return [_image(block.get("source"), where, found)]
    if kind == "document":
        return _document(block, where, found)
    if kind == "search_result":
        texts = [_text(item, at) for item, at in _blocks(block.get("content"), f"{where}.content")]
        heads = [str(block[key]) for key in ("title", "source") if block.get(key)]
        return [_part("\n".join([*heads, *texts]))]
    if kind == "tool_reference":
        return [_part(f"Tool: {block.get('tool_name')}")]
    if kind == "compaction":
        return [_part(block["content"])] if isinstance(block.get("content"), str) else []
    if kind == "container_upload":
        return [_omitted(f"file {block.get('file_id')}", where, found)]
    if kind in _UNSEEN:
        found.append(Finding(Severity.INFO, "block_dropped", f"{where}: a {kind} block has no text for the model"))
        return []
    if isinstance(block.get("text"), str):
        return [_part(block["text"])]
    raise BadRequest(f"{where}.type: {kind!r} is not supported here")


def _image(source: Any, where: str, found: list[Finding]) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise BadRequest(f"{where}.source: must be an object")
    kind = source.get("type")
    if kind == "base64" and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type') or 'image/png'};base64,{source['data']}"
    elif kind == "url" and isinstance(source.get("url"), str):
        url = source["url"]
    elif kind == "file":
        return _omitted(f"image {source.get('file_id')}", where, found)
    else:
        raise BadRequest(f"{where}.source: must be base64 data, a url or a file")
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: dict[str, Any], where: str, found: list[Finding]) -> list[dict[str, Any]]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise BadRequest(f"{where}.source: must be an object")
    heads = [_part(str(block[key])) for key in ("title", "context") if block.get(key)]
    kind, data = source.get("type"), source.get("data")
    if kind == "text" and isinstance(data, str):
        return [*heads, _part(data)]
    if kind == "content":
        items = _blocks(source.get("content"), f"{where}.source.content")
        return [*heads, *(part for item, at in items for part in _parts(item, at, found))]
    if kind in ("base64", "url", "file"):
        what = source.get("url") or source.get("file_id") or source.get("media_type") or "document"
        return [*heads, _omitted(f"document {what}", where, found)]
    raise BadRequest(f"{where}.source.type: must be text, content, base64, url or file, not {kind!r}")


def _omitted(what: str, where: str, found: list[Finding]) -> dict[str, Any]:
    """Stands for what no chat engine can read, so that the model knows that something was there."""
    found.append(Finding(Severity.WARN, "content_omitted", f"{where}: {what} cannot be shown to the model"))
    return _part(f"[{what} omitted]")


def _blocks(raw: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(block, where it is) of content that may be missing, a string, or a list."""
    if raw is None:
        return
    if isinstance(raw, str):
        yield {"type": "text", "text": raw}, where
        return
    if not isinstance(raw, list):
        raise BadRequest(f"{where}: must be a string or a list of blocks")
    for i, block in enumerate(raw):
        if isinstance(block, str):
            block = {"type": "text", "text": block}
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise BadRequest(f"{where}.{i}: must be an object with a type")
        yield block, f"{where}.{i}"


def _text(block: dict[str, Any], where: str) -> str:
    text = block.get("text")
    if block["type"] != "text" or not isinstance(text, str):
        raise BadRequest(f"{where}: must be a text block with a text")
    return text


def _only_text(part: dict[str, Any], where: str) -> str:
    if part["type"] != "text":
        raise BadRequest(f"{where}: an assistant message cannot hold an image")
    return str(part["text"])


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Text alone as one string, so that a list of one block renders as the string that it may become later."""
    if all(part["type"] == "text" for part in parts):
        return _SEPARATOR.join(part["text"] for part in parts if part["text"])
    return parts


def dump(value: Any, where: str) -> str:
    """JSON text of a part of a request. Raises BadRequest when it is nested too deeply to be written again."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        raise BadRequest(f"{where}: is nested too deeply") from None

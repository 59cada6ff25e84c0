"""Gemini's `contents` as chat messages.

Owns roles, parts, and which function response answers which call. Pure; it changes no text. Called by `gemini_request`.

A conversation that only grows stays one that only grows: nothing here depends on what comes after the next model turn.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import orjson

from capture_proxy.dialects.gemini_schema import field
from capture_proxy.errors import BadRequest
from capture_proxy.types import Finding, Severity

_ROLES = {"user": "user", "model": "assistant", "function": "user", "tool": "user", "system": "system"}
# The one field of a part that holds its data; https://ai.google.dev/api/caching#Part
_DATA = (
    "text",
    "functionCall",
    "functionResponse",
    "inlineData",
    "fileData",
    "executableCode",
    "codeExecutionResult",
    "toolCall",
    "toolResponse",
)
_MEDIA = {"image": "image_url", "audio": "audio_url", "video": "video_url"}
_TEXTUAL = {"application/json", "application/xml", "application/x-yaml"}


class Conversation:
    """Collects contents one by one; `close` gives the messages.

    Several model contents in a row are one assistant message: SDKs keep each streamed chunk as a content of its own. A
    content that holds more than one kind of part was no chunk of ours, so it begins a message: agents that asked again
    after a broken reply send what they got of it and the new reply as two.

    Of what is said between two model contents, function responses come first, in the order of the calls they answer.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._messages: list[dict[str, Any]] = []
        self._results: list[tuple[int, dict[str, Any]]] = []  # (position of the call, tool message)
        self._said: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []  # of the last assistant message
        self._answered: set[int] = set()  # positions in `_calls`
        self._num_calls = 0

    def add(self, raw: Any, where: str) -> None:
        """Raises BadRequest."""
        parts = read_parts(raw, where)
        role = _role(raw, parts, where)
        if role == "assistant":
            self._model(parts, where)
            return
        said: list[dict[str, Any]] = []
        for kind, part, place in parts:
            if kind == "functionCall":
                raise BadRequest(f"{place}: a functionCall belongs in a content of role model")
            if kind == "functionResponse":
                self._response(part, place)
            else:
                said += self._shown(kind, part, place)
        if said:
            self._said.append({"role": role, "content": text_of(said) if role == "system" else _content(said)})

    def close(self) -> list[dict[str, Any]]:
        self._flush()
        if self._messages and self._messages[-1]["role"] == "assistant":
            detail = "the last content is the model's: a new message begins after it, it is not continued"
            self._note(Severity.INFO, "prefill_closed", detail)
        for message in self._messages:
            if message["role"] == "assistant":
                message["content"] = message["content"] or (None if "tool_calls" in message else "")
        return self._messages

    def _flush(self) -> None:
        if not self._results and not self._said:
            return
        self._messages += [message for _, message in sorted(self._results, key=lambda result: result[0])]
        self._messages += self._said
        self._results, self._said, self._calls, self._answered = [], [], [], set()

    def _model(self, parts: list[tuple[str, dict[str, Any], str]], where: str) -> None:
        self._flush()
        if not parts:
            return
        kinds = {"thought" if part.get("thought") is True else kind for kind, part, _ in parts}
        if not self._messages or self._messages[-1]["role"] != "assistant" or len(kinds) > 1:
            self._messages.append({"role": "assistant", "content": None})
            self._calls, self._answered = [], set()
        message = self._messages[-1]
        for kind, part, place in parts:
            if kind == "functionResponse":
                raise BadRequest(f"{place}: a functionResponse belongs in a content of role user")
            if kind == "functionCall":
                call = _call(part, place, self._num_calls)
                self._num_calls += 1
                self._calls.append(call)
                message.setdefault("tool_calls", []).append(call)
                continue
            shown = self._shown(kind, part, place)
            if any(item["type"] != "text" for item in shown):
                self._note(
                    Severity.WARN, "content_omitted", f"{place}: {kind} of the model's own cannot be shown to it"
                )
            text = text_of(shown)
            key = "reasoning_content" if part.get("thought") is True else "content"
            if text:
                message[key] = (message.get(key) or "") + text

    def _response(self, part: dict[str, Any], where: str) -> None:
        """A function response answers the call with its id, else the first open call of its name."""
        raw = field(part, "functionResponse")
        call_id, name = raw.get("id"), raw.get("name")
        unanswered = [i for i in range(len(self._calls)) if i not in self._answered]
        position = next((i for i in unanswered if call_id and self._calls[i]["id"] == call_id), None)
        if position is None:
            position = next((i for i in unanswered if self._calls[i]["function"]["name"] == name), None)
        message: dict[str, Any] = {"role": "tool", "content": self._result(raw, where)}
        if isinstance(name, str):
            message["name"] = name
        if position is None:
            self._note(Severity.WARN, "orphan_tool_result", f"{where} answers no open call (name {name!r})")
            message["tool_call_id"] = call_id if isinstance(call_id, str) else ""
            position = len(self._calls)
        else:
            self._answered.add(position)
            message["tool_call_id"] = self._calls[position]["id"]
        self._results.append((position, message))

    def _result(self, raw: dict[str, Any], where: str) -> str | list[dict[str, Any]]:
        text = response_text(raw.get("response"), where)
        media: list[dict[str, Any]] = []
        for kind, part, place in read_parts({"parts": raw.get("parts") or []}, where):
            media += self._shown(kind, part, place)
        return [{"type": "text", "text": text}, *media] if media else text

    def _shown(self, kind: str, part: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """What the model is shown of a part, as chat content parts."""
        value: Any = field(part, kind) if kind else None
        if kind == "text":
            return [{"type": "text", "text": value}] if value else []
        if kind == "inlineData":
            shown = _inline(value, where)
        elif kind == "fileData":
            shown = _file(value)
        elif kind == "executableCode":
            language = str(value.get("language") or "").lower()
            return _text(f"```{language}\n{value.get('code') or ''}\n```")
        elif kind == "codeExecutionResult":
            return _text(f"```\n{value.get('output') or ''}\n```")
        else:
            shown = None
        if shown is None:
            what = kind or f"a part of {', '.join(sorted(part)) or 'nothing'}"
            self._note(Severity.WARN, "content_omitted", f"{where}: {what} cannot be shown to the model")
            return _text("[an attachment that cannot be shown]") if kind in ("inlineData", "fileData") else []
        return [shown]

    def _note(self, severity: Severity, code: str, detail: str) -> None:
        self.findings.append(Finding(severity, code, detail))


def read_parts(raw: Any, where: str) -> list[tuple[str, dict[str, Any], str]]:
    """(data field, part, place) of each part; "" as data field where there is none that we know. Raises BadRequest.

    Parts that hold nothing but a signature or an empty text are left out: they are how the API ends a stream.
    """
    if isinstance(raw, str):
        raw = {"parts": [raw]}
    if not isinstance(raw, dict):
        raise BadRequest(f"{where} must be an object")
    parts = raw.get("parts")
    if parts is None and isinstance(raw.get("text"), str):
        parts = [{"text": raw["text"]}]
    parts = [parts] if isinstance(parts, str | dict) else [] if parts is None else parts
    if not isinstance(parts, list):
        raise BadRequest(f"{where}.parts must be a list")
    read = []
    for i, part in enumerate(parts):
        place = f"{where}.parts[{i}]"
        if isinstance(part, str):
            part = {"text": part}
        if not isinstance(part, dict):
            raise BadRequest(f"{place} must be an object")
        kinds = [name for name in _DATA if field(part, name) not in (None, "")]
        if len(kinds) > 1:
            raise BadRequest(f"{place} has both {kinds[0]} and {kinds[1]}: a part holds one of them")
        if kinds:
            _check(kinds[0], field(part, kinds[0]), place)
            read.append((kinds[0], part, place))
        elif part.keys() - {"text", "thought", "thoughtSignature", "thought_signature"}:
            read.append(("", part, place))
    return read


def text_of(parts: list[dict[str, Any]]) -> str:
    """The texts of chat content parts, put together as they stand."""
    return "".join(part.get("text", "") for part in parts)


def response_text(response: Any, where: str) -> str:
    """A function's response as the model reads it: its text where it is one text, else compact JSON.

    The API's own rule is that "output" holds the output; SDKs also write "result" or "content".
    """
    if isinstance(response, str):
        return response
    if response is None:
        return ""
    if isinstance(response, dict):
        said = {key: value for key, value in response.items() if key != "name"}
        key, value = next(iter(said.items()), ("", None))
        if len(said) == 1 and key in ("output", "result", "content") and isinstance(value, str):
            return value
    return dump(response, f"{where}.response")


def dump(value: Any, where: str) -> str:
    """Compact JSON. Raises BadRequest for what is nested too deep to be written again."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"{where} cannot be written as JSON: {error}") from None


def _role(raw: Any, parts: list[tuple[str, dict[str, Any], str]], where: str) -> str:
    role = raw.get("role") if isinstance(raw, dict) else None
    if role is None or role == "":
        # The API's default is the user, but chunks that an SDK kept of a stream may have lost their role.
        by_model = any(kind == "functionCall" or part.get("thought") is True for kind, part, _ in parts)
        return "assistant" if by_model else "user"
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{where}.role must be user, model or function, not {role!r}")
    return _ROLES[role]


def _check(kind: str, value: Any, where: str) -> None:
    wanted: type = str if kind == "text" else dict
    if not isinstance(value, wanted):
        raise BadRequest(f"{where}.{kind} must be {'a string' if wanted is str else 'an object'}")


def _call(part: dict[str, Any], where: str, number: int) -> dict[str, Any]:
    """A function call; one that came without an id gets one by its place, the same in every later request."""
    raw: dict[str, Any] = field(part, "functionCall")
    name, args, call_id = raw.get("name"), raw.get("args"), raw.get("id")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.functionCall must have a name")
    if args is not None and not isinstance(args, dict):
        raise BadRequest(f"{where}.functionCall.args must be an object")
    if not isinstance(call_id, str) or not call_id:
        call_id = f"call_{number}"
    arguments = dump(args or {}, f"{where}.functionCall.args")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _inline(value: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    mime, data = field(value, "mimeType"), value.get("data")
    if not isinstance(mime, str) or not isinstance(data, str):
        raise BadRequest(f"{where}.inlineData must have a mimeType and data")
    standard = data.replace("-", "+").replace("_", "/")  # SDKs write either alphabet, data URLs have one
    standard += "=" * (-len(standard) % 4)
    try:
        content = base64.b64decode(standard, validate=True)
    except ValueError as error:
        raise BadRequest(f"{where}.inlineData.data is not base64: {error}") from None
    if mime.startswith("text/") or mime in _TEXTUAL:
        return {"type": "text", "text": content.decode("utf-8", "replace")}
    return _media(mime, f"data:{mime};base64,{standard}")


def _file(value: Mapping[str, Any]) -> dict[str, Any] | None:
    mime, uri = field(value, "mimeType"), field(value, "fileUri")
    if not isinstance(uri, str) or not uri.startswith(("http://", "https://", "data:")):
        return None  # in someone else's storage, for which nobody here has a key
    return _media(mime if isinstance(mime, str) else "", uri)


def _media(mime: str, url: str) -> dict[str, Any] | None:
    kind = _MEDIA.get(mime.partition("/")[0])
    return {"type": kind, kind: {"url": url}} if kind else None

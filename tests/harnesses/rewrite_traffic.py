"""Makes the files of `traffic` from recordings: python -m tests.harnesses.rewrite_traffic FOLDER.

Shape, field names, types, order, tool names, header names and odd spellings stay; prose becomes a word that stands for
it, tool descriptions go, machine paths and hosts with them. A recording is JSON lines: method, path, query, headers,
body, and the response that was served (status, kind, text).
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harnesses.traffic import FOLDER, events, ids_of, shortened

_CONNECTION = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")
_KEYS = {"authorization": "Bearer @TOKEN@", "x-api-key": "@TOKEN@", "x-goog-api-key": "@TOKEN@"}
_LONG = 60  # characters of a text that stays as it is
_LONG_LINE = 100
_TELLING = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|^\s*</?[a-z_-]+>\s*$|x-anthropic-[a-z-]+:")  # lines that stay
_FULL_TOOLS = 2  # further ones keep their names alone


def main(folder: Path) -> None:
    FOLDER.mkdir(exist_ok=True)
    texts: dict[str, list[str]] = {}
    before: dict[str, dict[str, Any]] = {}  # agent -> the last body
    for path in sorted(folder.glob("*.jsonl")):
        agent, _, scenario = path.stem.partition(".")
        if agent == "kilo" or scenario == "mitm":  # calls to a host of its own; to the providers' paths
            continue
        agent = agent.removesuffix("-cn")  # as its adapter is called
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        texts.setdefault(agent, []).extend(_rewritten(scenario or "main", lines, before.setdefault(agent, {})))
    for agent, rows in texts.items():
        (FOLDER / f"{agent}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(texts)} agents, {sum(path.stat().st_size for path in FOLDER.iterdir()) // 1000} kB")


def _rewritten(scenario: str, recorded: list[dict[str, Any]], before: dict[str, Any]) -> Iterator[str]:
    ids: dict[str, str] = {}
    said: set[str] = set()  # by the engine; it must come back word for word
    for number, line in enumerate(recorded):
        body = line["body"] if line["method"] == "POST" else None
        if body is not None:
            body = _body(json.loads(_marked(json.dumps(body), ids)), said)
        response = line["response"]
        yield json.dumps(
            {
                "scenario": scenario,
                "method": line["method"],
                "path": line["path"],
                "query": line["query"],
                "headers": [[name, _header(name, value)] for name, value in line["headers"] if name not in _CONNECTION],
                "body": None if body is None else shortened(body, before),
                "reply": _reply(response),
            },
            ensure_ascii=False,
            separators=(",", ":"),
        )
        if body is not None:
            before.clear()
            before.update(body)
        said.add("".join(_reply(response)["pieces"]).strip())
        ids |= {value: f"@{name}@" for name, value in ids_of(response.get("text") or "", number).items()}


def _marked(text: str, ids: dict[str, str]) -> str:
    for value in sorted(ids, key=len, reverse=True):
        text = text.replace(json.dumps(value)[1:-1], ids[value])
    return text.replace("/sandbox/work", "/app")


def _header(name: str, value: str) -> str:
    if name in _KEYS:
        return _KEYS[name]
    return f"words-{_digest(value)}" if len(value) > _LONG_LINE or ("/" in value and name.startswith("x-")) else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _body(body: dict[str, Any], said: set[str]) -> dict[str, Any]:
    return {key: _tools(value) if key == "tools" else _worded(value, said) for key, value in body.items()}


def _worded(value: Any, said: set[str]) -> Any:
    if isinstance(value, str):
        return value if value.strip() in said else _filled(value)
    if isinstance(value, list):
        return [_worded(item, said) for item in value]
    if not isinstance(value, dict):
        return value
    # What a call was given comes back word for word, or the reply could not be told in it.
    given = {key for key, item in value.items() if key == "arguments" and isinstance(item, str)}
    return {key: item if key in given else _worded(item, said) for key, item in value.items()}


def _filled(text: str) -> str:
    """Long text becomes words that stand for it; lines that may change from request to request stay."""
    if len(text) <= _LONG and "ipsum" not in text and not re.search(r"/(tmp|home|root|work|private)/", text):
        return text
    out: list[str] = []
    prose: list[str] = []
    for line in [*text.split("\n"), None]:
        if line is not None and not (
            len(line) <= _LONG_LINE and _TELLING.search(line) and "/" not in line.replace("</", "")
        ):
            prose.append(line)
            continue
        if any(prose):
            out.append(f"Words {_digest(chr(10).join(prose))}.")
        prose.clear()
        if line is not None:
            out.append(line)
    head, tail = text[: len(text) - len(text.lstrip("\n"))], text[len(text.rstrip("\n")) :]
    return head + "\n".join(out) + tail


def _tools(tools: Any) -> Any:
    if not isinstance(tools, list):
        return tools
    if tools and isinstance(tools[0], dict) and "functionDeclarations" in tools[0]:
        return [{**each, "functionDeclarations": _tools(each["functionDeclarations"])} for each in tools]
    return [_tool(tool, whole=number < _FULL_TOOLS) for number, tool in enumerate(tools)]


def _tool(tool: Any, *, whole: bool) -> Any:
    if not isinstance(tool, dict):
        return tool
    short: dict[str, Any] = {}
    for key, value in tool.items():
        if key == "function":
            short[key] = _tool(value, whole=whole)
        elif key == "tools":
            short[key] = _tools(value)
        elif key in ("parameters", "input_schema", "parametersJsonSchema", "format"):
            short[key] = _schema(value) if whole else {"type": "object", "properties": {}} if key != "format" else value
        elif key == "description":
            short[key] = "Does it."
        else:
            short[key] = value
    return short


def _schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema(item) for item in value[:4]]
    if not isinstance(value, dict):
        return value
    return {key: _schema(item) for key, item in value.items() if not (key == "description" and isinstance(item, str))}


def _reply(response: dict[str, Any]) -> dict[str, Any]:
    """What the engine of the recording said, whatever the dialect: pieces of text, thoughts, calls."""
    pieces: list[str] = []
    thoughts: list[str] = []
    calls: list[list[Any]] = []  # name, arguments as text
    text = response.get("text") or ""
    for event in events(text) if response["status"] == 200 else ():
        _hear(event, pieces, thoughts, calls)
    return {
        "status": response["status"],
        "pieces": pieces,
        "reasoning": "".join(thoughts),
        "calls": [[name, _arguments(given)] for name, given in calls],
        "cut": response["kind"] == "fault-drop",
    }


def _hear(event: dict[str, Any], pieces: list[str], thoughts: list[str], calls: list[list[Any]]) -> None:
    for choice in event.get("choices") or []:
        said = choice.get("delta") or choice.get("message") or {}
        _say(pieces, said.get("content"))
        _say(thoughts, said.get("reasoning_content") or said.get("reasoning"))
        for call in said.get("tool_calls") or []:
            function = call.get("function") or {}
            if function.get("name"):
                calls.append([function["name"], ""])
            calls[-1][1] += function.get("arguments") or ""
    kind = event.get("type")
    if kind in ("content_block_start", "message"):
        for block in event.get("content") or [event.get("content_block") or {}]:
            _say(pieces, block.get("text"))
            _say(thoughts, block.get("thinking"))
            if block.get("type") == "tool_use":
                calls.append([block["name"], json.dumps(block["input"]) if block.get("input") else ""])
    elif kind == "content_block_delta":
        delta = event["delta"]
        _say(pieces, delta.get("text"))
        _say(thoughts, delta.get("thinking"))
        if delta.get("partial_json"):
            calls[-1][1] += delta["partial_json"]
    elif kind == "response.output_text.delta":
        _say(pieces, event.get("delta"))
    elif kind == "response.output_item.done":
        _item(event["item"], None, thoughts, calls)
    elif event.get("object") == "response":
        for item in event.get("output") or []:
            _item(item, pieces, thoughts, calls)
    for candidate in event.get("candidates") or []:
        for part in (candidate.get("content") or {}).get("parts") or []:
            _say(thoughts if part.get("thought") else pieces, part.get("text"))
            if call := part.get("functionCall"):
                calls.append([call["name"], json.dumps(call.get("args") or {})])


def _item(item: dict[str, Any], pieces: list[str] | None, thoughts: list[str], calls: list[list[Any]]) -> None:
    if item["type"] == "function_call":
        calls.append([item["name"], item["arguments"]])
    elif item["type"] == "reasoning":
        for part in item.get("content") or item.get("summary") or []:
            _say(thoughts, part.get("text"))
    elif item["type"] == "message" and pieces is not None:
        for part in item["content"]:
            _say(pieces, part.get("text"))


def _say(where: list[str], text: Any) -> None:
    if isinstance(text, str) and text:
        where.append(text)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}  # of a reply that broke off


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Recorded traffic of real agents: how its files are read, and how its requests are sent to a gateway.

One JSON line a request. A body says of what it shares with the request before it only how much; ids that an agent got
in a reply stand as `@REQUEST.KIND.NUMBER@`, because this gateway gives others. `rewrite_traffic` makes the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "traffic"
SAME, KEEP = "@same", "@keep"
_MARK = re.compile(r"@(\d+\.[a-z_]+\.\d+)@")
_ITEMS = ("message", "reasoning", "function_call", "custom_tool_call")  # of the Responses API


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: str | None
    headers: list[tuple[str, str]]  # as the agent sent them, without those of the connection
    body: dict[str, Any] | None
    reply: dict[str, Any]  # status, pieces, reasoning, calls, cut: what the engine of the recording said

    @property
    def is_call(self) -> bool:
        return self.method == "POST"

    def content(self, ids: dict[str, str]) -> bytes:
        """The body with the ids that this gateway gave."""
        text = json.dumps(self.body, ensure_ascii=False)
        return _MARK.sub(lambda found: ids.get(found[1], found[0]), text).encode()


def scenarios(agent: str) -> dict[str, list[Request]]:
    """The recorded runs of an agent by name, each its requests in order."""
    found: dict[str, list[Request]] = {}
    before: dict[str, Any] = {}
    for line in (FOLDER / f"{agent}.jsonl").read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        requests = found.setdefault(data["scenario"], [])
        body = _expanded(data["body"], before) if data["body"] is not None else None
        before = body or before
        headers = [(name, value) for name, value in data["headers"]]
        requests.append(Request(data["method"], data["path"], data["query"], headers, body, data["reply"]))
    return found


def _expanded(body: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    whole = {}
    for key, value in body.items():
        if value == SAME:
            value = before[key]
        elif isinstance(value, dict) and KEEP in value:
            value = [*before[key][: value[KEEP]], *value["then"]]
        whole[key] = value
    return whole


def shortened(body: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The body as a file holds it, after the request with the body `before`."""
    short: dict[str, Any] = {}
    for key, value in body.items():
        old = before.get(key)
        if isinstance(value, list) and isinstance(old, list) and value != old:
            same = next(
                (i for i, (a, b) in enumerate(zip(value, old, strict=False)) if a != b), min(map(len, (value, old)))
            )
            short[key] = {KEEP: same, "then": value[same:]} if same else value
        else:
            short[key] = SAME if key in before and json.dumps(value) == json.dumps(old) else value
    return short


def ids_of(reply: str, number: int) -> dict[str, str]:
    """What the reply to request `number` gave an agent to hand back: `NUMBER.KIND.N` -> the id."""
    kinds: dict[str, list[str]] = {}
    for event in events(reply):
        for kind, value in _ids(event):
            if value not in kinds.setdefault(kind, []):
                kinds[kind].append(value)
    return {f"{number}.{kind}.{n}": value for kind, values in kinds.items() for n, value in enumerate(values)}


def events(reply: str) -> Iterator[Any]:
    """The JSON documents of a reply: each event of a stream, or the one of a whole reply."""
    if reply.lstrip().startswith("{"):
        yield json.loads(reply)
        return
    for line in reply.splitlines():
        if line.startswith("data:") and line[5:].strip().startswith("{"):
            yield json.loads(line[5:])


def _ids(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for item in value:
            yield from _ids(item)
        return
    if not isinstance(value, dict):
        return
    kind, own = value.get("type"), value.get("id")
    is_call = kind == "tool_use" or "function" in value
    for name, found in (("call", own if is_call else value.get("call_id")), ("signature", value.get("signature"))):
        if isinstance(found, str) and found:
            yield name, found
    if kind in _ITEMS and not is_call and isinstance(own, str):
        yield kind, own
    for item in value.values():
        yield from _ids(item)

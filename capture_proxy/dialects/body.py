"""What all dialects do alike with a request: read its JSON, and put it in the one form that templates accept.

Owns lenient JSON and the settling of system messages. Called by the dialects and by the admin port.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import orjson

from capture_proxy.errors import BadRequest
from capture_proxy.types import Finding, Severity


def parse_json(body: bytes) -> Any:
    """The body as JSON. Raises BadRequest.

    JavaScript agents cut strings in the middle of a surrogate pair; strict parsers refuse that, so it is replaced.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as strict:
        try:
            data = _scrub(json.loads(body, parse_constant=_refuse_constant))
        except (ValueError, RecursionError):
            raise BadRequest(f"the body is not valid JSON: {strict}") from None
    try:
        # What is read at 1024 levels can be written at 254 only; the wrapping is what records and replies add.
        orjson.dumps([[[[[[[[[[[[[[[[data]]]]]]]]]]]]]]]])
    except orjson.JSONEncodeError:
        raise BadRequest("the body is nested too deeply: at most 200 levels") from None
    return data


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest."""
    data = parse_json(body)
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object")
    return data


def settle_system(
    messages: list[dict[str, Any]], max_leading: int | None = None
) -> tuple[list[dict[str, Any]], tuple[Finding, ...]]:
    """System messages where strict templates take them: one at the very start, later ones as tagged user messages.

    In place and message by message, so a conversation that only grows still only grows: hoisting a late reminder to the
    front would rewrite the start of every later prompt. Example: [system, user, assistant, system "be brief"] ends in
    {"role": "user", "content": "<system>\\nbe brief\\n</system>"}, with a finding that says so.
    `max_leading` is how many messages may make up the one at the start (0 where these go on from an earlier
    conversation); None is all that lead.
    """
    num_leading = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if max_leading is not None:
        num_leading = min(num_leading, max_leading)
    leading = messages[:num_leading]
    if num_leading > 1:
        leading = [{**leading[0], "content": "\n\n".join(_text(m["content"]) for m in leading)}]
    settled, moved = leading, []
    for i, message in enumerate(messages[num_leading:], num_leading):
        if message["role"] == "system":
            moved.append(i)
            message = {"role": "user", "content": f"<system>\n{_text(message['content'])}\n</system>"}
        settled.append(message)
    findings = []
    if num_leading > 1:
        findings.append(Finding(Severity.INFO, "system_merged", f"{num_leading} leading system messages became one"))
    if moved:
        where = ", ".join(map(str, moved))
        findings.append(
            Finding(Severity.INFO, "system_in_place", f"messages {where}: system became a tagged user text")
        )
    return settled, tuple(findings)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _scrub(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_scrub(item) for item in value]
    if isinstance(value, dict):
        return {_scrub(key): _scrub(item) for key, item in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer is beyond 64 bits")
    if isinstance(value, float) and math.isinf(value):
        raise ValueError("a number is beyond 64 bits")
    return value

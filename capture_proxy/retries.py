"""Which calls were asked again, told by the messages of a session's requests.

Owns what "the same conversation" and "the agent received this reply" mean; `graph` decides with it which turns are
abandoned. It reads requests and replies as chat messages and knows no dialect.

An agent whose request failed, timed out or was cut in mid-stream asks again. What it does with the attempt differs:
some drop it, some put the partial reply (or an empty tool call, answered "aborted") into the history beside the reply
of the retry, some join both attempts into one message. So an attempt counts as *received* only if a later request
holds its whole reply soon after its own messages, as *cut* if it holds a part of it there and nobody holds all of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from capture_proxy.types import Turn

_NEAR = 8  # messages after a request among which its reply is looked for: parts of an earlier attempt may come first


class Conversations:
    """The requests of one session as a tree of messages, each message hashed once however many turns share it."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = sorted(turns, key=lambda t: t.index)
        self._places = {turn.turn_id: place for place, turn in enumerate(self._turns)}
        self._digests: dict[int, bytes] = {}
        self._nodes: dict[tuple[int, bytes], int] = {}
        self._last: tuple[list[Any], list[int]] = [], [0]
        self._paths = {turn.turn_id: self._path(turn) for turn in self._turns}  # a node per message, the root first
        self._offers = {turn.turn_id: self._offer(turn) for turn in self._turns}

    def same_request(self, turn: Turn) -> tuple[int, bytes]:
        """Equal for two turns that sent the same messages, tools and model."""
        return self._paths[turn.turn_id][-1], self._offers[turn.turn_id]

    def same_history(self, turn: Turn) -> tuple[int, bytes] | None:
        """Equal for two that differ in the last message only; None while the history holds no reply yet."""
        if not any(map(_is_reply, _messages(turn)[:-1])):
            return None
        return self._paths[turn.turn_id][-2], self._offers[turn.turn_id]

    def received(self, turn: Turn) -> bool:
        """Whether a later request goes on from the turn's whole reply."""
        return any(_whole(echo, turn.message) for following in self._later(turn) for echo in following)

    def cut(self, turn: Turn) -> bool:
        """Whether a later request goes on from a part of the reply, and none from all of it."""
        part = any(following and _part(following[0], turn.message) for following in self._later(turn))
        return part and not self.received(turn)

    def _later(self, turn: Turn) -> Iterator[list[dict[str, Any]]]:
        """Of each later request that begins with this one's messages: the replies that follow closely."""
        path = self._paths[turn.turn_id]
        for later in self._turns[self._places[turn.turn_id] + 1 :]:
            other = self._paths[later.turn_id]
            if len(other) > len(path) and other[len(path) - 1] == path[-1]:
                yield [m for m in _messages(later)[len(path) - 1 :][:_NEAR] if _is_reply(m)]

    def _path(self, turn: Turn) -> list[int]:
        messages = _messages(turn)
        known, path = self._last
        # Most requests are the one before and a little more: that takes one comparison, made in C.
        path = list(path) if known == messages[: len(known)] else [0]
        for message in messages[len(path) - 1 :]:
            path.append(self._nodes.setdefault((path[-1], self._digest(message)), len(self._nodes) + 1))
        self._last = messages, path
        return path

    def _offer(self, turn: Turn) -> bytes:
        tools = turn.request.get("tools")
        about = [self._digest(tools).hex() if tools else "", turn.request.get("model")]
        return orjson.dumps([*about, turn.request.get("tool_choice")])

    def _digest(self, value: Any) -> bytes:
        """By identity first: turns of one session share the message objects that they have in common."""
        known = self._digests.get(id(value))
        if known is None:
            data = orjson.dumps(_canonical(value), option=orjson.OPT_SORT_KEYS)
            known = hashlib.blake2b(data, digest_size=16).digest()
            self._digests[id(value)] = known
        return known


def _messages(turn: Turn) -> list[Any]:
    messages = turn.request.get("messages")
    return messages if isinstance(messages, list) else []


def _is_reply(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _canonical(value: Any) -> Any:
    """The message without what agents change between two requests: cache marks, and one text block for a string."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), list):
        return value
    parts = [
        {k: v for k, v in p.items() if k != "cache_control"} if isinstance(p, dict) else p for p in value["content"]
    ]
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].keys() == {"type", "text"}:
        return {**value, "content": parts[0]["text"]}
    return {**value, "content": parts}


def same_reply(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether an agent could not tell the two replies apart."""
    return text_of(left) == text_of(right) and _calls(left) == _calls(right)


def text_of(message: dict[str, Any]) -> str:
    """The text of a chat message, without outer white space (some agents trim it); "" if it has none."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content.strip() if isinstance(content, str) else ""


def _calls(message: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(name, parsed arguments) of each tool call: agents write the arguments anew, in another spelling."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            calls.append((function.get("name"), _arguments(function.get("arguments"))))
    return calls


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value or "{}")
    except orjson.JSONDecodeError:
        return value


def _whole(echo: dict[str, Any], reply: dict[str, Any]) -> bool:
    if _calls(echo) != _calls(reply):
        return False
    # A few agents leave out the text before a call. Another text is another attempt, also before equal calls.
    return text_of(echo) == text_of(reply) or (bool(_calls(reply)) and not text_of(echo))


def _part(echo: dict[str, Any], reply: dict[str, Any]) -> bool:
    """A proper part: a beginning of the text, with fewer calls or with calls whose arguments never came."""
    echoed, sampled = _calls(echo), _calls(reply)
    if echoed == sampled and (sampled or text_of(echo) == text_of(reply)):
        return False
    if not text_of(echo) and not echoed:
        return False
    begun = all(name == full and (args in ({}, None, "") or args == whole)
                for (name, args), (full, whole) in zip(echoed, sampled, strict=False))  # fmt: skip
    return len(echoed) <= len(sampled) and begun and text_of(reply).startswith(text_of(echo))

"""Which recorded turn a request goes on from, told by what its messages say and not by how they are spelled.

Owns the identity of a message (agents re-serialise arguments, drop or rename reasoning, trim text, stamp the time into
their system prompt) and the exact ids behind each recorded reply. Pure: no tokenizer, no I/O. It does not decide
whether a prompt may be continued token by token (`rendering`) nor what is trained (`graph`). Called by `session`, which
keeps one `History` per live session, and by `rendering`.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import orjson

from capture_proxy.ids import common_run, packed
from capture_proxy.types import Turn, TurnStatus

# What agents are known to write anew into the system prompt of each request. The recorded prompt keeps what was sent
# first: a clock that stands still is cheaper than a prompt that shares nothing with the one before.
_VOLATILE = re.compile(
    r"x-anthropic-billing-header:[^\n]*"
    r"|<current_datetime>.*?</current_datetime>"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|\s?[+-]\d\d:?\d\d)?"
    r"|\b\d{1,2}:\d\d:\d\d(?:\.\d+)?(?:\s?[AaPp][Mm])?"
    r"|\b1[6-9]\d{8}(?:\d{3}|\.\d+)?\b",  # Unix seconds or milliseconds
    re.DOTALL,
)
_SHORT = 1024  # characters of arguments that are worth remembering
_EXACT = 2**53  # integers beyond are rounded by every agent that is written in JavaScript


@dataclass(frozen=True, slots=True)
class Match:
    """A recorded turn that a request extends.

    Example: Match("r1-0003", ids of that prompt, ids of that reply, [{"role": "tool", ...}], first_new=5, calls={...})
    """

    turn_id: str
    prompt_ids_P: list[int]
    completion_ids_T: list[int]
    new_messages: list[dict[str, Any]]  # what follows the recorded reply, never empty
    first_new: int  # index of new_messages[0] in the request
    calls: dict[str, str]  # tool-call id -> function name, of the reply that is answered


@dataclass(frozen=True, slots=True)
class NoMatch:
    """Turns are recorded, and the request extends none of them; `reason` is for people, e.g. "tools changed"."""

    reason: str


@dataclass(slots=True, eq=False)
class _Entry:
    """One recorded turn. Its ids are `parent`'s first `shared` ids and then `tail`, so a session holds each id once."""

    turn_id: str
    shape: bytes
    parent: _Entry | None
    shared: int
    tail: array[int]
    num_prompt: int
    reasoning: str  # of the reply, to tell apart two replies that read alike
    calls: dict[str, str]

    def __len__(self) -> int:
        return self.shared + len(self.tail)

    def ids(self) -> array[int]:
        """Prompt and completion. Linear in their length: every level gives the part that only it knows."""
        parts: list[array[int]] = []
        entry, need = self, len(self)
        while True:
            if need > entry.shared:
                parts.append(entry.tail[: need - entry.shared])
            need = min(need, entry.shared)
            if not need or entry.parent is None:
                break
            entry = entry.parent
        whole = array("i")
        for part in reversed(parts):
            whole.extend(part)
        return whole


@dataclass(slots=True)
class _Asked:
    """A request that was looked up and not recorded yet."""

    walk: Walk
    keys: list[bytes]  # one for each of its messages
    shape: bytes
    extends: _Entry | None = None


@dataclass
class History:
    """The recorded turns of one session, found by what their messages say.

    A lookup costs time linear in the request and independent of the number of turns; memory is linear in distinct
    messages and tokens. Beyond `max_ids` tokens (4 bytes each) nothing more is indexed.
    """

    max_ids: int = 32 * 2**20
    num_ids: int = 0  # tokens held
    _replies: dict[bytes, list[_Entry]] = field(default_factory=dict)  # messages up to and with a reply
    _prompts: dict[bytes, _Entry] = field(default_factory=dict)  # messages up to a reply
    _prefixes: dict[bytes, _Entry] = field(default_factory=dict)  # any first messages of a recorded request
    _asked: dict[str, _Asked] = field(default_factory=dict)  # calls in flight, by turn id

    @classmethod
    def of(cls, turns: Iterable[Turn], template_kwargs: dict[str, Any]) -> History:
        """The history of a session that is taken up again; `template_kwargs` are its policy's."""
        history = cls()
        for turn in sorted(turns, key=lambda t: t.index):
            request = turn.request
            kwargs = {**(request.get("chat_template_kwargs") or {}), **template_kwargs}
            key = shape(request.get("tools"), kwargs, request.get("tool_choice"))
            history.record(turn, request.get("messages") or [], key)
        return history

    def find(self, messages: list[dict[str, Any]], shape: bytes, turn_id: str = "") -> Match | NoMatch | None:
        """The longest recorded turn that `messages` extends; None before anything is recorded.

        With the `turn_id` that the request will be recorded under, `keep` needs no second look at the messages.
        """
        walk = Walk()
        keys = [walk.push(message) for message in messages]
        if turn_id:
            self._asked[turn_id] = _Asked(walk, keys, shape)
        if not self._replies:
            return None
        found: tuple[int, _Entry] | None = None
        other_shape = False
        shared, at_prompt, owner = 0, None, None
        for i, key in enumerate(keys):
            if (entry := self._prefixes.get(key)) is not None:
                shared, owner, at_prompt = i + 1, entry, self._prompts.get(key)
            if entries := self._replies.get(key):
                fitting = [e for e in entries if e.shape == shape]
                other_shape = not fitting
                if fitting:
                    found = i + 1, _best(fitting, _reasoning(messages[i]))
        if other_shape:
            return NoMatch("the tools or the template's arguments changed")
        if found is not None and found[0] < len(messages) and not has_reply(messages[found[0] :]):
            at, entry = found
            if turn_id:
                self._asked[turn_id].extends = entry
            ids = entry.ids().tolist()
            cut = entry.num_prompt
            return Match(entry.turn_id, ids[:cut], ids[cut:], messages[at:], at, entry.calls)
        return NoMatch(_reason(messages, shared, owner, at_prompt, found))

    def record(self, turn: Turn, messages: list[dict[str, Any]], shape: bytes) -> None:
        """Remember a turn under its request's messages; one without ids, or that did not finish, is not kept."""
        walk = Walk()
        self._asked[turn.turn_id] = _Asked(walk, [walk.push(message) for message in messages], shape)
        self.keep(turn)

    def forget(self, turn_id: str) -> None:
        """The call that `find` was asked about under this id left nothing to continue."""
        self._asked.pop(turn_id, None)

    def keep(self, turn: Turn) -> None:
        """The call that `find` was asked about under this turn's id has ended; remember it if it can be continued."""
        asked = self._asked.pop(turn.turn_id, None)
        if asked is None or turn.status is not TurnStatus.OK or not turn.prompt_ids_P or not turn.completion_ids_T:
            return
        keys, parent = asked.keys, asked.extends
        if parent is not None and turn.bridged_from == parent.turn_id:
            shared = len(parent)  # by construction, so that a long prompt need not be compared
            tail = packed(turn.prompt_ids_P)[shared:] + packed(turn.completion_ids_T)
        else:
            ids = packed(turn.prompt_ids_P) + packed(turn.completion_ids_T)
            parent = next((p for key in reversed(keys) if (p := self._prefixes.get(key)) is not None), None)
            shared = common_run(parent.ids(), 0, ids, 0) if parent is not None else 0
            tail = ids[shared:]
        while parent is not None and shared <= parent.shared:  # siblings hang side by side, not one below the other
            parent = parent.parent
        if self.num_ids + len(tail) > self.max_ids:
            return
        reply = asked.walk.push(turn.message)
        entry = _Entry(
            turn.turn_id,
            asked.shape,
            parent if shared else None,
            shared,
            tail,
            len(turn.prompt_ids_P),
            _reasoning(turn.message),
            {c["id"]: c["function"]["name"] for c in turn.message.get("tool_calls") or [] if c.get("id")},
        )
        self.num_ids += len(entry.tail)
        self._replies.setdefault(reply, []).append(entry)
        if keys:
            self._prompts[keys[-1]] = entry
        for key in (*keys, reply):
            self._prefixes[key] = entry


def shape(tools: Any, kwargs: dict[str, Any], tool_choice: Any = None) -> bytes:
    """What of a request, apart from its messages, a prompt depends on; key order is irrelevant, the tools' is not."""
    said = [tools or [], kwargs, tool_choice == "none"]
    return blake2b(orjson.dumps(said, option=orjson.OPT_SORT_KEYS, default=str), digest_size=16).digest()


class Walk:
    """Chains message identities: `push` gives the key of everything up to and with that message.

    Adjacent assistant messages count as one (dialects and agents split a reply), so the key after the second equals
    the key of the two joined.
    """

    def __init__(self) -> None:
        self._settled = b""  # key before the open assistant message
        self._key = b""
        self._text: list[str] | None = None  # parts of the open assistant message; None = none is open
        self._calls: list[str] = []
        self._groups = 0
        self._pairs: dict[str, str] = {}  # tool-call id -> "reply.call"
        self._waiting: list[str] = []  # calls without a result yet, in order

    def push(self, message: dict[str, Any]) -> bytes:
        if message.get("role") == "assistant":
            self._push_assistant(message)
        else:
            self._settled, self._text = self._key, None
            self._key = _chain(self._settled, self._parts(message))
        return self._key

    def _push_assistant(self, message: dict[str, Any]) -> None:
        if self._text is None:
            self._settled, self._text, self._calls = self._key, [], []
            self._groups += 1
            self._waiting = []
        text, _ = split_reasoning(_text(message.get("content")))
        if text:
            self._text.append(text)
        for call in message.get("tool_calls") or []:
            label = f"{self._groups}.{len(self._calls)}"
            function = call.get("function") or {}
            self._calls.append(f"{function.get('name')}\0{canonical_arguments(function.get('arguments'))}")
            if call.get("id"):
                self._pairs[call["id"]] = label
            self._waiting.append(label)
        self._key = _chain(self._settled, ["assistant", "".join(self._text), *self._calls])

    def _parts(self, message: dict[str, Any]) -> list[str]:
        role = str(message.get("role"))
        content = message.get("content")
        texts = [content] if isinstance(content, str) else [_part(p) for p in content or []]
        if role == "system":
            texts = [_steady(text) for text in texts]
        if role != "tool":
            return [role, *(texts or [""])]
        label = self._pairs.get(message.get("tool_call_id") or "")
        if label is None:
            label = self._waiting[0] if self._waiting else "?"
        if label in self._waiting:
            self._waiting.remove(label)
        return [role, label, *(texts or [""])]


@lru_cache(maxsize=128)  # the same long text comes with every call of a session
def _steady(text: str) -> str:
    return _VOLATILE.sub("\0", text)


def split_reasoning(content: str) -> tuple[str, str]:
    """(what was said, inline reasoning), both trimmed: "<think>\\na\\n</think>\\n\\nb" is ("b", "a")."""
    before, found, after = content.partition("</think>")
    if found:
        return after.strip(), before.replace("<think>", "", 1).strip()
    if content.lstrip().startswith("<think>"):
        return "", content.replace("<think>", "", 1).strip()
    return content.strip(), ""


def _reasoning(message: dict[str, Any]) -> str:
    said = message.get("reasoning_content") or message.get("reasoning")
    return str(said).strip() if said else split_reasoning(_text(message.get("content")))[1]


def canonical_arguments(arguments: Any) -> str:
    """Arguments as text that is equal for every spelling of the same JSON; text that is not JSON stays as it is."""
    if isinstance(arguments, str) and len(arguments) <= _SHORT:
        return _canonical_short(arguments)
    return _canonical_arguments(arguments)


@lru_cache(maxsize=8192)  # every call of a session comes with all the tool calls before it
def _canonical_short(arguments: str) -> str:
    return _canonical_arguments(arguments)


def _canonical_arguments(arguments: Any) -> str:
    if isinstance(arguments, str):
        if not arguments.strip():
            return "{}"
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments).strip()
    elif arguments is None:
        return "{}"
    try:
        return json.dumps(_canonical(arguments), sort_keys=True, separators=(",", ":"))
    except RecursionError:
        return str(arguments)


def _canonical(value: Any) -> Any:
    if isinstance(value, str):
        return _whole(value)
    if isinstance(value, dict):
        return {_whole(str(key)): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _EXACT:
        try:
            return float(value)
        except OverflowError:
            return str(value)
    return value


def _whole(text: str) -> str:
    """Half a surrogate pair becomes U+FFFD, which is what strict writers make of it."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return str(content) if isinstance(content, str) else ""


def _part(part: Any) -> str:
    if isinstance(part, str):
        return str(part)
    text = part.get("text") if isinstance(part, dict) and part.get("type") in (None, "text") else None
    if isinstance(text, str):
        return str(text)
    kept = {k: v for k, v in part.items() if k != "cache_control"} if isinstance(part, dict) else part
    return json.dumps(_canonical(kept), sort_keys=True)


def _chain(before: bytes, parts: list[str]) -> bytes:
    try:
        data = orjson.dumps(parts)  # framed: ["ab", "c"] is not ["a", "bc"]
    except orjson.JSONEncodeError:  # half a surrogate pair
        data = orjson.dumps([_whole(part) for part in parts])
    return blake2b(before + data, digest_size=16).digest()


def _best(entries: list[_Entry], reasoning: str) -> _Entry:
    """Of replies that read alike the one with this reasoning, else the last: that is what the agent went on from."""
    same = [e for e in entries if reasoning and e.reasoning == reasoning]
    return (same or entries)[-1]


def has_reply(messages: list[dict[str, Any]]) -> bool:
    """Whether these messages can go on from a turn at all."""
    return any(m.get("role") == "assistant" for m in messages)


def _reason(
    messages: list[dict[str, Any]],
    shared: int,
    owner: _Entry | None,
    at_prompt: _Entry | None,
    found: tuple[int, _Entry] | None,
) -> str:
    if shared == len(messages) and found is not None and found[0] == shared:
        return f"nothing follows the reply of {found[1].turn_id}"
    if not has_reply(messages):
        return "a new conversation" if at_prompt is None else f"asks what {at_prompt.turn_id} was asked"
    if owner is None:
        return f"history rewritten at message 0 ({messages[0].get('role')})"
    if shared == len(messages):
        return f"ends inside what {owner.turn_id} was asked"
    role = messages[shared].get("role")
    if found is not None and found[0] == shared and found[1] is owner:  # nothing was known to follow
        unknown = next(i for i in range(shared, len(messages)) if messages[i].get("role") == "assistant")
        return f"message {unknown} is a reply that no turn of this session gave"
    if at_prompt is not None:
        what = "rewritten" if role == "assistant" else "dropped"
        return f"the reply of {at_prompt.turn_id} was {what} at message {shared}"
    return f"history rewritten at message {shared} ({role}), shared with {owner.turn_id} until there"

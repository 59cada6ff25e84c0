"""Sessions and turns as plain JSON values and back, and turns in terms of earlier turns of their session.

Owns the one form that the admin API and the store share. An agent sends its whole history with every call, so turns
that were kept whole would take space quadratic in a session; here a turn is what it adds to an earlier one. It does not
own where that is kept (`store`) or what the values mean (`types`). Called by `store`, `trace`, `gateway` and
`admin_client`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from capture_proxy import deltas
from capture_proxy.ids import Ids, TokenIds, common_prefix, common_run, packed
from capture_proxy.types import (
    Finding,
    Session,
    SessionPolicy,
    Severity,
    Turn,
    TurnRole,
    TurnStatus,
    VersionSpan,
)

# Kept beside the JSON as compact binary by the store; every other field of a turn is JSON.
ARRAY_FIELDS = ("prompt_ids_P", "completion_ids_T", "logprobs_T")


def policy_to_dict(policy: SessionPolicy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in SessionPolicy.__slots__}


def policy_from_dict(data: dict[str, Any]) -> SessionPolicy:
    """Raises TypeError or ValueError for fields or values that no policy has."""
    policy = SessionPolicy(**data)
    for name in ("max_tokens", "max_turns", "max_total_tokens"):
        value = getattr(policy, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"policy.{name} must be a positive integer or null, not {value!r}")
    if not isinstance(policy.sampling, dict) or not isinstance(policy.chat_template_kwargs, dict):
        raise ValueError("policy.sampling and policy.chat_template_kwargs must be objects")
    if policy.at_limit not in ("refuse", "reply"):
        raise ValueError(f"policy.at_limit must be 'refuse' or 'reply', not {policy.at_limit!r}")
    if not isinstance(policy.closed_status, int) or not 400 <= policy.closed_status < 500:
        raise ValueError(f"policy.closed_status must be a 4xx status, not {policy.closed_status!r}")
    if policy.deadline is not None and not isinstance(policy.deadline, int | float):
        raise ValueError(f"policy.deadline must be Unix seconds or null, not {policy.deadline!r}")
    return policy


def session_to_dict(session: Session) -> dict[str, Any]:
    # Not `asdict`, which copies every value deeply: this is written with every turn.
    data = {name: getattr(session, name) for name in Session.__slots__}
    if not session.gateway:  # as it was written before there could be several
        del data["gateway"]
    return {**data, "policy": policy_to_dict(session.policy)}


def session_from_dict(data: dict[str, Any]) -> Session:
    return Session(**{**data, "policy": policy_from_dict(data["policy"])})


def body_to_dict(turn: Turn) -> dict[str, Any]:
    """All of a turn but its token-long fields, its raw body and its request, as JSON values."""
    data = {name: getattr(turn, name) for name in Turn.__slots__ if name not in (*ARRAY_FIELDS, "raw", "request")}
    data["body_hash"] = turn.body_hash.hex()
    data["version_spans"] = [[s.version, s.start, s.end] for s in turn.version_spans]
    data["findings"] = [[f.severity.value, f.code, f.detail] for f in turn.findings]
    data["status"], data["role"] = turn.status.value, turn.role.value
    return data


def turn_from_dict(data: dict[str, Any]) -> Turn:
    """A whole turn: `body_to_dict` with the request and the token-long fields put in."""
    return Turn(
        **{
            **data,
            "version_spans": [VersionSpan(*span) for span in data["version_spans"]],
            "findings": [Finding(Severity(s), code, detail) for s, code, detail in data["findings"]],
            "status": TurnStatus(data["status"]),
            "role": TurnRole(data["role"]),
            "body_hash": bytes.fromhex(data.get("body_hash", "")),
        }
    )


# --- turns in terms of earlier turns


@dataclass(frozen=True, slots=True)
class Encoded:
    """A turn in terms of the turn `base` of the same session (None = it stands alone).

    `body` is JSON values: `body_to_dict`, the request without what the base has, and under `messages` a list of its
    messages, where `[start, end]` stands for the messages of the base in these places.
    """

    base: int | None  # the key that the base was remembered under
    num_shared: int  # leading ids of the base's prompt + completion that this prompt begins with
    new_ids: array[int]  # the rest of the prompt
    body: dict[str, Any]
    raw: bytes | None  # delta against the base's raw body (against b"" without a base); None = there is none


_CHANCE = 64  # bytes that two unrelated turns may well have in common
_COMPARED = 2048  # ids before a reply that are all compared


@dataclass(frozen=True, slots=True)
class _Head:
    """The newest turn of a lineage: what a next turn most likely begins with."""

    key: int
    turn_id: str
    prompt: TokenIds
    completion: array[int]
    messages: list[Any]
    tools: Any
    raw: bytes

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)

    def shared(self, prompt: TokenIds) -> int:
        """How many leading ids of prompt and completion the given prompt begins with."""
        shared = common_prefix(self.prompt, prompt)
        if shared == len(self.prompt):
            shared += common_run(self.completion, 0, prompt.buffer, shared, len(prompt) - shared)
        return shared

    def begins(self, prompt: Ids) -> bool:
        """Whether a prompt that is said to be built on this turn does begin with it.

        Exact for a short one. Of a long one the end, the reply and every hundredth id before are looked at: a list of
        ids is as long as the session and slow to compare, and this is asked for every call.
        """
        length, seam = len(self.prompt), self.length
        sure = max(0, length - _COMPARED)
        return (
            len(prompt) >= seam > 0
            and prompt[length:seam] == self.completion.tolist()
            and prompt[sure:length] == self.prompt[sure:]
            and prompt[:sure:101] == self.prompt[:sure:101]
        )


class Encoder:
    """Says the turns of one session in terms of each other. Not thread-safe; `encode`, then `remember`."""

    _MAX_HEADS = 8

    def __init__(self) -> None:
        self._heads: list[_Head] = []  # newest last
        self._extended: _Head | None = None  # by the turn encoded last: it need not be kept beside that
        self._prompt = TokenIds(array("i"))  # of the turn encoded last

    @property
    def size(self) -> int:
        """About how many bytes it holds on to."""
        return sum(4 * len(h.prompt) + 2 * len(h.raw) for h in self._heads)

    def encode(self, turn: Turn) -> Encoded:
        """Raises ValueError or TypeError for a turn that cannot be kept (ids that are none, no JSON)."""
        self._extended = None
        base, shared, new_ids = self._base(turn)
        before = (base.prompt, base.completion) if base is not None else None
        self._prompt = _continued(before, shared, new_ids)
        messages, tools = _messages(turn), turn.request.get("tools")
        body = body_to_dict(turn)
        body["request"] = {k: v for k, v in turn.request.items() if k not in ("messages", "tools")}
        old = base.messages if base is not None else []
        if "messages" in turn.request:
            body["messages"] = _told(old, messages)
        if "tools" in turn.request:
            same = base is not None and tools is not None and base.tools == tools
            body |= {"same_tools": True} if same else {"tools": tools}
        raw = None if turn.raw is None else deltas.encode(base.raw if base is not None else b"", turn.raw)
        return Encoded(base.key if base is not None else None, shared, new_ids, body, raw)

    def remember(self, turn: Turn, key: int) -> None:
        """Later turns may refer to the turn, which was encoded last, under this key."""
        if not self._prompt and any(head.prompt for head in self._heads):
            return  # a failed call: what comes next is closer to the turn before it
        completion = packed(turn.completion_ids_T)
        tools = turn.request.get("tools")
        head = _Head(key, turn.turn_id, self._prompt, completion, _messages(turn), tools, turn.raw or b"")
        kept = [h for h in self._heads if h is not self._extended]
        self._heads = [*kept[-(self._MAX_HEADS - 1) :], head]

    def _base(self, turn: Turn) -> tuple[_Head | None, int, array[int]]:
        """The earlier turn that this one shares most with, how many leading ids, and the ids after those."""
        for head in self._heads:
            if head.turn_id == turn.bridged_from and head.begins(turn.prompt_ids_P):
                self._extended = head
                return head, head.length, packed(turn.prompt_ids_P[head.length :])
        prompt = TokenIds.of(turn.prompt_ids_P)
        tools = turn.request.get("tools")
        # Any base beats none: where a first line changes with every request, bodies agree in all that follows it.
        # A few bytes more are chance: then the newest is the closest.
        best: tuple[int, int, _Head | None] = -_CHANCE - 1, 0, None
        for head in reversed(self._heads):
            shared = head.shared(prompt)
            if shared == head.length > 0:
                best, self._extended = (0, shared, head), head
                break
            lead = common_run(head.messages, 0, _messages(turn), 0)
            if lead and lead == len(head.messages) and not head.prompt and not prompt:
                self._extended = head
            score = 4 * shared + 64 * lead + common_run(head.raw, 0, turn.raw or b"", 0)
            score += 256 if tools and head.tools == tools else 0
            if score > best[0] + _CHANCE:
                best = score, shared, head
            if prompt and 10 * shared >= 9 * len(prompt):
                break  # the others cannot save much more, and each costs a look through the whole body
        return best[2], best[1], prompt.buffer[best[1] : len(prompt)]


class Decoder:
    """The inverse: turns of one session come back sharing their prompt ids, messages and tools in memory.

    Turns go in with the base before them. `raw` bodies are not its business.
    """

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = {}

    def decode(
        self,
        key: int,
        base: int | None,
        num_shared: int,
        new_ids: array[int],
        body: dict[str, Any],
        completion_ids_T: list[int],
        logprobs_T: list[float | None],
    ) -> Turn:
        """Raises KeyError, TypeError or ValueError for what `Encoder` did not make."""
        before = self._turns[base] if base is not None else None
        data = dict(body)
        request = dict(data["request"])
        if "messages" in data:
            request["messages"] = _joined(_messages(before) if before else [], data.pop("messages"))
        if "tools" in data:
            request["tools"] = data.pop("tools")
        if data.pop("same_tools", False) and before is not None:
            request["tools"] = before.request["tools"]
        data["request"] = request
        known = (TokenIds.of(before.prompt_ids_P), packed(before.completion_ids_T)) if before else None
        data["prompt_ids_P"] = _continued(known, num_shared, new_ids) or []
        data["completion_ids_T"], data["logprobs_T"] = completion_ids_T, logprobs_T
        turn = self._turns[key] = turn_from_dict(data)
        return turn


def _messages(turn: Turn) -> list[Any]:
    messages = turn.request.get("messages")
    return messages if isinstance(messages, list) else []


def _told(old: list[Any], messages: list[Any]) -> list[Any]:
    """The messages, with `[start, end]` for each run that the base has in the same places."""
    told: list[Any] = []
    place = 0
    while place < len(messages):
        if place < len(old) and old[place] == messages[place]:
            run = common_run(old, place, messages, place)
            told.append([place, place + run])
            place += run
        else:
            told.append(messages[place])
            place += 1
    return told


def _joined(base: list[Any], told: list[Any]) -> list[Any]:
    messages: list[Any] = []
    for entry in told:
        if not isinstance(entry, list):
            messages.append(entry)
        elif entry[1] > len(base):
            raise ValueError(f"messages {entry} of a turn that has {len(base)}")
        else:
            messages += base[entry[0] : entry[1]]
    return messages


def _continued(before: tuple[TokenIds, array[int]] | None, num_shared: int, new_ids: array[int]) -> TokenIds:
    """A prompt that begins with `num_shared` ids of a turn's prompt and completion.

    It shares the buffer of that prompt unless something else goes on there.
    """
    prompt, completion = before or (TokenIds(array("i")), array("i"))
    if num_shared > len(prompt) + len(completion):
        raise ValueError(f"{num_shared} ids are shared with a turn of {len(prompt) + len(completion)}")
    kept, buffer = min(num_shared, len(prompt)), prompt.buffer
    more = completion[: num_shared - kept] + new_ids
    if len(buffer) != kept and buffer[kept : kept + len(more)] != more:
        buffer = buffer[:kept]
    if len(buffer) == kept:
        buffer.extend(more)
    return TokenIds(buffer, kept + len(more))

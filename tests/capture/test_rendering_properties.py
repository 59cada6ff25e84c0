"""Any conversation, branched anywhere and spelled anyhow, finds the turn it goes on from and that turn's exact ids."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from capture_proxy.history import History, Match, shape
from capture_proxy.types import Turn, TurnRole, TurnStatus

SHAPE = shape([], {})
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
replies = st.tuples(
    st.sampled_from(["", "ok", "\nI look.\n\n", "é <b>"]),  # text
    st.sampled_from(["", "because", "x\ny"]),  # reasoning
    st.lists(st.dictionaries(st.text(max_size=3), json_values, max_size=2), max_size=2),  # arguments of its calls
)
news = st.sampled_from(["on", "file.txt\n", "", " two "])


def sampled(k, reply):
    """The reply as it was recorded."""
    text, reasoning, calls = reply
    message = {"role": "assistant", "content": text or None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"c{k}.{i}", "type": "function", "function": {"name": "sh", "arguments": json.dumps(args, indent=1)}}
            for i, args in enumerate(calls)
        ]
    return message


def echoed(message, spelling):
    """The reply as one of eight kinds of agent sends it back."""
    back = {"role": "assistant", "content": message["content"] or "", "index": 0}
    reasoning = message.get("reasoning_content")
    if spelling & 1:
        back["content"] = back["content"].strip()
    if reasoning and spelling & 2:
        back["content"] = f"<think>\n{reasoning}\n</think>\n{back['content']}"
    elif reasoning:
        back["reasoning"] = reasoning
    if spelling & 4:
        back["content"] = [{"type": "text", "text": back["content"]}]
    if message.get("tool_calls"):
        back["tool_calls"] = [
            {
                **call,
                "function": {
                    "name": "sh",
                    "arguments": json.dumps(
                        json.loads(call["function"]["arguments"]), separators=(",", ":"), ensure_ascii=False
                    ),
                },
            }
            for call in message["tool_calls"]
        ]
    return back


@given(st.lists(st.tuples(st.integers(0, 10**6), replies, news, st.integers(0, 7)), min_size=1, max_size=12))
@settings(max_examples=150, deadline=None)
def test_the_turn_that_is_extended_is_found_with_its_exact_ids(steps):
    history, grown = History(), []  # grown: (turn id, messages up to and with the reply as recorded, whole ids)
    for k, (pick, reply, new, spelling) in enumerate(steps):
        at = pick % (len(grown) + 1)
        if at == len(grown):
            messages, whole, parent = [{"role": "user", "content": f"task {k}"}], [], None
        else:
            parent, past, whole = grown[at]
            said = past[-1]
            calls = said.get("tool_calls") or []
            results = [{"role": "tool", "tool_call_id": c["id"], "content": new} for c in calls]
            # Every branch says something of its own, so that the longest match is the turn that was picked.
            messages = [*past[:-1], echoed(said, spelling), *results, {"role": "user", "content": f"{new} {k}"}]
        found = history.find(messages, SHAPE, f"t{k}")
        if parent is None:
            assert not isinstance(found, Match)
        else:
            assert isinstance(found, Match)
            assert (found.turn_id, found.prompt_ids_P + found.completion_ids_T) == (parent, whole)
            assert all(m["role"] != "assistant" for m in found.new_messages)
        prompt, completion = [*whole, 1000 + k], [2000 + k, 7]
        message = sampled(k, reply)
        turn = Turn(
            f"t{k}", "s", k, "d", {}, {}, {}, prompt, completion, [0.0, 0.0], [], message, "stop",
            TurnStatus.OK, TurnRole.AGENT, bridged_from=parent,
        )  # fmt: skip
        history.keep(turn)
        grown.append((f"t{k}", [*messages, message], prompt + completion))
    assert history.num_ids == 3 * len(steps)  # each token once, whatever branches from where

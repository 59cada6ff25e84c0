"""Which recorded turn a request extends: the same words in another spelling match, other words do not."""

from __future__ import annotations

import copy
import json
import time

import pytest

from capture_proxy.history import History, Match, NoMatch, canonical_arguments, shape
from capture_proxy.types import Turn, TurnRole, TurnStatus

SYSTEM = {"role": "system", "content": "You are an agent. It is 2026-11-29 18:32:27.058123."}
TASK = {"role": "user", "content": "Write hello."}
NONE = shape([], {})


def call(name, arguments, call_id="c1"):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def reply(content=None, calls=(), reasoning=None):
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def result(content, call_id="c1"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def turn(turn_id, prompt, completion, message, status=TurnStatus.OK):
    return Turn(
        turn_id, "s", 0, "openai_chat", {}, {}, {}, prompt, completion, [-0.1] * len(completion), [], message,
        "stop", status, TurnRole.AGENT,
    )  # fmt: skip


SAID = reply("\nI will write it.\n\n", [call("sh", '{"command":   "caf\\u00e9 > f", "n": 1.0}')], "First,\nwrite.")


def recorded(message=SAID, messages=(SYSTEM, TASK), tools=NONE):
    history = History()
    history.record(turn("t0", [1, 2, 3], [4, 5], message), list(messages), tools)
    return history


def with_reply(message):
    return [SYSTEM, TASK, message, result("ok")]


SAME = {
    "verbatim": SAID,
    "arguments re-serialised": reply(SAID["content"], [call("sh", '{"n":1,"command":"café > f"}')], "First,\nwrite."),
    "reasoning dropped": reply(SAID["content"], SAID["tool_calls"]),
    "reasoning under its other name": {**reply(SAID["content"], SAID["tool_calls"]), "reasoning": "First,\nwrite."},
    "reasoning in the text": reply("<think>\nFirst,\nwrite.\n</think>\n\nI will write it.", SAID["tool_calls"]),
    "text trimmed": reply("I will write it.", SAID["tool_calls"], "First,\nwrite."),
    "text as one part": reply([{"type": "text", "text": SAID["content"]}], SAID["tool_calls"]),
    "text with a cache mark": reply(
        [{"type": "text", "text": SAID["content"], "cache_control": {"type": "ephemeral"}}], SAID["tool_calls"]
    ),
    "extra keys": {**SAID, "refusal": None, "index": 0, "provider_specific_fields": {"x": 1}, "annotations": []},
    "another tool-call id": reply(SAID["content"], [call("sh", SAID["tool_calls"][0]["function"]["arguments"], "z")]),
}


@pytest.mark.parametrize("name", SAME)
def test_a_reply_that_says_the_same_is_the_same(name):
    request = with_reply(copy.deepcopy(SAME[name]))
    request[-1]["tool_call_id"] = request[-2]["tool_calls"][0]["id"]

    found = recorded().find(request, NONE)

    assert isinstance(found, Match)
    assert (found.turn_id, found.prompt_ids_P, found.completion_ids_T) == ("t0", [1, 2, 3], [4, 5])
    assert found.new_messages == request[3:]
    assert found.first_new == 3


OTHER = {
    "another argument": reply(SAID["content"], [call("sh", {"command": "café > g", "n": 1})]),
    "another tool": reply(SAID["content"], [call("bash", {"command": "café > f", "n": 1})]),
    "the call dropped": reply(SAID["content"]),
    "a call more": reply(SAID["content"], [*SAID["tool_calls"], call("sh", {}, "c2")]),
    "another text": reply("I will not write it.", SAID["tool_calls"]),
    "true is not 1": reply(SAID["content"], [call("sh", {"command": "café > f", "n": True})]),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_reply_that_says_something_else_is_named(name):
    found = recorded().find(with_reply(OTHER[name]), NONE)

    assert isinstance(found, NoMatch)
    assert found.reason == "the reply of t0 was rewritten at message 2"


def test_a_null_content_an_empty_one_and_none_are_equal():
    history = recorded(reply(None, SAID["tool_calls"]))
    for message in (
        reply("", SAID["tool_calls"]),
        {k: v for k, v in reply(None, SAID["tool_calls"]).items() if k != "content"},
    ):
        assert isinstance(history.find(with_reply(message), NONE), Match)


def test_a_reply_split_in_two_messages_is_one():
    split = [reply("I will write it."), reply(None, SAID["tool_calls"])]
    assert isinstance(recorded().find([SYSTEM, TASK, *split, result("ok")], NONE), Match)


def test_results_are_paired_with_their_calls_whatever_their_ids():
    two = reply(None, [call("sh", {"a": 1}, "x"), call("sh", {"a": 2}, "y")])
    renamed = reply(None, [call("sh", {"a": 1}, "p"), call("sh", {"a": 2}, "q")])
    history = recorded(two)
    history.record(
        turn("t1", [1, 2, 3, 4, 5, 6], [7], reply("done")),
        [SYSTEM, TASK, two, result("1", "x"), result("2", "y")],
        NONE,
    )

    same = [SYSTEM, TASK, renamed, result("1", "p"), result("2", "q"), reply("done"), TASK]
    assert history.find(same, NONE).turn_id == "t1"
    swapped = [SYSTEM, TASK, renamed, result("1", "q"), result("2", "p"), reply("done"), TASK]
    assert history.find(swapped, NONE).reason.startswith("history rewritten at message 3")


@pytest.mark.parametrize(
    "line",
    [
        "It is 2026-11-29 18:33:01.991.",
        "It is 2026-11-30T07:00:00Z.",
    ],
)
def test_the_time_in_a_system_prompt_is_no_difference(line):
    request = with_reply(SAID)
    request[0] = {"role": "system", "content": f"You are an agent. {line}"}
    assert isinstance(recorded().find(request, NONE), Match)


def test_a_billing_header_in_a_system_prompt_is_no_difference():
    def system(mark):
        return {"role": "system", "content": f"x-anthropic-billing-header: cc_version=2.1; cch={mark};\nYou code."}

    history = recorded(messages=(system("a1b2c"), TASK))
    assert isinstance(history.find([system("00fff"), TASK, SAID, result("ok")], NONE), Match)
    assert isinstance(history.find([{**system("a"), "content": "You code."}, TASK, SAID, result("ok")], NONE), NoMatch)


def test_the_time_in_a_users_text_is_a_difference():
    at = {"role": "user", "content": "It is 18:32:27"}
    later = {"role": "user", "content": "It is 18:32:28"}
    found = recorded(messages=(SYSTEM, at)).find([SYSTEM, later, SAID, result("ok")], NONE)
    assert found.reason == "history rewritten at message 1 (user), shared with t0 until there"


def test_nothing_is_said_before_a_turn_is_recorded():
    assert History().find([SYSTEM, TASK], NONE) is None


@pytest.mark.parametrize("status", [TurnStatus.ABORTED, TurnStatus.FAILED])
def test_a_turn_that_did_not_finish_is_not_continued(status):
    history = History()
    history.record(turn("t0", [1], [2], SAID, status), [SYSTEM, TASK], NONE)
    assert history.find(with_reply(SAID), NONE) is None


@pytest.mark.parametrize(
    ("request_messages", "reason"),
    [
        ([SYSTEM, {"role": "user", "content": "Title?"}], "a new conversation"),
        ([SYSTEM, TASK], "asks what t0 was asked"),
        ([SYSTEM, TASK, SAID], "nothing follows the reply of t0"),
        ([SYSTEM, TASK, TASK, reply("x"), TASK], "the reply of t0 was dropped at message 2"),
        ([TASK, SAID, result("ok")], "history rewritten at message 0 (user)"),
        (
            [SYSTEM, TASK, SAID, TASK, reply("never said"), TASK],
            "message 4 is a reply that no turn of this session gave",
        ),
    ],
)
def test_the_reason_names_what_was_changed(request_messages, reason):
    assert recorded().find(request_messages, NONE) == NoMatch(reason)


def test_other_tools_are_named_and_their_key_order_is_not():
    a = {"type": "function", "function": {"name": "sh", "parameters": {"type": "object", "required": []}}}
    a_reordered = {"function": {"parameters": {"required": [], "type": "object"}, "name": "sh"}, "type": "function"}
    history = recorded(tools=shape([a], {}))
    assert isinstance(history.find(with_reply(SAID), shape([a_reordered], {})), Match)
    for other in (NONE, shape([a, a], {}), shape([a], {"enable_thinking": False}), shape([a], {}, "none")):
        assert history.find(with_reply(SAID), other).reason == "the tools or the template's arguments changed"


def test_the_longest_recorded_turn_is_continued():
    history = recorded()
    second = [*with_reply(SAID)]
    history.record(turn("t1", [1, 2, 3, 4, 5, 6], [7], reply("done")), second, NONE)
    assert history.find([*second, reply("done"), TASK], NONE).turn_id == "t1"
    edited = [SYSTEM, TASK, SAID, result("another result")]
    assert history.find(edited, NONE).turn_id == "t0"


def test_of_two_replies_that_read_alike_the_one_with_this_reasoning_is_continued_else_the_last():
    history = History()
    for k, reasoning in enumerate(["alpha", "beta"]):
        history.record(turn(f"t{k}", [1, 2], [3 + k], reply("hi", reasoning=reasoning)), [TASK], NONE)
    assert history.find([TASK, reply("hi", reasoning="alpha"), TASK], NONE).completion_ids_T == [3]
    assert history.find([TASK, reply("hi"), TASK], NONE).completion_ids_T == [4]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ('{"a": 1, "b": [1.0, "x"]}', '{"b":[1,"x"],"a":1}'),
        ('{"n": 12345678901234567890}', '{"n":12345678901234567000}'),
        ('{"n": -0.0}', '{"n":0}'),
        ('{"n": 1e3}', '{"n":1000}'),
        ('{"s": "\\ud83d"}', '{"s": "\ufffd"}'),
        ('{"s": "a\\/b\\u0041"}', '{"s":"a/bA"}'),
        ("", "{}"),
        ("not json ", "not json"),
    ],
)
def test_equal_arguments_in_two_spellings(a, b):
    assert canonical_arguments(a) == canonical_arguments(b)


@pytest.mark.parametrize(("a", "b"), [('{"a": "1"}', '{"a": 1}'), ('{"a": null}', "{}"), ('{"a": 0}', '{"a": false}')])
def test_different_arguments(a, b):
    assert canonical_arguments(a) != canonical_arguments(b)


def test_arguments_nested_beyond_any_reader_are_compared_as_text():
    deep = "[" * 100_000
    assert canonical_arguments(deep) == deep


def grown(num_turns, new_per_turn=40):
    """A conversation of `num_turns` turns, each prompt the one before with its reply and new tokens."""
    history, messages, ids = History(), [SYSTEM, TASK], list(range(100))
    for k in range(num_turns):
        said = reply(f"step {k}", [call("sh", {"k": k}, f"c{k}")])
        completion = [1000 + k, 7]
        history.record(turn(f"t{k}", ids, completion, said), messages, NONE)
        ids = [*ids, *completion, *range(k, k + new_per_turn)]
        messages = [*messages, said, result(f"result {k}", f"c{k}")]
    return history, messages, ids


def test_ids_come_back_whole_from_what_is_shared():
    history, messages, ids = grown(60)
    found = history.find(messages, NONE)
    assert found.turn_id == "t59"
    assert found.prompt_ids_P + found.completion_ids_T == ids[: len(ids) - 40]


def test_a_session_holds_each_token_once():
    history, _, ids = grown(200)
    assert history.num_ids == len(ids) - 40  # the sum of all prompts would be a hundred times that


def test_a_prompt_that_was_rendered_anew_shares_what_it_has_in_common():
    history = recorded()
    history.record(turn("t1", [1, 2, 3, 9, 9], [8], reply("done")), with_reply(SAID), NONE)
    found = history.find([*with_reply(SAID), reply("done"), TASK], NONE)
    assert (found.prompt_ids_P, found.completion_ids_T) == ([1, 2, 3, 9, 9], [8])
    assert history.num_ids == 5 + 3


def test_what_does_not_fit_is_not_kept():
    history = History(max_ids=6)
    history.record(turn("t0", [1, 2, 3], [4], SAID), [SYSTEM, TASK], NONE)
    history.record(turn("t1", [1, 2, 3, 4, 5, 6, 7], [8, 9], reply("done")), with_reply(SAID), NONE)
    assert history.num_ids <= 6
    assert history.find([*with_reply(SAID), reply("done"), TASK], NONE).reason.startswith("message 4 is a reply")


def test_a_lookup_costs_what_the_request_costs_not_what_the_session_did():
    def cost(num_turns):
        history, messages, _ = grown(num_turns, 1)
        request = messages[:12]
        best = 1.0
        for _ in range(20):
            started = time.perf_counter()
            history.find(request, NONE)
            best = min(best, time.perf_counter() - started)
        return best

    assert cost(600) < 4 * cost(20)

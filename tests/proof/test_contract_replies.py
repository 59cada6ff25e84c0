"""Every kind of reply, in every dialect: streamed, whole and recorded are one and the same."""

import itertools
import json
from pathlib import Path

import pytest

from capture_proxy.engines.scripted import Reply
from capture_proxy.types import Turn
from tests.proof.audit import LedgerEngine, audit
from tests.proof.clients import Said
from tests.proof.gateways import BASH, DIALECTS, NOW, bench

ARGUMENTS = {"command": 'printf "é🙂\\n" | cat', "n": 1.5, "deep": {"a": [None, True, {"b": ""}]}}
REPLIES = {
    "text": Reply("Hello there."),
    "pieces": Reply(["He", "llo", " ", "\n\n", "there", "."]),
    "reasoning": Reply("Four.", reasoning="two and two"),
    "reasoning alone": Reply(reasoning="only a thought"),
    "a tool call": Reply("I will look.", tool_calls=[("bash", {"command": "ls"})]),
    "a tool call alone": Reply(tool_calls=[("bash", ARGUMENTS)]),
    "parallel calls": Reply(
        ["I will ", "do both.\n"], tool_calls=[("bash", {"command": "ls"}), ("bash", {"command": "ls"}), ("now", {})]
    ),
    "a call without arguments": Reply(tool_calls=[("now", {})]),
    "thought, text and calls": Reply(
        "\nSo:\n\n", reasoning="hm\n", tool_calls=[("bash", {"command": "a\nb\t\\"}), ("now", {})]
    ),
    "nothing at all": Reply(""),
    "white space": Reply([" ", "\n", "\t "]),
    "unicode": Reply(["naïve ", "🙂👩‍👩‍👧", "\u2028\u0085\ufeff", "\u0000\u001f\x7f", "日本"]),
    "what looks like the wire": Reply(
        ["data: [DONE]\n\n", "event: message_stop\ndata: {}\n\n", '"}]}', "\r\n\r\n0\r\n\r\n", "</think>"]
    ),
    "long": Reply(["x" * 70_000, "y" * 70_000]),
}


def expected(reply: Reply, turn: Turn) -> tuple[object, ...]:
    text = reply.content if isinstance(reply.content, str) else "".join(reply.content)
    finish = "tool_calls" if reply.tool_calls else "stop"
    usage = (len(turn.prompt_ids_P), len(turn.completion_ids_T))
    return text, reply.reasoning, list(reply.tool_calls), finish, usage


def check_recorded(turn: Turn, said: Said) -> None:
    """The record of the message is what the agent was given."""
    assert (turn.message.get("content") or "") == said.text
    assert (turn.message.get("reasoning_content") or "") == said.reasoning
    recorded = [c["function"] for c in turn.message.get("tool_calls") or []]
    assert [(c["name"], json.loads(c["arguments"])) for c in recorded] == said.calls


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_streamed_whole_and_recorded_are_one_reply(tmp_path: Path, dialect: str, name: str) -> None:
    reply = REPLIES[name]
    engine = LedgerEngine([reply])
    async with bench(dialect, engine, tmp_path) as b:
        for stream in (True, False):
            agent = await b.agent(f"stream-{stream}", tools=[BASH, NOW])
            said = await agent.say("Well?").ask(stream)
            capture = await b.capture(f"stream-{stream}")
            (turn,) = capture.turns
            assert said.form == expected(reply, turn)
            check_recorded(turn, said)
            assert turn.dialect == dialect and turn.finish_reason == said.finish
            (row,) = audit(capture, engine.ledger)
            assert row.num_trained == len(turn.completion_ids_T) > 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("reply", "cap", "text", "reasoning"),
    [
        (Reply("abcdefghij"), 4, "abcd", ""),
        (Reply(["🙂", "🙂🙂"]), 6, "🙂", ""),  # cut inside a character: half of it is nobody's text
        (Reply("answer", reasoning="thought"), 10, "", "tho"),
        (Reply("abc", tool_calls=[("bash", {"command": "ls"})]), 20, "abc", ""),  # half a call is no call
        (Reply("abc"), 1, "a", ""),
    ],
    ids=["text", "emoji", "reasoning", "call", "one token"],
)
async def test_a_reply_cut_by_its_cap_says_so(
    tmp_path: Path, dialect: str, stream: bool, reply: Reply, cap: int, text: str, reasoning: str
) -> None:
    engine = LedgerEngine([reply])
    async with bench(dialect, engine, tmp_path) as b:
        agent = await b.agent(tools=[BASH], max_tokens=cap)
        said = await agent.say("Well?").ask(stream)
        capture = await b.capture()
    (turn,) = capture.turns
    assert (said.text, said.reasoning, said.calls, said.finish) == (text, reasoning, [], "length")
    assert said.usage == (len(turn.prompt_ids_P), cap)
    check_recorded(turn, said)
    audit(capture, engine.ledger)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_tool_loop_is_one_row_whose_prompts_extend_each_other(
    tmp_path: Path, dialect: str, stream: bool
) -> None:
    replies = [
        Reply("I look.\n\n", reasoning="first", tool_calls=[("bash", ARGUMENTS), ("now", {})]),
        Reply(reasoning="second", tool_calls=[("now", {})]),
        Reply([" Two ", "files.", "🙂"]),
        Reply("Bye."),
    ]
    engine = LedgerEngine(replies)
    async with bench(dialect, engine, tmp_path) as b:
        agent = await b.agent(tools=[BASH, NOW])
        agent.system = "Be brief."
        said = await agent.say("How many files?").ask(stream)
        said = await agent.echo(said, ["a\nb é🙂", "12:00"]).ask(stream)
        said = await agent.echo(said, [""]).ask(not stream)
        said = await agent.echo(said).say("Thanks.").ask(stream)
        capture = await b.capture()
    assert said.text == "Bye."
    for before, after in itertools.pairwise(capture.turns):
        whole = [*before.prompt_ids_P, *before.completion_ids_T]
        assert list(after.prompt_ids_P[: len(whole)]) == whole
    (row,) = audit(capture, engine.ledger)
    assert row.turn_ids == [t.turn_id for t in capture.turns]
    assert row.num_trained == sum(len(t.completion_ids_T) for t in capture.turns)
    assert engine.requests[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert [m["role"] for m in engine.requests[1].messages] == ["system", "user", "assistant", "tool", "tool"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_prompts_keep_every_character(tmp_path: Path, dialect: str) -> None:
    text = "naïve 🙂 \u2028 \u0000 日本 \\u00e9 </s> <|im_end|> data: [DONE]"
    engine = LedgerEngine(["ok"])
    async with bench(dialect, engine, tmp_path) as b:
        agent = await b.agent()
        await agent.say(text).ask(True)
        audit(await b.capture(), engine.ledger)
    assert engine.requests[0].messages == [{"role": "user", "content": text}]


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d != "openai_chat"])  # that vendor has no such route
async def test_counted_tokens_are_the_prompt_that_is_sent(tmp_path: Path, dialect: str) -> None:
    engine = LedgerEngine(["ok"])
    async with bench(dialect, engine, tmp_path) as b:
        agent = await b.agent()
        agent.say("How long is this? é🙂")
        counted = await agent.count()
        await agent.ask(False)
        capture = await b.capture()
    (turn,) = capture.turns  # counting leaves no turn behind
    assert counted == len(turn.prompt_ids_P)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_each_sdk_lists_the_models(tmp_path: Path, dialect: str) -> None:
    async with bench(dialect, LedgerEngine(["ok"]), tmp_path) as b:
        agent = await b.agent()
        assert await agent.models() == ["scripted"]
        assert (await b.capture()).turns == []

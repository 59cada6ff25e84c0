"""The recorded traffic of every agent, sent to a real gateway: what is captured, what is trained, in how many rows.

A run in which the agent only appends to its history is one row. What `KNOWN` lists is another number, and why.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from capture_proxy.types import TurnStatus
from tests.harnesses.replaying import player
from tests.harnesses.traffic import FOLDER, Request, scenarios

AGENTS = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
DIALECTS = {
    "/v1/chat/completions": "openai_chat",
    "/v1/responses": "openai_responses",
    "/v1/messages": "anthropic",
    "/v1beta/models/": "gemini",
}
NO_TOOLS = "offers no tools"
AGAIN = "abandoned: asked again"
OWN_PROMPT = "one question under a system prompt of its own"


@dataclass(frozen=True)
class Known:
    """`rows`: the turns of each row; None = all trained turns are one. `sides`: turn -> how its reason begins."""

    why: str = ""
    rows: list[list[int]] | None = None
    sides: dict[int, str] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)  # request -> its status, where that is not 200


EACH_ITS_OWN = [[0], [1]]
PLAIN = Known()
THOUGHTS_GO = Known("drops its thoughts from the history", EACH_ITS_OWN)
RETRIED = Known("a reply broke off and was asked for again", None, {0: AGAIN})
TITLED = Known("asks for a title beside its work", None, {0: NO_TOOLS})
SUB_AGENT = Known("a sub-agent has a conversation of its own", [[0, 3], [1, 2]])
PROBED = Known("looks at the gateway's root first", refused={0: 404})
COMPACTS = "the engine of the recording said that its window is full"
KNOWN = {
    "aider": {
        "commit": Known("asks for a commit message", None, {1: OWN_PROMPT}),
        "drop1": RETRIED,
    },
    "claude-code": {
        "bare": PROBED,
        "old": PROBED,
        "json": Known("asks again, without a stream, for what came as JSON", None, {0: AGAIN, 2: AGAIN}),
        "sub": SUB_AGENT,
    },
    "codex": {
        "drop1": RETRIED,
        "usage": Known(COMPACTS, [[0], [6]], {**dict.fromkeys((1, 3, 5, 7), NO_TOOLS), 2: AGAIN, 4: AGAIN}),
    },
    "continue": {
        "anth": THOUGHTS_GO,
        "drop1": Known("joins the broken reply and the next one in its history", [[1], [2]], {0: AGAIN}),
    },
    "copilot-cli": {
        "anth": Known("trims the text before a call, with the Anthropic API", EACH_ITS_OWN),
        "drop1": RETRIED,
        "sub": SUB_AGENT,
        # Its summaries (tools offered, none allowed) were answered with the very words of the work.
        "usage": Known(COMPACTS, [[0, 1, 3, 4], [0, 2], [5, 6], [5, 7]]),
    },
    "gemini-cli": {
        "500x1": Known("a call failed and was made again", None, {0: AGAIN}, {0: 503}),
        "min": Known("asks a router which model to use", None, {0: NO_TOOLS}),
        "reasoning": THOUGHTS_GO,
    },
    "gptme": {
        "main": Known("adds a line end to the text before a call; names the talk", [[0], [2, 3, 4]], {1: NO_TOOLS})
    },
    "grok-cli": {"reasoning": THOUGHTS_GO},
    "kimi-code": {
        "openai_responses": Known("empties its thoughts, with the Responses API", EACH_ITS_OWN),
        "sub": SUB_AGENT,
    },
    "mini-swe-agent": {"500x1": Known("a call failed and was made again", None, {0: AGAIN}, {0: 503})},
    "mistral-vibe": {"drop1": RETRIED, "openai-responses": THOUGHTS_GO},
    "nanocoder": {"reasoning": THOUGHTS_GO},
    "opencode": {
        "bare": TITLED,
        "drop1": Known("keeps the broken reply in its history", [[2], [3]], {0: NO_TOOLS, 1: AGAIN}),
        "reasoning": TITLED,
        "resp": THOUGHTS_GO,
        "steps": Known(
            "adds a message of its own at its step limit, and takes it back", [[0, 1, n] for n in range(2, 8)]
        ),
        "sub": SUB_AGENT,
        "usage": Known("adds a message of its own at its step limit", [[0, 1, 2], [0, 1, 3]]),
    },
    "openhands": {
        "ctx": Known(
            "condenses for ever when the window is full",
            [],
            dict.fromkeys((1, 3, 5, 7), NO_TOOLS),
            dict.fromkeys((0, 2, 4, 6), 400),
        ),
        "reasoning": THOUGHTS_GO,
    },
    "pi": {"drop1": RETRIED},
    "qwen-code": {
        "drop1": Known("shows the broken reply once, then joins the two", [[1], [2]]),
        "sub": SUB_AGENT,
        "usage": Known(
            COMPACTS, [[0], [8]], {**dict.fromkeys((1, 3, 5, 7), NO_TOOLS), **dict.fromkeys((2, 4, 6), AGAIN)}
        ),
    },
}


@pytest.mark.parametrize("agent", AGENTS)
async def test_recorded_runs_are_captured_and_become_the_rows_that_they_are(agent: str, tmp_path: Path) -> None:
    runs = scenarios(agent)
    async with player(tmp_path) as played:
        for name, requests in runs.items():
            known = KNOWN.get(agent, {}).get(name, PLAIN)
            done = await played.play(name, requests)
            label = f"{agent} {name} ({known.why or 'appends only'})"
            assert done.statuses == [known.refused.get(number, 200) for number in range(len(requests))], label
            calls = [request for request in requests if request.is_call]
            assert [turn.dialect for turn in done.capture.turns] == [dialect_of(request) for request in calls], label
            found = {number: reason[: len(known.sides.get(number, reason))] for number, reason in done.sides.items()}
            assert found == known.sides, label
            sound = [
                i for i, request in enumerate(calls) if request.reply["status"] == 200 and not request.reply["cut"]
            ]
            trained = [i for i in sound if i not in known.sides]
            assert done.report.num_trained_turns == len(trained), label
            rows = known.rows if known.rows is not None else [trained]
            assert done.rows == rows, label
            for turn in done.capture.turns:
                said = calls[turn.index].reply
                if turn.status is TurnStatus.OK:
                    assert (turn.message.get("content") or "") == "".join(said["pieces"]), label
                    assert len(turn.message.get("tool_calls") or []) == len(said["calls"]), label


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_reply_that_is_lost_on_the_way_is_sampled_once(agent: str, tmp_path: Path) -> None:
    requests = scenarios(agent)["main"]
    async with player(tmp_path) as played:
        done = await played.play("lost", requests, loses=len(requests) - 1)
    assert done.num_sampled == len(done.capture.turns) == len(requests)
    assert all(turn.status is TurnStatus.OK for turn in done.capture.turns)


async def test_the_look_at_the_gateway_that_claude_code_begins_with_is_answered_at_once(tmp_path: Path) -> None:
    (look, *_) = scenarios("claude-code")["bare"]
    assert look.method == "HEAD"
    async with player(tmp_path) as played:
        before = time.monotonic()
        assert (await played.play("looks", [look])).statuses == [404]
        assert time.monotonic() - before < 3, "its connection was only given up as idle"


async def test_what_claude_code_counts_in_its_system_prompt_is_left_out(tmp_path: Path) -> None:
    billed = {
        name: requests
        for name, requests in scenarios("claude-code").items()
        if any("x-anthropic-billing-header" in str(request.body) for request in requests)
    }
    assert billed
    async with player(tmp_path) as played:
        for name, requests in billed.items():
            done = await played.play(name, requests)
            assert "x-anthropic-billing-header" not in str([turn.request for turn in done.capture.turns])


def dialect_of(request: Request) -> str:
    return next(dialect for path, dialect in DIALECTS.items() if request.path.startswith(path))

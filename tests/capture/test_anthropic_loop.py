"""Whole conversations as agents really hold them: what they rewrite between requests must not break the prefix."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.types import Capture, TurnStatus
from harness_trainer.learner.rows import build_rows
from tests.capture.serving import Served, served

MARK = {"cache_control": {"type": "ephemeral"}}
TOOLS: Any = [{"name": name, "description": "d", "input_schema": {"type": "object"}} for name in ("Bash", "Read")]
REMINDER = "<system-reminder>\nThe date is today.\n</system-reminder>\n"
SCRIPT: list[Reply | str] = [
    Reply(
        "\nI will look.\n\n", [("Bash", {"command": "ls   # café"}), ("Read", {"path": "a"})], reasoning="Let me think."
    ),
    Reply("", [("Bash", {"command": "cat b"})], reasoning="Again."),
    Reply(["So", " far."], [("Read", {})]),
    "Done.",
]


class ClaudeLike:
    """Changes from request to request what Claude Code changes; the conversation itself only grows."""

    def __init__(self, client: anthropic.AsyncAnthropic) -> None:
        self._client = client
        self.history: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": REMINDER}, {"type": "text", "text": "Write hello."}]},
            {"role": "system", "content": [{"type": "text", "text": "# Environment\nLinux"}]},
        ]
        self.num_requests = 0

    async def ask(self) -> Any:
        self.num_requests += 1
        sent = self.marked()
        line = f"x-anthropic-billing-header: cc_version=2.1.{self.num_requests}; cch={self.num_requests * 7919:x};"
        system = [{"type": "text", "text": line, **MARK}, {"type": "text", "text": "You are an agent."}]
        body: Any = {"model": "smol", "max_tokens": 4096, "system": system, "messages": sent, "tools": TOOLS}
        wishes: Any = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
        async with self._client.beta.messages.stream(**body, **wishes, metadata={"user_id": "u"}) as stream:
            message: Any = await stream.get_final_message()
        echoed = [block.model_dump(exclude_none=True) for block in message.content]
        self.history.append({"role": "assistant", "content": echoed})
        return message

    def marked(self) -> list[dict[str, Any]]:
        """The history as sent: the cache mark on the last block, and lone older blocks rewritten to plain strings."""
        sent: list[dict[str, Any]] = json.loads(json.dumps(self.history))
        for message in sent[:-1]:
            content = message["content"]
            if message["role"] != "assistant" and len(content) == 1 and content[0]["type"] == "text":
                message["content"] = content[0]["text"]
        if self.num_requests > 1 and sent[1]["role"] == "system" and isinstance(sent[1]["content"], list):
            sent[1]["content"] = sent[1]["content"][0]["text"]
        if isinstance(sent[-1]["content"], list):
            sent[-1]["content"][-1] |= MARK
        return sent

    def answer(self, message: Any) -> None:
        """One result for each call, the last call's first, with a reminder beside them."""
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": b.id, "content": f"ran {b.name}", "is_error": False}
            for b in reversed(message.content)
            if b.type == "tool_use"
        ]
        self.history.append({"role": "user", "content": [*results, {"type": "text", "text": REMINDER}]})


@pytest.fixture
async def gw(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(ScriptedEngine(SCRIPT), tmp_path / "s.sqlite") as served_gateway:
        yield served_gateway


async def agent(gw: Served) -> ClaudeLike:
    session = await gw.mint()
    return ClaudeLike(anthropic.AsyncAnthropic(base_url=gw.agent_url, api_key=session.token, max_retries=0))


def assert_one_lineage(capture: Capture) -> None:
    built = build_rows(capture)
    assert built.findings == []
    (row,) = built.rows
    assert row.turn_ids == [t.turn_id for t in capture.turns if t.trainable]
    assert row.num_trained == sum(len(t.completion_ids_T) for t in capture.turns if t.trainable)
    sampled = [i for i, m in zip(row.ids_N, row.mask_N, strict=True) if m]
    assert sampled == [i for t in capture.turns if t.trainable for i in t.completion_ids_T]
    for before, after in zip(capture.turns, capture.turns[1:], strict=False):
        whole = before.prompt_ids_P + before.completion_ids_T
        assert after.prompt_ids_P[: len(whole)] == whole


async def test_four_turns_of_a_claude_like_agent_are_one_row(gw: Served) -> None:
    claude = await agent(gw)
    for _ in range(3):
        message = await claude.ask()
        assert message.stop_reason == "tool_use"
        claude.answer(message)
    last = await claude.ask()
    assert last.stop_reason == "end_turn"
    capture = await gw.admin.capture("s1")
    assert len(capture.turns) == 4 and all(t.trainable for t in capture.turns)
    assert_one_lineage(capture)
    assert [m["role"] for m in capture.turns[1].request["messages"]] == [
        "system",
        "user",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    for turn in capture.turns:
        assert "x-anthropic-billing-header" not in json.dumps(turn.request)
        assert {"attribution_removed", "system_in_place", "thinking_asked"} <= {f.code for f in turn.findings}


async def test_the_raw_request_keeps_what_the_prompt_leaves_out(gw: Served) -> None:
    claude = await agent(gw)
    await claude.ask()
    raw = await gw.gateway.store.raw_request("s1-0000")
    assert raw is not None and b"x-anthropic-billing-header: cc_version=2.1.1" in raw and b"cache_control" in raw


async def test_a_retry_that_ends_with_the_partial_reply_extends_it(tmp_path: Path) -> None:
    script: list[Reply | str] = [Reply(["I will wri", "te it."], die_after=1), "write it.", Reply("Done.")]
    async with served(ScriptedEngine(script), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        client = anthropic.AsyncAnthropic(base_url=gw.agent_url, api_key=session.token, max_retries=0)
        history: list[Any] = [{"role": "user", "content": "Write hello."}]
        partial = ""
        with pytest.raises(anthropic.APIStatusError):
            async with client.messages.stream(model="m", max_tokens=99, messages=history) as stream:
                async for text in stream.text_stream:
                    partial += text
        history.append({"role": "assistant", "content": [{"type": "text", "text": partial}]})
        reply = await client.messages.create(model="m", max_tokens=99, messages=history)
        assert reply.content[0].text == "write it."  # type: ignore[union-attr]
        history += [{"role": "assistant", "content": reply.to_dict()["content"]}, {"role": "user", "content": "more"}]
        await client.messages.create(model="m", max_tokens=99, messages=history)
        capture = await gw.admin.capture("s1")
    assert [t.status for t in capture.turns] == [TurnStatus.FAILED, TurnStatus.OK, TurnStatus.OK]
    assert "prefill_closed" in {f.code for f in capture.turns[1].findings}
    assert_one_lineage(capture)


async def test_thinking_wishes_that_change_on_the_way_do_not_break_the_prefix(tmp_path: Path) -> None:
    async with served(ScriptedEngine(SCRIPT), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        client = anthropic.AsyncAnthropic(base_url=gw.agent_url, api_key=session.token, max_retries=0)
        history: list[Any] = [{"role": "user", "content": "go"}]
        for extra in ({"max_tokens": 8192}, {"max_tokens": 20000, "thinking": {"type": "disabled"}}):
            body: dict[str, Any] = {"model": "m", "messages": history, "tools": TOOLS, **extra}
            async with client.messages.stream(**body) as stream:
                message = await stream.get_final_message()
            results = [
                {"type": "tool_result", "tool_use_id": b.id, "content": []}
                for b in message.content
                if b.type == "tool_use"
            ]
            echoed = [b.model_dump(exclude_none=True) for b in message.content]
            history = [*history, {"role": "assistant", "content": echoed}, {"role": "user", "content": results}]
        assert_one_lineage(await gw.admin.capture("s1"))

"""Streams cut at every byte, on both sides, and bytes that arrive one at a time."""

import asyncio
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from capture_proxy.engines.scripted import Reply
from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.types import Turn, TurnStatus
from tests.capture.serving import listening, until
from tests.proof.audit import LedgerEngine, audit
from tests.proof.clients import Agent, BrokenReply
from tests.proof.gateways import BASH, DIALECTS, Bench, bench, opened
from tests.proof.upstream import Plan, Upstream, stream_bytes

by_dialect = pytest.mark.parametrize("dialect", DIALECTS)
# Each is written only after the turn is committed.
WHOLE = {
    "openai_chat": b"[DONE]",
    "openai_responses": b"event: response.completed",
    "anthropic": b"event: message_stop",
    "gemini": b'"finishReason"',
}
PARALLEL = 48


async def _read(b: Bench, agent: Agent, stream: bool, limit: int | None) -> bytes:
    """The first `limit` bytes of the body (None = all), after which the connection is dropped."""
    async with opened(b.gateway.agent_url, agent.wire(stream)) as (reader, _):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        if limit is None:
            return await reader.read(-1)
        return await reader.readexactly(limit)


def _marked(turn: Turn) -> int:
    return int(re.findall(r"cut at (\d+)", str(turn.request["messages"]))[-1])


@by_dialect
@pytest.mark.parametrize(
    ("stream", "reply", "step"),
    [
        (True, Reply(["a", "b\n"]), 1),
        (True, Reply(["a", "b\n"], reasoning="c", tool_calls=[("bash", {"x": 1})]), 13),
        (False, Reply(["a", "b\n"], tool_calls=[("bash", {"x": 1})]), 13),  # its body is written at once
    ],
    ids=["text", "call", "whole"],
)
async def test_an_agent_may_leave_at_every_byte_of_a_reply(
    tmp_path: Path, dialect: str, stream: bool, reply: Reply, step: int
) -> None:
    engine = LedgerEngine(
        lambda request: reply, piece_delay_s=0.004
    )  # so that cuts fall before, between and after the pieces
    received: dict[int, bytes] = {}
    async with bench(dialect, engine, tmp_path, hang_up_grace_s=0.0) as b:
        agent = await b.agent(tools=[BASH] if reply.tool_calls else [])
        length = len(await _read(b, agent.fresh().say("cut at 0"), stream, None))
        cuts = range(1, length, step)
        slots = asyncio.Semaphore(PARALLEL)

        async def leave(cut: int) -> None:
            async with slots:
                received[cut] = await _read(b, agent.fresh().say(f"cut at {cut:05d}"), stream, cut)

        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for cut in cuts:
                group.create_task(leave(cut))
        await until(lambda: engine.in_flight == 0 and b.gateway.gateway.sessions.num_in_flight == 0, 10)
        assert (await agent.fresh().say("still there?").ask(stream)).text == "ab\n"
        capture = await b.capture()
        stats = await b.gateway.admin.stats()
    turns = Counter(_marked(t) for t in capture.turns[:-1])
    assert turns == Counter([0, *cuts]), "not every call is recorded exactly once"
    assert {t.status for t in capture.turns} <= {TurnStatus.OK, TurnStatus.ABORTED}
    assert stats["in_flight"] == 0
    by_cut = {_marked(t): t for t in capture.turns[:-1]}
    for cut, data in received.items():
        if WHOLE[dialect] in data or not stream:
            assert by_cut[cut].status is TurnStatus.OK, f"an agent saw a whole reply that is not kept (byte {cut})"
    audit(capture, engine.ledger)


PLANS = {"text": Plan("«o»"), "call": Plan("«o»", [("bash", {})])}


def _planned(text: str) -> Plan:
    """The cut is in the prompt; odd ones are dropped connections, even ones bodies that just end."""
    plan = PLANS["call" if '"bash"' in text else "text"]
    found = re.search(r"cut at (\d+) (torn|ended)", text)
    return replace(plan, cut=int(found[1]), torn=found[2] == "torn") if found else plan


@by_dialect
@pytest.mark.parametrize("transport", ["generate", "chat"])
@pytest.mark.parametrize("name", PLANS)
async def test_an_engine_stream_cut_at_every_byte_is_an_error_or_whole(
    tmp_path: Path, dialect: str, transport: str, name: str
) -> None:
    plan = PLANS[name]
    upstream = Upstream(lambda prompt, asked: _planned(prompt))
    length = stream_bytes(plan, transport=transport)
    said: dict[int, object] = {}
    async with listening(upstream.app()) as url, bench(dialect, VllmEngine(url, transport=transport), tmp_path) as b:
        agent = await b.agent(tools=[BASH] if plan.calls else [])
        whole = (await agent.fresh().say("whole").ask(True)).form[:4]
        assert whole == (plan.text, "", plan.calls, "tool_calls" if plan.calls else "stop")
        slots = asyncio.Semaphore(8)

        async def ask(cut: int) -> None:
            how = "torn" if (cut + DIALECTS.index(dialect)) % 2 else "ended"
            async with slots:
                try:
                    said[cut] = (await agent.fresh().say(f"cut at {cut} {how}").ask(True)).form[:4]
                except (*agent.error_types, BrokenReply):
                    said[cut] = None

        # What reads the engine's stream is the same for all dialects; each has its own way to say that it broke.
        every = dialect == "openai_chat" and not plan.calls
        cuts = range(length) if every else [*range(0, length - 20, 19), *range(length - 20, length)]
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for cut in cuts:
                group.create_task(ask(cut))
        capture = await b.capture()
    assert {cut for cut, form in said.items() if form not in (None, whole)} == set(), "a broken reply looked whole"
    assert None in said.values()
    for turn in capture.turns[1:]:
        cut = _marked(turn)
        assert turn.trainable == (said[cut] is not None)
        assert turn.status is (TurnStatus.OK if said[cut] else TurnStatus.FAILED)
        if turn.trainable:
            assert bytes(turn.completion_ids_T[:-1]).decode() == plan.sampled
    audit(capture)


@by_dialect
@pytest.mark.parametrize("transport", ["generate", "chat"])
async def test_how_the_engines_bytes_are_split_changes_nothing(tmp_path: Path, dialect: str, transport: str) -> None:
    steps = [None, 1, 2, 3, 7, 64, 100_000]
    plan = Plan("naïve 🙂 «so».\n", [("bash", {"command": "echo é🙂"}), ("bash", {"command": ""})], num_pieces=9)

    def script(prompt: str, asked: int) -> Plan:
        return Plan(plan.text, plan.calls, plan.num_pieces, step=steps[int(prompt[-1])])

    async with (
        listening(Upstream(script).app()) as url,
        bench(dialect, VllmEngine(url, transport=transport), tmp_path) as b,
    ):
        agent = await b.agent()
        forms = [(await agent.fresh().say(f"split {i}").ask(True)).form for i in range(len(steps))]
        capture = await b.capture()
    assert forms == forms[:1] * len(steps)
    kept = [(list(t.completion_ids_T), t.logprobs_T, t.message.get("content"), t.trainable) for t in capture.turns]
    assert kept == kept[:1] * len(steps)
    assert kept[0][3] and bytes(kept[0][0][:-1]).decode() == plan.sampled
    audit(capture)

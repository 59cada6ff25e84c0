"""Time and concurrency: first bytes, silence, hang-ups, and many sessions at once."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from capture_proxy.engines.base import ChatRequest
from capture_proxy.engines.scripted import Reply
from capture_proxy.types import TurnStatus
from tests.capture.serving import until
from tests.proof.audit import LedgerEngine, audit
from tests.proof.gateways import BASH, DIALECTS, bench, opened

by_dialect = pytest.mark.parametrize("dialect", DIALECTS)
by_form = pytest.mark.parametrize("stream", [True, False])


@by_dialect
async def test_text_reaches_the_agent_while_the_engine_still_samples(tmp_path: Path, dialect: str) -> None:
    seen: list[str] = []
    gates = [asyncio.Event() for _ in range(5)]

    async def hold(piece: int) -> None:
        await gates[piece].wait()

    engine = LedgerEngine([Reply(["one ", "two ", "three"], tool_calls=[("bash", {})])], hold=hold)
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent(tools=[BASH])).say("hi")
        call = asyncio.create_task(agent.ask(True, seen.append))
        for piece, text in enumerate(["one ", "one two ", "one two three"]):
            gates[piece].set()
            await until(lambda text=text: "".join(seen) == text)
        assert engine.in_flight == 1 and not call.done()
        for gate in gates:
            gate.set()
        assert (await call).calls == [("bash", {})]
        audit(await b.capture(), engine.ledger)


@by_dialect
async def test_frames_that_keep_a_silent_stream_alive_are_no_part_of_the_reply(tmp_path: Path, dialect: str) -> None:
    async def hold(piece: int) -> None:
        await asyncio.sleep(0.08)

    reply = Reply(["one ", "two"], reasoning="hm", tool_calls=[("bash", {"command": "ls"})])
    engine = LedgerEngine([reply], hold=hold, first_delay_s=0.08)
    async with bench(dialect, engine, tmp_path, keepalive_s=0.01) as b:
        agent = (await b.agent(tools=[BASH])).say("hi")
        said = await agent.ask(True)
        assert (said.text, said.reasoning, said.calls) == ("one two", "hm", [("bash", {"command": "ls"})])
        (turn,) = (await b.capture()).turns
        assert turn.message["content"] == "one two"
        audit(await b.capture(), engine.ledger)


@by_dialect
@pytest.mark.parametrize("pieces", [[], ["one "]], ids=["before", "after the first token"])
async def test_a_silent_engine_still_sends_bytes(tmp_path: Path, dialect: str, pieces: list[str]) -> None:
    engine = LedgerEngine([Reply(pieces, stall=True)], first_delay_s=0.0 if pieces else 3600)
    async with bench(dialect, engine, tmp_path, keepalive_s=0.02) as b:
        agent = (await b.agent()).say("hi")
        async with opened(b.gateway.agent_url, agent.wire(True)) as (reader, _):
            async with asyncio.timeout(3):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                frames = [await reader.read(65536) for _ in range(5)]
        assert all(frames)
        await until(lambda: engine.in_flight == 0)


@by_form
@by_dialect
@pytest.mark.parametrize("sampled", [0, 1, 2], ids=["queued", "first token", "later"])
async def test_hanging_up_stops_the_engine_and_leaves_an_aborted_turn(
    tmp_path: Path, dialect: str, stream: bool, sampled: int
) -> None:
    reply = Reply(["one ", "two "][:sampled], stall=True)
    engine = LedgerEngine([reply], first_delay_s=0.0 if sampled else 3600)
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent()).say("hi")
        async with opened(b.gateway.agent_url, agent.wire(stream)):
            await until(lambda: engine.in_flight == 1)
            await until(lambda: len(engine.ledger[0].ids) >= 4 * sampled)
        start = time.monotonic()
        await until(lambda: engine.in_flight == 0)
        assert time.monotonic() - start < 2
        await until(lambda: b.gateway.gateway.sessions.num_in_flight == 0)
        capture = await b.capture()
        stats = await b.gateway.admin.stats()
    (turn,) = capture.turns
    assert turn.status is TurnStatus.ABORTED and not turn.trainable
    assert bytes(i for i in turn.completion_ids_T if i < 256) == b"one two "[: 4 * sampled]
    assert stats["in_flight"] == 0
    audit(capture, engine.ledger)


@by_dialect
async def test_a_half_sent_request_leaves_nothing_behind(tmp_path: Path, dialect: str) -> None:
    engine = LedgerEngine()
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent()).say("hi")
        wire = agent.wire(True)
        whole = json.dumps(wire.body).encode()
        for cut in (0, 1, len(whole) // 2, len(whole) - 1):
            _, writer = await asyncio.open_connection(*b.gateway.agent_url.removeprefix("http://").split(":"))
            head = [f"POST {wire.path} HTTP/1.1", "host: x", f"content-length: {len(whole)}"]
            head += [f"{k}: {v}" for k, v in wire.headers.items()]
            writer.write("\r\n".join([*head, "", ""]).encode() + whole[:cut])
            await writer.drain()
            writer.close()
        assert (await agent.ask(True)).text == "ok"
        capture = await b.capture()
    assert len(capture.turns) == 1 == len(engine.requests)
    audit(capture, engine.ledger)


@by_dialect
async def test_many_sessions_at_once_never_mix(tmp_path: Path, dialect: str) -> None:
    num_sessions, num_turns = 24, 4

    def script(request: ChatRequest) -> Reply:
        marker = str(request.messages[0]["content"]).split()[0]
        num_replies = sum(m["role"] == "assistant" for m in request.messages)
        calls = [("bash", {"command": marker})] if num_replies < num_turns - 1 else []
        return Reply([f"{marker} says ", f"{num_replies}"], reasoning=f"I am {marker}", tool_calls=calls)

    engine = LedgerEngine(script, piece_delay_s=0.001)
    async with bench(dialect, engine, tmp_path) as b:

        async def live(number: int) -> None:
            marker = f"marker-{number:03d}"
            agent = (await b.agent(marker, tools=[BASH])).say(f"{marker} begins")
            for turn in range(num_turns):
                said = await agent.ask((number + turn) % 2 == 0)
                assert (said.text, said.reasoning) == (f"{marker} says {turn}", f"I am {marker}")
                assert all(args == {"command": marker} for _, args in said.calls)
                agent.echo(said, [f"{marker} result"] * len(said.calls))

        async with asyncio.TaskGroup() as group:
            for number in range(num_sessions):
                group.create_task(live(number))
        for number in range(num_sessions):
            capture = await b.capture(f"marker-{number:03d}")
            (row,) = audit(capture, engine.ledger)
            text = bytes(i for i in row.ids_N if i < 256).decode()
            assert len(capture.turns) == num_turns
            assert set(re.findall(r"marker-\d+", text)) == {f"marker-{number:03d}"}
        stats = await b.gateway.admin.stats()
    assert stats["turns"]["ok"] == num_sessions * num_turns and stats["in_flight"] == 0


@by_dialect
async def test_of_two_attempts_with_equal_calls_only_the_one_that_was_echoed_is_trained(
    tmp_path: Path, dialect: str
) -> None:
    calls = [("bash", {"command": "ls"})]
    engine = LedgerEngine([Reply("First.", tool_calls=calls), Reply("Second.", tool_calls=calls), "done"])
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent(tools=[BASH])).say("hi")
        await agent.ask(True)
        said = await agent.ask(False)
        await agent.echo(said, ["out"]).ask(True)
        capture = await b.capture()
    assert said.text == "Second."
    assert [t.trainable for t in capture.turns] == [False, True, True]
    (row,) = audit(capture, engine.ledger)
    assert row.turn_ids == [t.turn_id for t in capture.turns[1:]]

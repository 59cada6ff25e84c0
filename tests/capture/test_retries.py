"""Requests that are sent again: what is joined, what is replayed, and what is sampled anew."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineError
from capture_proxy.types import Session, TurnStatus
from tests.capture.serving import Served, served, until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "messages": USER}
RETRY = {"x-stainless-retry-count": "1"}


class Gate:
    """Holds every reply of a scripted engine before its second piece."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def hold(self, piece: int) -> None:
        if piece == 1:
            await self.open.wait()


async def ask(gw: Served, session: Session, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    async with gw.http(session) as http:
        return await http.post(CHAT, json=BODY | more, headers=headers)


async def drop(call: asyncio.Task[httpx.Response]) -> None:
    """Close the connection of a call in progress."""
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


def text(response: httpx.Response) -> str:
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        return response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("headers", [{}, RETRY])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_retry_after_a_dropped_connection_joins_the_call_in_flight(
    tmp_path: Path, stream: bool, headers: dict[str, str]
) -> None:
    gate = Gate()
    engine = ScriptedEngine([Reply(["a", "b"]), "another"], hold=gate.hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint(max_turns=1)
        first = asyncio.create_task(ask(gw, session, stream=stream))
        await until(lambda: engine.in_flight)
        await drop(first)
        again = asyncio.create_task(ask(gw, session, headers, stream=stream))
        await until(lambda: gw.gateway.turns.metrics.retries.total(how="joined"))
        gate.open.set()
        response = await again
        (turn,) = (await gw.admin.capture("s1")).turns
        stats = await gw.admin.stats()
    assert response.status_code == 200 and len(engine.requests) == 1 and engine.num_aborted == 0
    if stream:  # everything from the start, also what the first connection had been sent
        assert '"content":"a' in text(response) and "b" in text(response)
    else:
        assert text(response) == "ab"
    assert turn.status is TurnStatus.OK and turn.trainable and stats["retries"]["joined"] == 1


async def test_a_retry_header_joins_although_the_first_connection_still_looks_open(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine([Reply(["a", "b"])], hold=gate.hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        first = asyncio.create_task(ask(gw, session))
        await until(lambda: engine.in_flight)
        again = asyncio.create_task(ask(gw, session, RETRY))
        await asyncio.sleep(0.05)
        gate.open.set()
        one, two = await asyncio.gather(first, again)
    assert text(one) == text(two) == "ab" and len(engine.requests) == 1


async def test_an_equal_body_beside_an_open_connection_is_a_sibling(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine([Reply(["a", "b"]), Reply(["c", "d"])], hold=gate.hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        both = [asyncio.create_task(ask(gw, session)) for _ in range(2)]
        await until(lambda: engine.in_flight == 2)
        gate.open.set()
        replies = await asyncio.gather(*both)
        turns = (await gw.admin.capture("s1")).turns
    assert sorted(map(text, replies)) == ["ab", "cd"] and len(turns) == 2


async def test_two_siblings_that_are_both_retried_each_go_on(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine([Reply(["a", "b"]), Reply(["c", "d"])], hold=gate.hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        both = [asyncio.create_task(ask(gw, session)) for _ in range(2)]
        await until(lambda: engine.in_flight == 2)
        for call in both:
            await drop(call)
        await asyncio.sleep(0.05)
        again = [asyncio.create_task(ask(gw, session, RETRY)) for _ in range(2)]
        await asyncio.sleep(0.05)
        gate.open.set()
        replies = await asyncio.gather(*again)
    assert sorted(map(text, replies)) == ["ab", "cd"] and len(engine.requests) == 2


async def test_a_reply_that_was_kept_but_never_sent_is_read_from_the_store(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine([Reply(["a", "b"], [("bash", {"x": 1})]), "another"], hold=gate.hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint(max_turns=1)
        first = asyncio.create_task(ask(gw, session, stream=True))
        await until(lambda: engine.in_flight)
        await drop(first)
        gate.open.set()
        await until(lambda: not gw.gateway.sessions.num_in_flight)
        response = await ask(gw, session, stream=True)  # in a session whose budget is spent
        changed = await ask(gw, session, stream=True, user="me")
        turns = (await gw.admin.capture("s1")).turns
        stats = await gw.admin.stats()
    assert response.status_code == 200 and '"name":"bash"' in response.text
    assert changed.status_code == 403  # another body is another call
    assert len(turns) == 1 and len(engine.requests) == 1 and stats["retries"]["replayed"] == 1


async def test_after_a_whole_reply_only_a_retry_header_gets_it_again(tmp_path: Path) -> None:
    engine = ScriptedEngine(["one", "two", "three"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        replies = [text(await ask(gw, session, headers)) for headers in ({}, RETRY, RETRY, {}, RETRY)]
    assert replies == ["one", "one", "one", "two", "two"]


async def test_a_changed_last_message_is_never_joined(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine([Reply(["a", "b"]), Reply(["c", "d"])], hold=gate.hold)
    async with served(engine, tmp_path / "s.sqlite", hang_up_grace_s=0.05) as gw:
        session = await gw.mint()
        first = asyncio.create_task(ask(gw, session))
        await until(lambda: engine.in_flight)
        await drop(first)
        changed = asyncio.create_task(ask(gw, session, RETRY, messages=[{"role": "user", "content": "hi!"}]))
        await until(lambda: engine.num_aborted)
        gate.open.set()
        assert text(await changed) == "cd"
        turns = (await gw.admin.capture("s1")).turns
    assert sorted(t.status.value for t in turns) == ["aborted", "ok"]
    assert [t.trainable for t in turns if t.status is TurnStatus.ABORTED] == [False]


async def test_a_retry_that_cannot_be_read_leaves_the_history_as_it_is(tmp_path: Path) -> None:
    engine = ScriptedEngine(["one", "two"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        await ask(gw, session)
        broken = await ask(gw, session, RETRY, n=3)
        before = (await gw.admin.capture("s1")).turns
        assert text(await ask(gw, session, RETRY)) == "one"
    assert broken.status_code == 400 and len(before) == 1


@pytest.mark.parametrize("headers", [{}, RETRY])
async def test_retries_after_engine_errors_are_sampled_anew(tmp_path: Path, headers: dict[str, str]) -> None:
    engine = ScriptedEngine(["good"], faults={i: EngineError("500") for i in range(5)})
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint(max_turns=1)
        codes = [(await ask(gw, session, headers)).status_code for _ in range(6)]
        capture = await gw.admin.capture("s1")
    assert codes == [502] * 5 + [200]
    assert [t.trainable for t in capture.turns] == [False] * 5 + [True] and capture.session.last_fault is None


async def test_a_retry_of_a_failed_second_attempt_does_not_get_the_first_reply(tmp_path: Path) -> None:
    engine = ScriptedEngine(["first", "x", "third"], faults={1: EngineError("500")})
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        assert text(await ask(gw, session)) == "first"
        assert (await ask(gw, session)).status_code == 502
        assert text(await ask(gw, session, RETRY)) == "third"


async def test_a_hang_up_without_retry_aborts_within_two_seconds_and_a_late_retry_is_sampled(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine([Reply(["a", "b"]), "late"], hold=gate.hold)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        first = asyncio.create_task(ask(gw, session))
        await until(lambda: engine.in_flight)
        await drop(first)
        await asyncio.sleep(0.5)
        assert engine.num_aborted == 0  # within the grace
        await until(lambda: engine.num_aborted, 1.4)
        await until(lambda: not gw.gateway.sessions.num_in_flight)
        gate.open.set()
        assert text(await ask(gw, session, RETRY)) == "late"
        turns = (await gw.admin.capture("s1")).turns
    assert [t.status for t in turns] == [TurnStatus.ABORTED, TurnStatus.OK]


async def test_the_grace_starts_anew_when_the_retry_hangs_up_as_well(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine([Reply(["a", "b"])], hold=gate.hold)
    async with served(engine, tmp_path / "s.sqlite", hang_up_grace_s=0.3) as gw:
        session = await gw.mint()
        for _ in range(3):
            call = asyncio.create_task(ask(gw, session, stream=True))
            await asyncio.sleep(0.2)
            await drop(call)
        assert len(engine.requests) == 1 and engine.num_aborted == 0
        await until(lambda: engine.num_aborted, 2)
        await until(lambda: not gw.gateway.sessions.num_in_flight)
        (turn,) = (await gw.admin.capture("s1")).turns
    assert turn.status is TurnStatus.ABORTED and turn.message["content"] == "a"


async def test_equal_bodies_of_two_sessions_never_meet(tmp_path: Path) -> None:
    engine = ScriptedEngine(["one", "two"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        first, second = await gw.mint("a"), await gw.mint("b")
        assert text(await ask(gw, first)) == "one"
        assert text(await ask(gw, second, RETRY)) == "two"


@pytest.mark.parametrize("headers", [{}, RETRY])
async def test_a_restarted_gateway_answers_the_last_request_from_the_store_once(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    async with served(ScriptedEngine(["one"]), tmp_path / "s.sqlite") as gw:
        session = await gw.mint(max_turns=2)
        await ask(gw, session)
    engine = ScriptedEngine(["two"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        assert text(await ask(gw, session, headers)) == "one"
        assert engine.requests == []
        assert text(await ask(gw, session)) == "two"
        assert len((await gw.admin.capture("s1")).turns) == 2


async def test_a_restarted_gateway_samples_what_was_asked_before_the_last_request(tmp_path: Path) -> None:
    later = [{"role": "user", "content": "later"}]
    async with served(ScriptedEngine(["one", "two"]), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        await ask(gw, session)
        await ask(gw, session, messages=later)
    async with served(ScriptedEngine(["three"]), tmp_path / "s.sqlite") as gw:
        assert text(await ask(gw, session)) == "three"  # its reply was used: a sibling
        assert text(await ask(gw, session, messages=later)) == "two"


async def test_a_retry_that_comes_while_the_call_is_being_aborted_is_sampled(tmp_path: Path) -> None:
    gate, ending = Gate(), asyncio.Event()

    class SlowToEnd(ScriptedEngine):
        async def sample(self, request: Any) -> Any:
            try:
                async for event in super().sample(request):
                    yield event
            finally:
                ending.set()
                await asyncio.sleep(0.3)

    engine = SlowToEnd([Reply(["a", "b"]), "again"], hold=gate.hold)
    async with served(engine, tmp_path / "s.sqlite", hang_up_grace_s=0.05) as gw:
        session = await gw.mint()
        first = asyncio.create_task(ask(gw, session))
        await until(lambda: engine.in_flight)
        await drop(first)
        await asyncio.wait_for(ending.wait(), 3)
        gate.open.set()
        response = await ask(gw, session, RETRY)
        turns = (await gw.admin.capture("s1")).turns
    assert text(response) == "again"
    assert sorted(t.status.value for t in turns) == ["aborted", "ok"]

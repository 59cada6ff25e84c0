"""Every way a call can be refused or fail, in the shape and with the exception that each vendor's SDK knows."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.engines.scripted import Reply
from capture_proxy.errors import BadRequest, EngineError, EngineUnreachable
from capture_proxy.types import TurnStatus
from tests.capture.serving import until
from tests.proof.audit import LedgerEngine, audit
from tests.proof.clients import Agent, BrokenReply
from tests.proof.gateways import BASH, DIALECTS, Bench, bench, check_error

by_dialect = pytest.mark.parametrize("dialect", DIALECTS)
by_form = pytest.mark.parametrize("stream", [True, False])


async def refused(agent: Agent, stream: bool) -> int:
    """Ask; the SDK must raise its own error. Returns the status that it names."""
    with pytest.raises(agent.error_types) as caught:
        await agent.ask(stream)
    return int(getattr(caught.value, "status_code", None) or getattr(caught.value, "code", None) or 0)


async def post(b: Bench, agent: Agent, stream: bool, content: bytes | None = None, **options: Any) -> tuple[int, str]:
    """(status, message) of a refused request that is sent without an SDK; its shape is checked."""
    wire = agent.wire(stream)
    path, headers = options.pop("path", wire.path), wire.headers | options.pop("headers", {})
    method = options.pop("method", "POST")
    async with b.gateway.http() as http:
        response = await http.request(
            method, path, content=wire.raw() if content is None else content, headers=headers, **options
        )
    assert response.headers["content-type"].startswith("application/json")
    return response.status_code, check_error(b.dialect, response.content, response.status_code)


@by_form
@by_dialect
async def test_an_unknown_token_is_401(tmp_path: Path, dialect: str, stream: bool) -> None:
    engine = LedgerEngine()
    async with bench(dialect, engine, tmp_path) as b:
        known = await b.agent()
        stranger = type(known)(b.gateway.agent_url, "sk-unknown").say("hi")
        assert await refused(stranger, stream) == 401
        status, _ = await post(b, stranger, stream)
        assert status == 401
        await stranger.close()
    assert engine.requests == []


@by_form
@by_dialect
async def test_a_sealed_session_is_403(tmp_path: Path, dialect: str, stream: bool) -> None:
    engine = LedgerEngine()
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent()).say("hi")
        await agent.ask(stream)
        await b.gateway.admin.seal("s1")
        assert await refused(agent, stream) == 403
        status, message = await post(b, agent, stream)
        assert status == 403 and "sealed" in message
        capture = await b.capture()
    assert len(capture.turns) == 1
    audit(capture, engine.ledger)


@by_form
@by_dialect
async def test_a_spent_budget_and_a_passed_deadline_are_403(tmp_path: Path, dialect: str, stream: bool) -> None:
    engine = LedgerEngine()
    async with bench(dialect, engine, tmp_path) as b:
        spent = (await b.agent("spent", max_turns=1, tools=[BASH])).say("hi")
        said = await spent.ask(stream)
        spent.echo(said).say("more")
        assert await refused(spent, stream) == 403
        late = (await b.agent("late", deadline=time.time() - 1)).say("hi")
        assert await refused(late, stream) == 403
        assert (await b.gateway.admin.session("spent")).limit_hit == "max_turns"
        assert (await b.gateway.admin.session("late")).limit_hit == "deadline"
        audit(await b.capture("spent"), engine.ledger)
        audit(await b.capture("late"), [])


@by_form
@by_dialect
async def test_a_session_may_end_with_a_last_message_instead(tmp_path: Path, dialect: str, stream: bool) -> None:
    engine = LedgerEngine([Reply("work", tool_calls=[("bash", {})])])
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent(max_turns=1, at_limit="reply", tools=[BASH])).say("hi")
        said = await agent.ask(stream)
        agent.echo(said, ["done"])
        for _ in range(3):
            last = await agent.ask(stream)
            assert last.calls == [] and last.text and last.finish == "stop"
        capture = await b.capture()
    assert len(engine.requests) == 1
    assert [t.trainable for t in capture.turns if t.trainable] == [True]
    audit(capture, engine.ledger)


@by_form
@by_dialect
async def test_a_prompt_that_fills_the_window_is_400_and_the_rollout_truncated(
    tmp_path: Path, dialect: str, stream: bool
) -> None:
    engine = LedgerEngine(max_model_len=50)
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent()).say("x" * 100)
        assert await refused(agent, stream) == 400
        status, message = await post(b, agent, stream)
        session = await b.gateway.admin.session("s1")
        audit(await b.capture(), engine.ledger)
    assert status == 400
    # What each vendor's agents look for before they compact their history.
    wanted = {"anthropic": "prompt is too long", "gemini": "token"}
    assert wanted.get(dialect, "") in message
    assert session.limit_hit == "context_length" and session.last_fault is None


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d.startswith("openai")])  # others have no such code
async def test_openai_clients_are_told_the_code_of_a_full_window(tmp_path: Path, dialect: str) -> None:
    async with bench(dialect, LedgerEngine(max_model_len=50), tmp_path) as b:
        agent = (await b.agent()).say("x" * 100)
        with pytest.raises(agent.error_types) as caught:
            await agent.ask(True)
    assert getattr(caught.value, "code", None) == "context_length_exceeded"


@by_form
@by_dialect
async def test_an_engine_that_refuses_or_fails_is_an_http_error_of_its_kind(
    tmp_path: Path, dialect: str, stream: bool
) -> None:
    faults = {0: EngineError("boom"), 1: EngineUnreachable("nobody there"), 2: BadRequest("the template refuses")}
    engine = LedgerEngine(["fine"], faults=faults)
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent()).say("hi")
        assert await refused(agent, stream) >= 500
        assert (await b.gateway.admin.session("s1")).last_fault
        assert await refused(agent, stream) >= 500
        assert await refused(agent, stream) == 400
        said = await agent.ask(stream)
        assert (await b.gateway.admin.session("s1")).last_fault is None
        capture = await b.capture()
    assert said.text == "fine"
    assert [t.status for t in capture.turns] == [TurnStatus.FAILED] * 3 + [TurnStatus.OK]
    audit(capture, engine.ledger)


@by_form
@by_dialect
@pytest.mark.parametrize("die_after", [0, 1, 2])
async def test_an_engine_that_dies_in_the_middle_never_looks_like_a_whole_reply(
    tmp_path: Path, dialect: str, stream: bool, die_after: int
) -> None:
    engine = LedgerEngine([Reply(["one ", "two "], tool_calls=[("bash", {})], die_after=die_after), "whole"])
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent(tools=[BASH])).say("hi")
        with pytest.raises((*agent.error_types, BrokenReply)):
            await agent.ask(stream)
        said = await agent.ask(stream)
        capture = await b.capture()
    assert said.text == "whole"
    broken, whole = capture.turns
    assert broken.status is TurnStatus.FAILED and not broken.trainable
    assert bytes(broken.completion_ids_T) == b"one two "[: 4 * die_after]
    assert whole.trainable
    audit(capture, engine.ledger)


@by_form
@by_dialect
async def test_what_is_wrong_with_the_http_is_said_in_the_dialect(tmp_path: Path, dialect: str, stream: bool) -> None:
    engine = LedgerEngine()
    async with bench(dialect, engine, tmp_path, max_body=10_000) as b:
        agent = (await b.agent()).say("hi")
        path = agent.wire(stream).path
        assert (await post(b, agent, stream, path="/v1/nowhere"))[0] == 404
        assert (await post(b, agent, stream, path="/"))[0] == 404
        assert (await post(b, agent, stream, path=path.replace("/v1", "/v1/v1")))[0] == 404
        assert (await post(b, agent, stream, method="PUT"))[0] in (404, 405)
        assert (await post(b, agent, stream, method="DELETE", content=b""))[0] in (404, 405)
        assert (await post(b, agent, stream, content=b" " * 20_000))[0] == 413
        assert (await post(b, agent, stream, headers={"content-encoding": "foo"}))[0] == 415
        assert (await post(b, agent, stream, headers={"content-encoding": "gzip"}))[0] == 400
        for broken in (b"", b"null", b"[]", b"\xff\xfe", b'{"a":', b'"text"', b"[" * 9_999, json.dumps({}).encode()):
            assert (await post(b, agent, stream, content=broken))[0] == 400
        assert engine.requests == []
        assert (await agent.ask(stream)).text == "ok"  # and the session is none the worse
        capture = await b.capture()
    assert len(capture.turns) == 1
    audit(capture, engine.ledger)


@by_form
@by_dialect
async def test_sealing_ends_a_call_that_is_running(tmp_path: Path, dialect: str, stream: bool) -> None:
    engine = LedgerEngine([Reply("half", stall=True)])
    async with bench(dialect, engine, tmp_path) as b:
        agent = (await b.agent()).say("hi")
        call = asyncio.create_task(agent.ask(stream))
        await until(lambda: engine.ledger and engine.ledger[0].ids)
        await b.gateway.admin.seal("s1")
        with pytest.raises((*agent.error_types, BrokenReply)):
            await asyncio.wait_for(call, 3)
        capture = await b.capture()
    (turn,) = capture.turns
    assert turn.status is TurnStatus.ABORTED and engine.in_flight == 0
    audit(capture, engine.ledger)

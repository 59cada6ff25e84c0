"""The same contract over vLLM's wire: every dialect, both transports, streamed and whole."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.types import TurnStatus
from tests.capture.serving import listening, until
from tests.proof.audit import audit
from tests.proof.clients import BrokenReply
from tests.proof.gateways import BASH, DIALECTS, NOW, bench, opened
from tests.proof.upstream import Plan, Upstream

pytestmark = [
    pytest.mark.parametrize("dialect", DIALECTS),
    pytest.mark.parametrize("transport", ["generate", "chat"]),
    pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"]),
]
TOOLS = [BASH, NOW]
ARGUMENTS: dict[str, Any] = {"command": 'printf "é🙂\\n" | cat', "n": 1.5, "deep": {"a": [None, {"b": ""}]}}
PLANS = {
    "text": Plan("Hello there.", num_pieces=4),
    "unicode": Plan("naïve 🙂👩‍👩‍👧 日本\u2028.\u0000", num_pieces=11),
    "call": Plan("I look.\n\n", [("bash", ARGUMENTS)], num_pieces=5),
    "call alone": Plan("", [("bash", {"command": "ls"})]),
    "parallel": Plan("Both.", [("bash", {"command": "a"}), ("now", {}), ("bash", {"command": "a"})], num_pieces=9),
    "nothing": Plan(""),
}


async def test_every_kind_of_reply_reaches_the_agent_and_the_record(
    tmp_path: Path, dialect: str, transport: str, stream: bool
) -> None:
    upstream = Upstream(lambda prompt, asked: next(plan for name, plan in PLANS.items() if f"say {name}!" in prompt))
    async with listening(upstream.app()) as url, bench(dialect, VllmEngine(url, transport=transport), tmp_path) as b:
        agent = await b.agent(tools=TOOLS)
        for index, (name, plan) in enumerate(PLANS.items()):
            said = await agent.fresh().say(f"say {name}!").ask(stream)
            capture = await b.capture()
            turn = capture.turns[index]
            assert said.calls == plan.calls, name
            assert said.text.rstrip() == plan.text.rstrip(), name
            assert said.finish == ("tool_calls" if plan.calls else "stop"), name
            assert said.usage == (len(turn.prompt_ids_P), len(turn.completion_ids_T)), name
            assert bytes(turn.completion_ids_T[:-1]).decode() == plan.sampled, name
            assert (turn.message.get("content") or "") == said.text, name
            recorded = [c["function"] for c in turn.message.get("tool_calls") or []]
            assert [(c["name"], json.loads(c["arguments"])) for c in recorded] == said.calls, name
            assert turn.trainable and not turn.error, (name, turn.findings)
    rows = audit(capture)
    # The chat route does not say which policy sampled a token, and the learner takes no token of unknown policy.
    assert len(rows) == (len(PLANS) if transport == "generate" else 0)


async def test_a_tool_loop_extends_its_own_ids(tmp_path: Path, dialect: str, transport: str, stream: bool) -> None:
    def script(prompt: str, asked: int) -> Plan:
        turn = prompt.count("result")
        calls = [("bash", {"command": f"step {turn}"}), ("now", {})]
        return Plan(f"Turn {turn}.", calls if turn < 4 else [])

    async with listening(Upstream(script).app()) as url:
        async with bench(dialect, VllmEngine(url, transport=transport), tmp_path) as b:
            agent = (await b.agent(tools=TOOLS)).say("begin")
            said = await agent.ask(stream)
            while said.calls:
                said = await agent.echo(said, ["result 1", "result 2"]).ask(stream)
            capture = await b.capture()
    assert said.text == "Turn 4."
    assert len(capture.turns) == 3 and all(t.trainable for t in capture.turns)
    for before, after in itertools.pairwise(capture.turns):
        whole = [*before.prompt_ids_P, *before.completion_ids_T]
        assert list(after.prompt_ids_P[: len(whole)]) == whole
    rows = audit(capture)
    if transport == "generate":
        assert [row.turn_ids for row in rows] == [[t.turn_id for t in capture.turns]]


FAULTS: dict[str, Plan] = {
    "status 500": Plan(status=500),
    "status 503": Plan(status=503),
    "status 404": Plan(status=404),
    "ends at once": Plan("Hello there.", cut=0),
    "is torn at once": Plan("Hello there.", cut=0, torn=True),
    "ends in the middle": Plan("Hello there.", cut=300),
    "is torn in the middle": Plan("Hello there.", cut=300, torn=True),
}


async def test_an_engine_fault_is_an_error_and_the_next_call_is_served(
    tmp_path: Path, dialect: str, transport: str, stream: bool
) -> None:
    def script(prompt: str, asked: int) -> Plan:
        return next((plan for name, plan in FAULTS.items() if f"{name}!" in prompt), Plan("fine"))

    async with listening(Upstream(script).app()) as url:
        async with bench(dialect, VllmEngine(url, transport=transport), tmp_path) as b:
            agent = await b.agent()
            for name in FAULTS:
                with pytest.raises((*agent.error_types, BrokenReply)):
                    await agent.fresh().say(f"{name}!").ask(stream)
                assert (await b.gateway.admin.session("s1")).last_fault, name
            assert (await agent.fresh().say("now").ask(stream)).text == "fine"
            assert (await b.gateway.admin.session("s1")).last_fault is None
            capture = await b.capture()
    assert [t.status for t in capture.turns] == [TurnStatus.FAILED] * len(FAULTS) + [TurnStatus.OK]
    audit(capture)


async def test_hanging_up_closes_the_engines_connection(
    tmp_path: Path, dialect: str, transport: str, stream: bool
) -> None:
    upstream = Upstream(lambda prompt, asked: Plan("x" * 400, num_pieces=400, step=40, delay_s=0.05))
    async with listening(upstream.app()) as url, bench(dialect, VllmEngine(url, transport=transport), tmp_path) as b:
        agent = (await b.agent()).say("hi")
        async with opened(b.gateway.agent_url, agent.wire(stream)):
            await until(lambda: upstream.streaming == 1)
            await asyncio.sleep(0.1)
        await until(lambda: upstream.streaming == 0, 2.0)
        await until(lambda: b.gateway.gateway.sessions.num_in_flight == 0)
        capture = await b.capture()
    (turn,) = capture.turns
    assert turn.status is TurnStatus.ABORTED
    assert len(turn.completion_ids_T) < 400
    audit(capture)

"""Captures as OpenEnv traces, and as JSON."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from capture_proxy import trace
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.types import Finding, Severity, TurnStatus
from tests.capture.serving import served

TOOLS = [{"type": "function", "function": {"name": "bash"}}]
USER = [{"role": "user", "content": "hi"}]


async def test_only_finished_agent_turns_with_whole_logprobs_are_trained(tmp_path: Path) -> None:
    replies = [
        Reply("good", [("bash", {})]),
        Reply("bad number", logprobs=[None] * 11),
        Reply("a title"),
        Reply("dies", die_after=1),
        Reply("misaligned", findings=[Finding(Severity.FATAL, "misaligned", "5 ids, 4 logprobs")]),
    ]
    async with served(ScriptedEngine(replies), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        async with gw.http(session) as http:
            for i, tools in enumerate((TOOLS, TOOLS, [], TOOLS, TOOLS)):
                body = {"model": "m", "messages": [{"role": "user", "content": f"{i}"}], "tools": tools}
                await http.post("/v1/chat/completions", json=body | {"stream": True})
        capture = await gw.admin.capture("s1")
    result = trace.to_training_trace(capture)  # OpenEnv validates each turn as it is built
    assert [any(t.loss_mask) for t in result.turns] == [True, False, False, False, False]
    good, bad, title, died, _ = result.turns
    assert sum(good.loss_mask) == len(good.completion_token_ids)
    assert len(good.loss_mask) == len(good.prompt_token_ids) + len(good.completion_token_ids)
    assert bad.per_token_logps == [0.0] * 11
    assert bad.metadata["findings"][0]["code"] == "bad_logprob"
    assert title.metadata["role"] == "side" and title.metadata["side_reason"]
    assert died.metadata["status"] == "failed" and len(died.completion_token_ids) == 4
    assert good.metadata["policy_versions"] == [{"version": "v0", "start": 0, "end": len(good.completion_token_ids)}]
    assert trace.summary(capture) == {"agent": 4, "side": 1, "trainable": 1}


async def test_a_session_of_side_calls_only_trains_nothing(tmp_path: Path) -> None:
    async with served(ScriptedEngine(), tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint())
        await client.chat.completions.create(model="m", messages=USER, max_tokens=1)
        capture = await gw.admin.capture("s1")
    assert trace.summary(capture)["trainable"] == 0
    assert not any(any(t.loss_mask) for t in trace.to_training_trace(capture).turns)


async def test_a_capture_survives_json(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply("x", [("bash", {"a": 1})], logprobs=[None, -0.25]), "y"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        client = gw.openai(await gw.mint(sampling={"temperature": 1.0}, max_turns=3))
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        capture = await gw.admin.capture("s1")
    again = trace.capture_from_json(orjson.loads(orjson.dumps(trace.capture_to_json(capture))))
    assert again == capture
    assert again.session.token == ""  # the agents' secret is not served a second time
    assert capture.turns[0].logprobs_T[:2] == [None, -0.25]
    with pytest.raises(ValueError, match="version"):
        trace.capture_from_json({"version": 99})


async def test_misaligned_arrays_never_reach_the_store(tmp_path: Path) -> None:
    async with served(ScriptedEngine([Reply("abc", logprobs=[-1.0])]), tmp_path / "s.sqlite") as gw:
        await gw.openai(await gw.mint()).chat.completions.create(model="m", messages=USER)
        (turn,) = (await gw.admin.capture("s1")).turns
    assert len(turn.completion_ids_T) == len(turn.logprobs_T) == 4
    assert turn.status is TurnStatus.OK and not turn.trainable


def test_making_a_trace_imports_no_web_pages_and_leaves_them_to_whoever_wants_them():
    script = (
        "import importlib.util, sys\n"
        "from capture_proxy.trace import to_row_trace\n"
        "from capture_proxy.types import Capture, Session, SessionPolicy\n"
        "trace = to_row_trace(Capture(Session('s', '', SessionPolicy(), {}), []))\n"
        "assert type(trace).__module__ == 'openenv.core.harness.training' and trace.turns == []\n"
        "assert 'gradio' not in sys.modules\n"
        "assert importlib.util.find_spec('gradio') is not None\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

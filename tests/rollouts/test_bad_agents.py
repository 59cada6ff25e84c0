"""Agents that misbehave: each ends as the right outcome with its evidence, leaves nothing, and harms no sibling."""

import asyncio
import contextlib
import json
import subprocess
import time
import uuid
from dataclasses import replace

import pytest

from capture_proxy.admin_client import AdminClient
from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.errors import SetupError
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.types import Job, Outcome
from sandboxes import open_backend
from sandboxes.base import Access, Endpoint
from sandboxes.docker import DockerConfig
from sandboxes.pool import Bounds, Pool
from tests.capture.serving import KEY, served, until
from tests.rollouts.rolling import CALL, roll, rolling, task

MARK = "ht-bad-agent-"


def an_agent(tmp_path, script, **fields):
    """An agent as a person would give one: a YAML file."""
    env = {"URL": "${base_url}/v1/chat/completions", "TOKEN": "${token}"}
    adapter = {"name": "bad", "dialect": "openai_chat", "argv": ["sh", "-c", script], "env": env}
    file = tmp_path / "bad.yaml"
    file.write_text(json.dumps(adapter | {"output": {"type": "text"}} | fields))
    return load_harness(str(file))


def log_of(tmp_path, stream="stderr", rollout="g0-0-a"):
    return (tmp_path / "artifacts" / rollout / f"agent.{stream}.log").read_text()


def running(marker):
    return subprocess.run(["pgrep", "-f", marker], capture_output=True, text=True, check=False).stdout.split()


def test_an_agent_that_cannot_be_installed_is_one_line_with_what_it_needs_before_anything_starts(tmp_path):
    needy = {"type": "pip", "packages": ["agent==1.0"], "python": "3.99", "check": ["agent", "--version"]}
    with pytest.raises(SetupError, match=r"3\.99") as caught:
        ensure_installed(an_agent(tmp_path, "true", install=needy), tmp_path / "cache", lambda text: None)
    assert "bad" in str(caught.value) and "\n" not in str(caught.value)


async def test_one_that_exits_before_its_first_call_is_infra_with_its_exit_code_and_last_words(tmp_path):
    result = await roll(tmp_path, ScriptedEngine("x"), an_agent(tmp_path, "echo cannot find my config >&2; exit 7"))
    assert (result.outcome, result.reward, result.failed_stage) == (Outcome.INFRA_FAILED, None, "agent")
    assert result.exit_code == 7 and "exit code 7" in result.detail and "cannot find my config" in result.detail
    assert "cannot find my config" in log_of(tmp_path)


async def test_one_that_never_exits_is_ended_with_its_children_at_its_time_limit_and_scored(tmp_path):
    marker = f"{MARK}{time.monotonic_ns()}"
    script = f"{CALL} > /dev/null; touch answer.txt; echo working >&2; (sleep 600; : {marker}) & sleep 600; : {marker}"
    result = await roll(tmp_path, ScriptedEngine("x"), an_agent(tmp_path, script), timeout_s=3)
    assert (result.outcome, result.reward, result.timed_out) == (Outcome.TRUNCATED, 0.5, True), result.detail
    assert "limit: " in result.detail and "working" in log_of(tmp_path)
    assert 2 < result.stages_s["agent"] < 15
    assert running(marker) == []


async def test_one_that_loops_for_ever_and_ignores_the_refusals_gets_no_more_than_its_budget_and_is_scored(tmp_path):
    script = f"touch answer.txt; while :; do {CALL} -o /dev/null -w '%{{http_code}} '; done"
    engine = ScriptedEngine("go on")
    result = await roll(tmp_path, engine, an_agent(tmp_path, script), timeout_s=6, max_turns=2)
    assert (result.outcome, result.reward) == (Outcome.TRUNCATED, 0.5), result.detail
    assert result.detail.startswith("limit: ")
    assert len(engine.requests) == 2, "what it was refused never reached the engine"
    said = [code for code in log_of(tmp_path, "stdout").split() if code != "000"]  # 000 = ended in the middle of a call
    assert said[:2] == ["200"] * 2 and set(said[2:]) == {"403"}


async def test_one_that_floods_its_log_is_cut_there_and_nowhere_else(tmp_path):
    flood = "head -c 209715200 /dev/zero | tr '\\0' x; echo; echo the end >&2"
    result = await roll(tmp_path, ScriptedEngine("moon"), an_agent(tmp_path, f"{CALL} > /dev/null; {flood}"))
    assert (result.outcome, result.exit_code, result.num_turns) == (Outcome.OK, 0, 1), result.detail
    kept = tmp_path / "artifacts" / "g0-0-a"
    assert sum(file.stat().st_size for file in kept.iterdir()) < 20_000_000
    assert "the end" in log_of(tmp_path)


async def test_one_that_uses_another_sessions_token_writes_into_no_session_that_has_ended(tmp_path):
    """The token of a finished rollout is spent; a made-up one is unknown. Both are refused, and neither is recorded."""
    honest = an_agent(tmp_path, f'{CALL} > /dev/null; printf %s "$TOKEN"; touch answer.txt')
    theft = f"{CALL} -o /dev/null -w '%{{http_code}}'; touch answer.txt"
    engine = ScriptedEngine("x")
    async with rolling(tmp_path, engine, honest) as means:
        first = await run_rollout(Job("g0-0-a", 0, 0, task(tmp_path)), means)
        for number, token in enumerate((log_of(tmp_path, "stdout"), "made-up"), start=1):
            thief = an_agent(tmp_path, f"TOKEN={token}; {theft}")
            as_thief = replace(means, boxes=replace(means.boxes, harness=thief))
            result = await run_rollout(Job(f"g0-{number}-a", 0, 0, task(tmp_path)), as_thief)
            assert (result.outcome, result.num_turns, result.reward) == (Outcome.INFRA_FAILED, 0, None)
            assert "made no model call" in result.detail
            assert log_of(tmp_path, "stdout", f"g0-{number}-a") in ("401", "403")
        assert len((await means.admin.capture("g0-0-a")).turns) == 1, "the finished session is as it was"
    assert first.outcome is Outcome.OK and len(engine.requests) == 1


async def test_a_bad_agent_costs_its_siblings_nothing(tmp_path):
    """The same agent; what it does depends on whose turn it is."""
    script = (
        f"{CALL} > reply; if grep -q crash reply; then kill -9 $$; fi;"
        " if grep -q hang reply; then sleep 600; fi; touch answer.txt; echo moon"
    )
    engine = ScriptedEngine(["crash", "hang", "fine", "fine"])
    async with rolling(tmp_path, engine, an_agent(tmp_path, script), timeout_s=5) as means:
        jobs = [Job(f"g0-{n}-a", 0, 0, task(tmp_path)) for n in range(4)]
        results = await asyncio.gather(*(run_rollout(job, means) for job in jobs))
    assert sorted(result.outcome for result in results) == ["agent_failed", "ok", "ok", "truncated"]
    assert [r.reward for r in results if r.outcome is Outcome.OK] == [1.0, 1.0]
    (crashed,) = (r for r in results if r.outcome is Outcome.AGENT_FAILED)
    assert crashed.exit_code == 137 and "137" in crashed.detail
    assert list((tmp_path / "boxes").glob("*")) == []


async def test_one_whose_gateway_dies_is_infra_by_its_stage_and_its_log_is_kept(tmp_path):
    agent = an_agent(tmp_path, f"while {CALL} > /dev/null; do sleep 0.1; done; echo no gateway any more >&2; exit 9")
    engine = ScriptedEngine("x")
    async with rolling(tmp_path, engine, agent, max_turns=10_000) as means, contextlib.AsyncExitStack() as mortal:
        spec = means.boxes.spec
        gateway = await mortal.enter_async_context(served(engine, tmp_path / "mortal.sqlite"))
        access = Access(gateway=Endpoint(gateway.agent_url))
        async with (
            AdminClient(gateway.admin_url, KEY) as admin,
            open_backend(spec.sandbox, run_id="mortal", registry=spec.registry, access=access) as backend,
            Pool(backend, Bounds()) as pool,
        ):
            boxes = replace(means.boxes, access=access, _known={})
            means = replace(means, boxes=boxes, backend=backend, pool=pool, admin=admin)
            rollout = asyncio.ensure_future(run_rollout(Job("g0-0-a", 0, 0, task(tmp_path)), means))
            await until(lambda: engine.requests, timeout_s=60)
            await mortal.aclose()
            result = await asyncio.wait_for(rollout, 60)
    assert (result.outcome, result.reward, result.failed_stage) == (Outcome.INFRA_FAILED, None, "capture")
    assert result.exit_code == 9 and "no gateway any more" in log_of(tmp_path)
    assert list((tmp_path / "boxes").glob("*")) == []


async def test_one_that_calls_a_host_outside_its_network_rules_reaches_nothing_and_its_exit_code_says_so(
    tmp_path, docker_engine, docker_base_image
):
    script = f"curl -sS -m 3 http://1.1.1.1/ || {{ code=$?; {CALL} > /dev/null; exit $code; }}; echo OUT"
    config = DockerConfig(host=docker_engine, image=docker_base_image, relay_base=docker_base_image)
    settings = {"sandbox": config, "run_id": f"test-{uuid.uuid4().hex[:12]}"}
    result = await roll(tmp_path, ScriptedEngine("x"), an_agent(tmp_path, script), **settings)
    assert (result.outcome, result.reward) == (Outcome.AGENT_FAILED, 0.0), result.detail
    assert result.exit_code in (6, 7, 28) and "curl" in result.detail, "its own words"
    assert "OUT" not in log_of(tmp_path, "stdout")

"""Agents that Harbor drives: real Harbor, real gateway, real local sandbox; only the engine is scripted."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.cache import cache_dir
from harness_trainer.errors import SetupError, TaskError
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.qualify.bench import Setting
from harness_trainer.qualify.check import qualify, scenarios_of
from harness_trainer.qualify.verdict import Verdict
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.types import Job, Outcome
from harness_trainer.tasks import Task
from sandboxes.base import BoxSpec, NetworkMode
from sandboxes.docker import DockerConfig
from sandboxes.harbor import PYTHON_VARIABLE
from sandboxes.local import LocalConfig
from sandboxes.processes import read_proc
from tests.harnesses.conftest import own
from tests.rollouts.rolling import roll, rolling, task

pytestmark = pytest.mark.harbor

# Scores 1 when the file has the word, else 0.
VERIFY = """
R=0
grep -q moon answer.txt && R=1
echo $R > "${SANDBOX_ROOT:-}/logs/verifier/reward.txt"
"""


def asked(tmp_path, instruction, **settings):
    return replace(task(tmp_path, verify=VERIFY, **settings), instruction=instruction)


def kept(tmp_path, rollout_id="g0-0-a"):
    return tmp_path / "artifacts" / rollout_id


def nothing_is_left(tmp_path):
    assert list((tmp_path / "boxes").glob("*")) == [] and list((tmp_path / "owned").glob("*.json")) == []


# --- at the start of a run -----------------------------------------------------------------------------------------


async def test_a_worker_that_does_not_start_ends_the_run_with_its_words(monkeypatch, tmp_path):
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    with pytest.raises(SetupError, match="ended at its start.*No module named 'harbor'"):
        async with rolling(tmp_path, ScriptedEngine("x"), own()):
            pass
    nothing_is_left(tmp_path)


async def test_a_sandbox_without_a_root_of_its_own_is_refused(harbor, tmp_path):
    config = LocalConfig(root=tmp_path / "boxes", isolation="none")
    async with rolling(tmp_path, ScriptedEngine("x"), own(), sandbox=config) as means:
        with pytest.raises(TaskError, match="own needs a sandbox with a root of its own.*install bubblewrap"):
            means.boxes.check(asked(tmp_path, "moon"), means.backend)


# --- one rollout ---------------------------------------------------------------------------------------------------


async def test_an_agent_has_the_sandbox_and_nothing_of_this_machine(harbor, tmp_path):
    harness = own(root="agent", context="${context}", env={"OF_THE_FILE": "${model}"})
    job_task = asked(tmp_path, "call surroundings commands typed files logs moon")
    result = await roll(tmp_path, ScriptedEngine("hm"), harness, job_task=job_task)
    stderr = (kept(tmp_path) / "agent.stderr.log").read_text()
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.OK, 1.0, 0), (result.detail, stderr)
    assert (result.harness, result.num_turns, stderr) == ("own", 1, "")
    folder = kept(tmp_path) / "harbor"
    found = {path.name: path.read_text() for path in (folder / "agent").iterdir()}
    assert found == {"inside.txt": "from inside\n", "outside.txt": "from outside"}, "what leads elsewhere is left out"
    assert json.loads((folder / "context.json").read_text()) == {"n_output_tokens": 5}
    assert "a word of the agent's" in (folder / "worker.log").read_text()
    nothing_is_left(tmp_path)


async def test_in_a_container_what_harbor_does_as_root_is_roots(harbor, tmp_path, docker_engine, docker_base_image):
    config = DockerConfig(host=docker_engine, image=docker_base_image, relay_base=docker_base_image)
    harness = own(root="root", context="${context}", env={"OF_THE_FILE": "${model}"})
    job_task = asked(tmp_path, "call surroundings commands files logs moon")
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    result = await roll(tmp_path, ScriptedEngine("hm"), harness, job_task=job_task, sandbox=config, run_id=run_id)
    stderr = (kept(tmp_path) / "agent.stderr.log").read_text()
    assert (result.outcome, result.reward, stderr) == (Outcome.OK, 1.0, ""), result.detail
    assert (kept(tmp_path) / "harbor" / "agent" / "inside.txt").read_text() == "from inside\n"


async def test_harbor_installs_only_what_is_not_there_and_its_agents_end_is_the_rollouts(harbor, tmp_path):
    def installs(name, before, there):
        files = tmp_path / name
        files.mkdir()
        if before is not None:
            (files / "installed-before").write_text(before)
        verify = f'[ "$(cat how.txt)" = {there} ] || exit 1\n{VERIFY}'
        return Task(name, tmp_path, name, verify_script=verify, box=BoxSpec(name, build_dir=files))

    tasks = [installs("absent", None, "2.0"), installs("present", "1.0", "absent")]
    engine = ScriptedEngine(["moon", "moon", "no"])
    async with rolling(tmp_path, engine, own("harbor_own_agents:Installed"), tasks=tasks) as means:
        for each in tasks:
            result = await run_rollout(Job(each.name, 0, 0, each), means)
            assert (result.outcome, result.reward) == (Outcome.OK, 1.0), (each.name, result.detail)
            assert result.num_turns == 1, "its call came out of the sandbox"
        result = await run_rollout(Job("fails", 0, 0, asked(tmp_path, "go")), means)
    assert (result.outcome, result.exit_code) == (Outcome.AGENT_FAILED, 3), result.detail
    assert "Command failed (exit 3)" in (kept(tmp_path, "fails") / "agent.stderr.log").read_text()
    nothing_is_left(tmp_path)


async def test_what_cannot_be_installed_in_a_sealed_sandbox_says_what_to_do(harbor, tmp_path):
    result = await roll(tmp_path, ScriptedEngine("x"), load_harness("harbor:mini-swe-agent"))
    assert (result.outcome, result.failed_stage, result.setup_failed) == (Outcome.INFRA_FAILED, "setup", True)
    assert "skip_install: true" in result.detail and "network mode allowlist or public" in result.detail, result.detail


async def test_with_a_network_that_hint_is_left_out(harbor, tmp_path):
    config = LocalConfig(root=tmp_path / "boxes", network=NetworkMode.PUBLIC)
    result = await roll(tmp_path, ScriptedEngine("x"), own(setup="fail"), sandbox=config)
    assert result.detail.endswith("could not set own up: ValueError: the agent's own fault")


# --- bad ends, side by side ----------------------------------------------------------------------------------------


async def test_each_rollout_ends_its_own_way_and_harms_no_other(harbor, tmp_path):
    """One worker: agents that fail, leave, die, hang, will not go and hold everything up, beside a good one."""
    words = ["call fail", "call exit_7", "call leave", "call hang", "call stay", "call block", "call moon"]
    limits = {"call hang": 3.0, "call stay": 3.0, "call block": 3.0}
    async with rolling(tmp_path, ScriptedEngine("hm"), own(), max_concurrent=9) as means:
        began = time.monotonic()
        jobs = {
            text: Job(f"g0-{n}-a", 0, 0, asked(tmp_path, text, agent_timeout_s=limits.get(text, 60.0)))
            for n, text in enumerate(words)
        }
        results = dict(zip(words, await asyncio.gather(*(run_rollout(j, means) for j in jobs.values())), strict=True))
        assert time.monotonic() - began < 60
    ended = {text.removeprefix("call "): (r.outcome, r.exit_code, r.timed_out) for text, r in results.items()}
    assert ended == {
        "fail": (Outcome.AGENT_FAILED, 1, False),
        "exit_7": (Outcome.INFRA_FAILED, None, False),
        "leave": (Outcome.AGENT_FAILED, 1, False),
        "hang": (Outcome.TRUNCATED, None, True),
        "stay": (Outcome.TRUNCATED, None, True),
        "block": (Outcome.TRUNCATED, None, True),
        "moon": (Outcome.OK, 0, False),
    }, {text: r.detail for text, r in results.items()}
    assert results["call moon"].reward == 1.0
    assert "ValueError: the agent's own fault" in results["call fail"].detail
    assert "ended with exit code 7" in results["call exit_7"].detail
    assert "SystemExit: left" in results["call leave"].detail
    nothing_is_left(tmp_path)


async def test_parallel_rollouts_have_a_process_and_a_token_each(harbor, tmp_path):
    engine = ScriptedEngine("hm")
    names = [f"n{number}" for number in range(3)]
    async with rolling(tmp_path, engine, own(name="${token}"), max_concurrent=9, max_turns=9) as means:
        work = [run_rollout(Job(name, 0, 0, asked(tmp_path, "environs moon")), means) for name in names]
        results = await asyncio.gather(*work)
        captures = [await means.admin.capture(name) for name in names]
    assert [(r.outcome, r.num_turns) for r in results] == [(Outcome.OK, 5)] * 3, [r.detail for r in results]
    said = [{turn.request["messages"][0]["content"].split()[0] for turn in capture.turns} for capture in captures]
    assert [len(tokens) for tokens in said] == [1, 1, 1], "no session has a call of another one's"
    assert len(set.union(*said)) == 3


def writing_to(log):
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if entry.readlink() == log:
                return int(entry.parts[2])
    return None


async def process_of(tmp_path, rollout_id):
    """The pid of the rollout's process in Harbor's Python, once its agent runs."""
    log = kept(tmp_path, rollout_id) / "harbor" / "worker.log"
    async with asyncio.timeout(60):
        while True:
            if (found := writing_to(log)) is not None:
                return found
            await asyncio.sleep(0.05)


async def until_asked(engine):
    async with asyncio.timeout(60):
        while not engine.requests:
            await asyncio.sleep(0.05)


async def test_a_cancelled_rollout_ends_its_agent(harbor, tmp_path):
    engine = ScriptedEngine("hm")
    async with rolling(tmp_path, engine, own()) as means:
        rollout = asyncio.create_task(run_rollout(Job("g0-0-a", 0, 0, asked(tmp_path, "call stay")), means))
        pid = await process_of(tmp_path, "g0-0-a")
        await until_asked(engine)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert read_proc(pid) is None
    nothing_is_left(tmp_path)


async def test_a_worker_that_is_killed_fails_its_rollouts_and_is_started_again(harbor, tmp_path):
    engine = ScriptedEngine("hm")
    async with rolling(tmp_path, engine, own()) as means:
        rollout = asyncio.create_task(run_rollout(Job("g0-0-a", 0, 0, asked(tmp_path, "call logs stay")), means))
        pid = await process_of(tmp_path, "g0-0-a")
        await until_asked(engine)
        worker = read_proc(pid).ppid
        os.kill(worker, signal.SIGKILL)
        result = await rollout
        assert (result.outcome, result.failed_stage, result.setup_failed) == (Outcome.INFRA_FAILED, "agent", False)
        assert "ended with Harbor's worker" in result.detail
        again = await run_rollout(Job("g0-0-b", 0, 1, asked(tmp_path, "call moon")), means)
        assert (again.outcome, again.reward) == (Outcome.OK, 1.0), again.detail
    nothing_is_left(tmp_path)


async def test_a_rollouts_process_that_is_killed_is_told_with_the_end_of_its_log(harbor, tmp_path):
    engine = ScriptedEngine("hm")
    async with rolling(tmp_path, engine, own()) as means:
        rollout = asyncio.create_task(run_rollout(Job("g0-0-a", 0, 0, asked(tmp_path, "logs call stay")), means))
        pid = await process_of(tmp_path, "g0-0-a")
        await until_asked(engine)
        os.kill(pid, signal.SIGKILL)
        result = await rollout
    assert result.outcome is Outcome.INFRA_FAILED
    assert "was ended by signal 9" in result.detail and "a word of the agent's" in result.detail
    nothing_is_left(tmp_path)


# --- agents of Harbor's own ----------------------------------------------------------------------------------------


def keys(done, *keystrokes):
    """What the model says to Terminus 2."""
    commands = [{"keystrokes": text, "duration": 0.5} for text in keystrokes]
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": done})


@pytest.mark.real_agent
@pytest.mark.skipif(shutil.which("tmux") is None, reason="Terminus 2 needs tmux in the sandbox: apt-get install tmux")
async def test_terminus_2_works_in_our_sandbox_from_outside(harbor, tmp_path):
    engine = ScriptedEngine([keys(False, "printf 'moon\\n' > answer.txt\n"), keys(True), keys(True)])
    job_task = asked(tmp_path, "Write moon into answer.txt")
    result = await roll(tmp_path, engine, load_harness("harbor:terminus-2"), job_task=job_task)
    assert (result.outcome, result.reward) == (Outcome.OK, 1.0), result.detail
    assert (result.num_turns, result.num_trainable_turns, len(result.trace["turns"])) == (3, 3, 1)
    assert "printf" in engine.requests[1].messages[-1]["content"], "it sees its terminal"
    trajectory = json.loads((kept(tmp_path) / "harbor" / "agent" / "trajectory.json").read_text())
    assert trajectory["agent"]["name"] == "terminus-2"


@pytest.mark.real_agent
@pytest.mark.skipif(shutil.which("tmux") is None, reason="Terminus 2 needs tmux in the sandbox: apt-get install tmux")
async def test_terminus_2_ends_at_once_when_its_session_is_spent(harbor, tmp_path):
    engine = ScriptedEngine([keys(False, "echo again\n")])
    result = await roll(tmp_path, engine, load_harness("harbor:terminus-2"), max_turns=2)
    assert (result.outcome, len(engine.requests)) == (Outcome.TRUNCATED, 2), result.detail
    assert result.stages_s["agent"] < 30


async def qualified(name, tmp_path, *scenarios):
    """The verdict on each scenario."""
    config = LocalConfig(root=tmp_path / "boxes")
    setting = Setting(config, 240, tmp_path / "logs", tmp_path / "owned", "test")
    report = await qualify(name, scenarios_of(scenarios), setting, cache_dir(), print)
    nothing_is_left(tmp_path)
    assert report.problem == ""
    return {line.scenario: (line.verdict, line.why, line.num_rows) for line in report.lines}


@pytest.mark.real_agent
@pytest.mark.skipif(shutil.which("tmux") is None, reason="Terminus 2 needs tmux in the sandbox: apt-get install tmux")
async def test_terminus_2_qualifies(harbor, tmp_path):
    assert await qualified("harbor:terminus-2", tmp_path, "parallel", "sub-agent") == {
        "parallel": (Verdict.PASSED, "", 1),
        "sub-agent": (Verdict.NOT_OFFERED, "it offers no tool that starts a sub-agent", 1),
    }


@pytest.mark.real_agent
async def test_mini_swe_agent_that_we_installed_qualifies_under_harbor(harbor, tmp_path):
    install = load_harness("mini-swe-agent").install.model_dump()
    file = tmp_path / "mini.yaml"
    file.write_text(json.dumps({"name": "harbor-mini", "install": install, "harbor": {"agent": "mini-swe-agent"}}))
    try:
        ensure_installed(load_harness(str(file)), cache_dir(), print)
    except SetupError as error:
        pytest.skip(str(error))
    verdicts = await qualified(str(file), tmp_path, "write", "budget")
    assert {verdict for verdict, *_ in verdicts.values()} == {Verdict.PASSED}, verdicts

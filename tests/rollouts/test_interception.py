"""Agents without a base URL: their provider's host answers as the gateway, in the sandbox and nowhere else."""

import os
import shutil
import uuid
from dataclasses import replace

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.cache import cache_dir
from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.entry import entered
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.rollouts.types import Outcome
from sandboxes import bubblewrap
from sandboxes.base import BoxSpec, Network, NetworkMode
from sandboxes.docker import DockerConfig
from sandboxes.local import LocalConfig
from tests.intercept.intercepting import needs_mitmproxy
from tests.rollouts.rolling import roll, rolling, shell_agent, task

needs_bubblewrap = pytest.mark.skipif(bubblewrap.find().problem is not None, reason=str(bubblewrap.find().problem))
ASK = (
    'curl -sS -m 20 --noproxy "" -H "Authorization: Bearer any" -H "Content-Type: application/json" '
    """-d '{"model": "m", "messages": [{"role": "user", "content": "go"}]}' """
)


def provider_agent() -> Harness:
    """It knows its provider's host and nothing else, and looks at another host as well."""
    data = shell_agent(
        f"{ASK} https://api.openai.com/v1/chat/completions; touch answer.txt; {ASK} https://elsewhere.example/ || true"
    ).model_dump()
    return Harness.model_validate({**data, "env": {}, "needs_intercept": True})


@needs_mitmproxy
@needs_bubblewrap
async def test_what_an_agent_sends_to_its_provider_is_its_sessions_turn(tmp_path):
    result = await roll(tmp_path, ScriptedEngine("hm", version="v1"), provider_agent())
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.OK, 0.5, 1), (result.detail, result.findings)
    assert result.num_trainable_turns == 1
    assert "elsewhere.example" in (tmp_path / "artifacts" / "network-0.jsonl").read_text()


@needs_mitmproxy
async def test_what_an_agent_in_a_container_sends_to_its_provider_is_its_sessions_turn(
    tmp_path, docker_engine, docker_base_image
):
    config = DockerConfig(host=docker_engine, image=docker_base_image, relay_base=docker_base_image)
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    result = await roll(tmp_path, ScriptedEngine("hm"), provider_agent(), sandbox=config, run_id=run_id)
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.OK, 0.5, 1), (result.detail, result.findings)


@needs_mitmproxy
@needs_bubblewrap
async def test_a_task_whose_network_has_no_proxy_is_refused_with_what_to_do(tmp_path):
    open_task = replace(task(tmp_path), box=BoxSpec("moon", network=Network(NetworkMode.PUBLIC)))
    async with rolling(tmp_path, ScriptedEngine("hm"), provider_agent(), tasks=[open_task]) as means:
        with pytest.raises(Exception, match="network mode public.*proxy-only or allowlist"):
            means.boxes.check(open_task, means.backend)


async def test_a_network_mode_for_all_tasks_that_has_no_proxy_is_refused_before_anything_starts(tmp_path):
    sandbox = LocalConfig(root=tmp_path / "boxes", network=NetworkMode.PROXY_ONLY)
    with pytest.raises(SetupError, match="leave sandbox.network out"):
        await roll(tmp_path, ScriptedEngine("hm"), provider_agent(), sandbox=sandbox)


def test_an_adapter_that_takes_no_base_url_cannot_be_given_one():
    with pytest.raises(ConfigError, match="takes no base URL"):
        entered(provider_agent(), "base_url")


def test_an_adapter_that_does_not_say_how_cannot_be_intercepted():
    with pytest.raises(ConfigError, match="intercept:"):
        entered(load_harness("pyagent"), "intercept")


@pytest.mark.parametrize("entry", ["auto", "base_url"])
def test_an_agent_that_takes_a_base_url_gets_one(entry):
    harness = load_harness("opencode")
    assert entered(harness, entry) == harness


@pytest.mark.parametrize("name", ["opencode", "opencode-small", "claude-code"])
def test_an_intercepted_agent_is_told_of_no_base_url(name):
    harness = entered(load_harness(name), "intercept")
    assert harness.needs_intercept
    assert "${base_url}" not in harness.model_dump_json(exclude={"intercept"})
    assert entered(harness, "auto") == harness


# --- real agents --------------------------------------------------------------------------------------------------


def write_then_tell(name, arguments):
    def script(request):
        if request.messages[-1]["role"] == "tool":
            return "The moon is written."
        return Reply("I write it.", tool_calls=[(name, arguments)])

    return ScriptedEngine(script, version="v2")


async def rolled(tmp_path, name, engine, **options):
    harness = load_harness(name)
    programs = ensure_installed(harness, cache_dir(), print)
    slow = task(tmp_path, agent_timeout_s=180)
    options |= {"harness_bin": programs, "entry": "intercept", "timeout_s": 180, "max_tokens": 4096}
    return await roll(tmp_path, engine, harness, job_task=slow, **options)


needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on PATH, no agent can be installed")
more_agents = pytest.mark.skipif(
    not os.environ.get("HARNESS_TRAINER_ALL_AGENTS"), reason="half a minute more: set HARNESS_TRAINER_ALL_AGENTS=1"
)


@needs_mitmproxy
@needs_bubblewrap
@needs_npm
@pytest.mark.real_agent
@pytest.mark.parametrize(
    ("name", "tool", "argument"),
    [
        ("claude-code", "Bash", "command"),
        pytest.param("opencode", "bash", "command", marks=more_agents),
        pytest.param("codex", "exec_command", "cmd", marks=more_agents),
    ],
)
async def test_a_real_agent_works_without_a_base_url(tmp_path, name, tool, argument):
    engine = write_then_tell(tool, {argument: "echo moon > answer.txt"})
    result = await rolled(tmp_path, name, engine)
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.OK, 1.0, 2), (result.detail, result.findings)
    assert result.num_trainable_turns == 2 and len(result.trace["turns"]) == 1


@needs_mitmproxy
@needs_npm
@more_agents
@pytest.mark.real_agent
async def test_a_real_agent_in_a_container_works_without_a_base_url(tmp_path, docker_engine, docker_base_image):
    config = DockerConfig(host=docker_engine, image=docker_base_image, relay_base=docker_base_image)
    engine = write_then_tell("bash", {"command": "echo moon > answer.txt", "description": "Writes"})
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    result = await rolled(tmp_path, "opencode", engine, sandbox=config, run_id=run_id)
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.OK, 1.0, 2), (result.detail, result.findings)

"""Whole rollouts in real containers: a sealed sandbox, a real agent, its verifier; only the engine is scripted."""

import asyncio
import json
import shutil
import signal
import uuid
from dataclasses import replace

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.cache import cache_dir
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, Outcome
from sandboxes.base import BoxSpec, Network, NetworkMode
from sandboxes.docker import DockerConfig
from sandboxes.lifecycle import reap
from sandboxes.local import LocalConfig
from tests.capture.serving import served, until
from tests.intercept.intercepting import needs_mitmproxy
from tests.rollouts.rolling import CALL, VERIFY, roll, rolling, runner_spec, shell_agent, task
from tests.rollouts.runner_process import RunnerProcess


@pytest.fixture
def run_id():
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def objects(docker_engine, run_id):
    """Names of everything the engine holds for this test's run: containers, networks, volumes."""
    import docker

    client = docker.DockerClient(base_url=docker_engine)
    wanted = {"label": f"harness-trainer.run={run_id}"}

    def names() -> list[str]:
        containers = client.containers.list(all=True, filters=wanted, ignore_removed=True)
        others = [*client.networks.list(filters=wanted), *client.volumes.list(filters=wanted)]
        return [thing.name for thing in [*containers, *others]]

    yield names
    client.close()


@pytest.fixture
def in_docker(docker_engine, docker_base_image, run_id):
    config = DockerConfig(host=docker_engine, image=docker_base_image, relay_base=docker_base_image)
    return {"sandbox": config, "run_id": run_id}


async def test_the_shipped_agent_works_in_a_sealed_container_and_its_rollout_can_be_trained(
    tmp_path, in_docker, objects
):
    write = Reply("Writing.", tool_calls=[("write_file", {"path": "answer.txt", "content": "moon"})])
    look = Reply("Looking.", tool_calls=[("bash", {"command": "id -u; pwd; cat answer.txt"})])
    engine = ScriptedEngine([write, look, "The moon is up."], version="v3")
    result = await roll(tmp_path, engine, load_harness("pyagent"), **in_docker)
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.OK, 1.0, 3), (result.detail, result.findings)
    (row,) = result.trace["turns"]
    assert sum(row["loss_mask"]) == result.num_completion_tokens > 0
    seen = engine.requests[2].messages[-1]["content"]
    assert "moon" in seen and "exit code 0" in seen
    assert "\n0\n" not in seen, "an agent without a task's own image is not root"
    assert {"create", "setup", "agent", "capture", "verify", "stop"} <= result.stages_s.keys()
    assert objects() == []


async def test_an_agent_that_looks_for_a_way_out_finds_the_gateway_only(tmp_path, in_docker, objects):
    probe = (
        "curl -s -m 3 http://1.1.1.1 && echo OUT; curl -s -m 3 http://172.17.0.1 && echo OUT; ls /var/run/docker.sock"
    )
    agent = shell_agent(f"{CALL} > /dev/null && echo reached; {probe}; touch answer.txt")
    result = await roll(tmp_path, ScriptedEngine(["hm"]), agent, **in_docker)
    assert (result.outcome, result.reward) == (Outcome.OK, 0.5), result.detail
    said = (tmp_path / "artifacts" / "g0-0-a" / "agent.stdout.log").read_text()
    assert "reached" in said and "OUT" not in said and "docker.sock" not in said
    assert objects() == []


async def test_warm_containers_take_the_start_out_of_a_rollout(tmp_path, in_docker, objects):
    async with rolling(tmp_path, ScriptedEngine("the moon"), load_harness("pyagent-chat"), **in_docker) as means:
        spec = means.boxes.spec_of(task(tmp_path))
        means.pool.plan([(spec, 2)])
        await until(lambda: means.pool.num_ready == 2, timeout_s=60)
        jobs = [Job(f"g0-{n}-a", 0, 0, task(tmp_path)) for n in range(3)]
        warm = await asyncio.gather(*(run_rollout(job, means) for job in jobs[:2]))
        cold = await run_rollout(jobs[2], means)
    assert [r.warm for r in (*warm, cold)] == [True, True, False]
    assert all(r.reward == 1.0 for r in (*warm, cold)), [r.detail for r in (*warm, cold)]
    assert max(r.stages_s["create"] for r in warm) < cold.stages_s["create"] / 3
    assert objects() == []


async def test_a_container_that_is_removed_under_its_agent_is_infra_and_never_the_agents_fault(
    tmp_path, in_docker, objects, docker_engine
):
    import docker

    client = docker.DockerClient(base_url=docker_engine)
    agent = shell_agent(f"{CALL} > /dev/null; touch answer.txt; sleep 600")
    engine = ScriptedEngine(["hm"])
    rolled = asyncio.ensure_future(roll(tmp_path, engine, agent, **in_docker))
    await until(lambda: engine.requests, timeout_s=60)
    for name in await asyncio.to_thread(objects):
        if not name.endswith("-net"):
            await asyncio.to_thread(client.api.remove_container, name, force=True)
    result = await asyncio.wait_for(rolled, 60)
    client.close()
    assert (result.outcome, result.reward) == (Outcome.INFRA_FAILED, None), result.detail
    assert result.failed_stage in ("agent", "verify") and not result.setup_failed
    assert objects() == []


async def test_an_image_that_cannot_be_had_is_a_setup_failure_with_a_reason(tmp_path, in_docker, objects):
    absent = replace(task(tmp_path), box=BoxSpec("moon", image="harness-trainer-test/absent:1"))
    result = await roll(tmp_path, ScriptedEngine(["x"]), load_harness("pyagent"), job_task=absent, **in_docker)
    assert (result.outcome, result.failed_stage, result.setup_failed) == (Outcome.INFRA_FAILED, "prepare", True)
    assert "absent" in result.detail
    assert objects() == []


@needs_mitmproxy
async def test_an_agent_with_an_allow_list_reaches_its_hosts_and_its_model_and_nothing_else(
    tmp_path, in_docker, objects
):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 7\r\n\r\nallowed")
        await writer.drain()
        writer.close()

    outside = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with outside:
        port = outside.sockets[0].getsockname()[1]
        ask = 'curl -s -m 10 --noproxy "" -x "$HTTP_PROXY"'
        agent = shell_agent(
            f"{CALL} > /dev/null; touch answer.txt; {ask} http://127.0.0.1:{port}/; echo;"
            f" {ask} -o /dev/null -w '%{{http_code}}' http://elsewhere.example/; ls $SSL_CERT_FILE;"
            f" curl -s -m 2 --noproxy '*' http://172.17.0.1:{port} && echo OUT; true"
        )
        listed = Network(NetworkMode.ALLOWLIST, (f"127.0.0.1:{port}",))
        hosts = replace(task(tmp_path), box=BoxSpec("moon", network=listed))
        result = await roll(tmp_path, ScriptedEngine(["hm"]), agent, job_task=hosts, **in_docker)
    assert (result.outcome, result.reward) == (Outcome.OK, 0.5), (result.detail, result.findings)
    said = (tmp_path / "artifacts" / "g0-0-a" / "agent.stdout.log").read_text()
    assert "allowed" in said and "ca-bundle.pem" in said and "OUT" not in said
    assert "403" in said, said
    assert "elsewhere.example" in (tmp_path / "artifacts" / "network-0.jsonl").read_text()
    assert objects() == []


@pytest.mark.opencode
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on PATH, opencode cannot be installed")
async def test_opencode_works_in_a_container_from_the_hosts_install(tmp_path, in_docker, objects):
    harness = load_harness("opencode-small")
    programs = ensure_installed(harness, cache_dir(), print)

    def script(request):
        if request.messages[-1]["role"] == "tool":
            return "The moon is written."
        return Reply("", tool_calls=[("write", {"filePath": "/app/answer.txt", "content": "moon"})])

    engine = ScriptedEngine(script, version="v2")
    result = await roll(tmp_path, engine, harness, harness_bin=programs, timeout_s=120, **in_docker)
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.OK, 1.0, 2), (result.detail, result.findings)
    assert objects() == []


# --- the runner as a process, killed ------------------------------------------------------------------------------

SLOW_AGENT = """
name: slow
dialect: openai_chat
argv: ["sh", "-c", "sleep 1; exec ${python} -I ${agents}/pyagent.py --max-turns 1 --no-tools"]
stdin: "${instruction}"
env: {OPENAI_API_KEY: "${token}", OPENAI_BASE_URL: "${base_url}/v1", OPENAI_MODEL: "${model}"}
output: {type: text}
"""


@pytest.mark.parametrize("kind", ["local", "docker"])
async def test_a_runner_that_is_killed_in_the_middle_leaves_nothing_and_its_groups_are_finished_by_the_next(
    tmp_path, request, kind, run_id
):
    if kind == "docker":
        sandbox = request.getfixturevalue("in_docker")["sandbox"]
        left = request.getfixturevalue("objects")
    else:
        sandbox, left = LocalConfig(root=tmp_path / "boxes"), lambda: list((tmp_path / "boxes").glob("*"))
    (tmp_path / "slow.yaml").write_text(SLOW_AGENT)
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({"name": "moon", "instruction": "Say moon.", "verify": VERIFY}) + "\n"
    )
    registry = tmp_path / "owned"
    async with served(ScriptedEngine("the moon"), tmp_path / "store.sqlite") as gateway:
        spec = runner_spec(
            tmp_path,
            gateway,
            config=RolloutConfig(group_size=3, max_concurrent=2, timeout_s=60),
            sandbox=sandbox,
            tasks=str(tmp_path / "tasks.jsonl"),
            harness=str(tmp_path / "slow.yaml"),
            registry=registry,
            run_id=run_id,
            max_open_groups=2,
            num_groups=2,
        )
        (tmp_path / "runner.json").write_text(spec.model_dump_json())
        store = RolloutStore(tmp_path / "store.sqlite")
        store.set_state("policy_version", "1")
        runner = RunnerProcess(tmp_path / "runner.json", tmp_path / "runner.log")
        await runner.start()
        await runner.until(lambda: store.outcome_counts().get("running", 0) == 2 and left())
        await runner.until(lambda: store.outcome_counts().get("ok", 0) >= 1)
        await runner.end(signal.SIGKILL)
        assert left() != []
        problems = [item.problem for item in await asyncio.to_thread(reap, registry) if item.problem]
        assert (problems, left(), list(registry.glob("*.json"))) == ([], [], [])

        await runner.start()
        await runner.until(lambda: store.group_counts().get("ready", 0) == 2, timeout_s=120)
        assert await runner.end(signal.SIGTERM) == 0
        rewards = [result.reward for group in (0, 1) for result in store.results(group)]
        store.close()
    assert rewards == [1.0] * 6
    assert (left(), list(registry.glob("*.json"))) == ([], [])

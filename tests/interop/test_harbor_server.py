"""Rollouts that an OpenEnv Harbor server runs: its real server code, our real gateway, a scripted model."""

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineUnreachable
from capture_proxy.types import SessionPolicy, TurnRole
from harness_trainer.environments import OpenEnvHarborConfig
from harness_trainer.environments.openenv_harbor import HarborServer, inspect_server
from harness_trainer.errors import ConfigError, SetupError, TaskError
from harness_trainer.rewards.custom import load_reward
from harness_trainer.rollouts.__main__ import _opened
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.harbor_server import ServerMeans, run_rollout
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, Outcome
from harness_trainer.tasks import Task
from sandboxes.base import Access, Endpoint
from tests.capture.serving import KEY, served, until
from tests.interop import harbor_standin
from tests.interop.openenv_servers import a_server, dataset

KINDS = sorted(set(harbor_standin.AGENTS) - {"dies"})
TOOL = Reply("I look.", tool_calls=[("bash", {"command": "ls"})])
WORKS = [TOOL, "the moon"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests that leave it as it is; one place more than any of them needs at once."""
    folder = tmp_path_factory.mktemp("server")
    with a_server(folder, dataset(folder / "tasks", *KINDS), dataset(folder / "empty"), max_sessions=3) as server:
        yield server


def config(server, **changes):
    split = {"split": str(server.log.parent / "tasks")}
    return OpenEnvHarborConfig(url=server.url, **{"harness": "mini-swe-agent", "sandbox": "docker"} | split | changes)


@contextlib.asynccontextmanager
async def meaning(tmp_path, engine, env, *, public_url=None, **rollouts):
    """Everything a runner has for rollouts on a server, over a gateway of its own."""
    rollouts = RolloutConfig(**{"timeout_s": 60, "max_turns": 8, "max_tokens": 512, **rollouts})
    async with served(engine, tmp_path / "store.sqlite") as gateway:
        spec = RunnerSpec(
            config=rollouts,
            env=env,
            tasks="",
            harness=env.harness,
            harness_bin=Path(),
            store=tmp_path / "store.sqlite",
            artifacts=tmp_path / "artifacts",
            registry=tmp_path / "owned",
            run_id="test",
            model="scripted",
            context=8192,
            access=Access(gateway=Endpoint(url=gateway.agent_url, public_url=public_url)),
            admin_url=gateway.admin_url,
            max_open_groups=1,
            num_groups=1,
        )
        yield ServerMeans(spec, HarborServer(env), gateway.admin, load_reward(rollouts.reward))


async def tasks_of(means):
    return {task.name: task for task in await means.server.tasks()}


async def roll(tmp_path, server, kind, engine=None, *, env=None, **rollouts):
    """One rollout of the task of that name: its result, and what our gateway has of it."""
    async with meaning(tmp_path, engine or ScriptedEngine(WORKS), env or config(server), **rollouts) as means:
        task = (await tasks_of(means))[kind]
        result = await run_rollout(Job("g0-0-a", 0, 0, task), means)
        with contextlib.suppress(Exception):  # of a rollout that never had a session
            return result, await means.admin.capture("g0-0-a")
        return result, None


# --- what a rollout comes to --------------------------------------------------------------------------------------


async def test_the_servers_agent_works_on_our_model_is_captured_exactly_and_has_the_servers_reward(tmp_path, server):
    engine = ScriptedEngine(WORKS)
    result, capture = await roll(tmp_path, server, "works", engine, temperature=0.7)
    assert (result.outcome, result.reward, result.rewards) == (Outcome.OK, 1.0, {"reward": 1.0}), result.detail
    assert (result.harness, result.num_turns, result.num_trainable_turns) == ("mini-swe-agent", 2, 2)
    assert result.tool_calls == {"bash": 1} and result.num_side_turns == 0
    (row,) = result.trace["turns"]  # both calls are one row: the second goes on from the first, token by token
    assert sum(row["loss_mask"]) == result.num_completion_tokens > 10
    assert len(engine.requests) == 2, "the server asked our engine nothing of its own"
    assert {request.sampling["temperature"] for request in engine.requests} == {0.7}
    assert capture.session.sealed
    assert {"create", "setup", "agent", "capture"} <= result.stages_s.keys() and "agent.trial" in result.stages_s
    assert any(finding.startswith("server: [INFO] trial oe-works-") for finding in result.findings)
    told = json.loads((tmp_path / "artifacts" / "g0-0-a" / "server_result.json").read_text())
    assert [message["role"] for message in told["conversations"][0]["messages"]] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert "sk-" not in json.dumps(told)


async def test_an_agent_without_tools_is_captured_as_well(tmp_path, server):
    result, _ = await roll(tmp_path, server, "toolless", ScriptedEngine(["a star", "the moon"]))
    assert (result.outcome, result.reward, result.num_trainable_turns) == (Outcome.OK, 1.0, 2), result.detail


@pytest.mark.parametrize("kind", ["works", "toolless"])
async def test_what_a_server_asks_an_engine_that_it_does_know_is_no_work_of_the_agent(
    tmp_path, server, kind, monkeypatch
):
    monkeypatch.setattr("harness_trainer.rollouts.harbor_server._UNLISTED", "")
    engine = ScriptedEngine(
        lambda request: "the moon" if "moon" in str(request.messages[0]) else Reply("", tool_calls=[("bash", {})])
    )
    result, capture = await roll(tmp_path, server, kind, engine)
    assert len(capture.turns) == result.num_turns + 2, "it asked: this is the text that it asks"
    assert (result.outcome, result.reward, result.num_side_turns) == (Outcome.OK, 1.0, 0), result.detail
    assert result.num_trainable_turns == result.num_turns
    asked = [json.dumps(turn["request"]) for turn in result.trace["turns"]]
    assert asked and all("Say moon." in text for text in asked)


async def test_the_call_limit_ends_the_agent_and_it_is_scored_still(tmp_path, server):
    result, _ = await roll(tmp_path, server, "loops", ScriptedEngine([TOOL]), max_turns=3)
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.TRUNCATED, 0.25, 3), result.detail
    assert "limit" in result.detail


async def test_a_limit_of_the_sessions_own_ends_the_agent_at_once(tmp_path, server):
    """The server would hand an error of ours on as one to try again; it gets a reply."""
    began = time.monotonic()
    engine = ScriptedEngine([TOOL], max_model_len=300)
    result, _ = await roll(tmp_path, server, "loops", engine, max_turns=40)
    assert (result.outcome, result.reward) == (Outcome.TRUNCATED, 0.25), result.detail
    assert "context_length" in result.detail and time.monotonic() - began < 30


async def test_the_agents_time_limit_is_ours_and_it_is_scored_still(tmp_path, server):
    result, _ = await roll(tmp_path, server, "slow", ScriptedEngine(["a star"]), timeout_s=1)
    assert (result.outcome, result.reward, result.timed_out) == (Outcome.TRUNCATED, 0.25, True), result.detail


async def test_an_agent_that_fails_is_the_agents_fault(tmp_path, server):
    result, _ = await roll(tmp_path, server, "fails")
    assert (result.outcome, result.reward) == (Outcome.AGENT_FAILED, 0.25)
    assert result.detail == "NonZeroAgentExitCodeError: exit code 3: no such model"


@pytest.mark.parametrize(
    ("kind", "stage", "says"),
    [
        ("unscored", "verify", "not scored: the verifier gave no reward"),
        ("notanumber", "verify", "not scored"),
        ("several", "verify", "several rewards ['a', 'b']"),
        ("ungraded", "verify", "RewardFileNotFoundError: no /logs/verifier/reward.txt"),
        ("unbuilt", "prepare", "SandboxBuildFailedError: line 3: no such package"),
        ("explodes", "agent", "RuntimeError: the sandbox is on fire"),
        ("silent", "agent", "the agent made no model call"),
    ],
)
async def test_without_a_reward_there_is_no_result_and_another_try_may_have_one(tmp_path, server, kind, stage, says):
    result, _ = await roll(tmp_path, server, kind)
    assert (result.outcome, result.reward, result.rewards) == (Outcome.INFRA_FAILED, None, {})
    assert result.failed_stage == stage and says in result.detail and not result.setup_failed


async def test_the_reward_that_trains_is_chosen_by_name_or_by_a_function_of_ones_own(tmp_path, server):
    result, _ = await roll(tmp_path, server, "several", env=config(server, reward_key="b"))
    assert (result.outcome, result.reward, result.rewards) == (Outcome.OK, 0.0, {"a": 1.0, "b": 0.0})
    weighed = tmp_path / "weighed"
    weighed.mkdir()
    result, _ = await roll(weighed, server, "several", reward_weights={"a": 0.5, "b": 2.0})
    assert (result.outcome, result.rewards) == (Outcome.OK, {"a": 1.0, "b": 0.0}), "the runner weighs them"
    own = tmp_path / "own.py"
    own.write_text("def score(outcome):\n    return 10 * outcome.env_reward + outcome.tool_call_count\n")
    other = tmp_path / "other"
    other.mkdir()
    result, _ = await roll(other, server, "works", reward=f"{own}:score")
    assert (result.outcome, result.reward) == (Outcome.OK, 11.0)


async def test_a_fault_of_the_model_is_not_the_agents(tmp_path, server):
    engine = ScriptedEngine(WORKS, faults={n: EngineUnreachable("engine away") for n in range(50)})
    result, _ = await roll(tmp_path, server, "works", engine)
    assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, "agent")
    assert "engine away" in result.detail


# --- together -----------------------------------------------------------------------------------------------------


async def test_rollouts_at_once_keep_their_tokens_apart(tmp_path, server):
    engine = ScriptedEngine(lambda request: f"answer {len(request.messages)}")
    async with meaning(tmp_path, engine, config(server)) as means:
        task = (await tasks_of(means))["meets"]
        async with asyncio.timeout(60):
            results = await asyncio.gather(*(run_rollout(Job(f"g0-{n}", 0, 0, task), means) for n in range(2)))
        captures = [await means.admin.capture(f"g0-{n}") for n in range(2)]
    assert [(r.outcome, r.num_turns) for r in results] == [(Outcome.OK, 2)] * 2, [r.detail for r in results]
    assert [[len(t.request["messages"]) for t in c.turns] for c in captures] == [[1, 3], [1, 3]]
    assert all(turn.role is TurnRole.AGENT for capture in captures for turn in capture.turns)


async def test_never_more_sessions_than_the_server_allows_and_a_full_server_is_waited_for(tmp_path, server):
    """Three places; a run of two at a time beside somebody else who holds two."""
    env = config(server, max_sessions=2)
    async with meaning(tmp_path, ScriptedEngine(lambda request: "the moon"), env) as means:
        task = (await tasks_of(means))["works"]
        async with contextlib.AsyncExitStack() as others:
            for _ in range(2):
                await others.enter_async_context(HarborServer(env).session(5))
            async with asyncio.timeout(60):
                results = await asyncio.gather(*(run_rollout(Job(f"g0-{n}", 0, 0, task), means) for n in range(4)))
    assert [r.outcome for r in results] == [Outcome.OK] * 4, [r.detail for r in results]
    assert all("wait" in r.stages_s for r in results)


async def test_a_server_that_stays_full_is_infra_with_the_reason(tmp_path, server):
    env = config(server)
    async with meaning(tmp_path, ScriptedEngine(WORKS), env, start_timeout_s=0.6) as means:
        task = (await tasks_of(means))["works"]
        async with contextlib.AsyncExitStack() as others:
            for _ in range(3):
                await others.enter_async_context(HarborServer(env).session(5))
            result = await run_rollout(Job("g0-0-a", 0, 0, task), means)
    assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, "create")
    assert "3/3 sessions active" in result.detail and server.url in result.detail


# --- ends ---------------------------------------------------------------------------------------------------------


async def test_a_server_that_hangs_is_left_at_the_deadline_and_its_agent_gets_no_more_from_the_model(tmp_path, server):
    result, capture = await roll(tmp_path, server, "hangs", ScriptedEngine(["a star"]), deadline_s=4)
    assert (result.outcome, result.failed_stage, result.reward) == (Outcome.INFRA_FAILED, "agent", None)
    assert "agent took more than" in result.detail
    assert capture.session.sealed and len(capture.turns) == 1


async def test_a_cancelled_rollout_ends_at_once_and_closes_its_session(tmp_path, server):
    engine = ScriptedEngine(["a star"])
    async with meaning(tmp_path, engine, config(server)) as means:
        task = (await tasks_of(means))["hangs"]
        rolling = asyncio.create_task(run_rollout(Job("g0-0-a", 0, 0, task), means))
        await until(lambda: engine.requests, timeout_s=30)
        rolling.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await rolling
        assert time.monotonic() - began < 3
        assert (await means.admin.session("g0-0-a")).sealed


async def test_what_a_killed_runner_left_is_sealed_by_the_next(tmp_path, server):
    """The server may go on with its agent for a while, which gets no more from the model."""
    async with meaning(tmp_path, ScriptedEngine(WORKS), config(server)) as means, contextlib.AsyncExitStack() as stack:
        store = RolloutStore(means.spec.store)
        stack.callback(store.close)
        store.open_group(0, "works", "mini-swe-agent")
        store.start_rollout("g0-0-a", 0, 0, 0)
        await means.admin.mint("g0-0-a", SessionPolicy(), {})
        _, take_over = await _opened(stack, means.spec, store, KEY)
        assert await take_over() == ()
        assert (await means.admin.session("g0-0-a")).sealed
        assert store.outcome_counts() == {"cancelled": 1}


async def test_a_server_that_dies_in_the_middle_is_noticed_at_once(tmp_path):
    with a_server(tmp_path, dataset(tmp_path / "tasks", "dies")) as mortal:
        began = time.monotonic()
        result, capture = await roll(tmp_path, mortal, "dies", env=config(mortal))
        assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, "agent")
        assert mortal.url in result.detail and time.monotonic() - began < 30
        assert capture.session.sealed
        other = tmp_path / "later"
        other.mkdir()
        async with meaning(other, ScriptedEngine(WORKS), config(mortal)) as means:
            known = Task("dies", Path(), "", metadata={"split": "x", "index": 0, "task_name": "dies"})
            again = await run_rollout(Job("g0-0-b", 0, 1, known), means)
        assert (again.outcome, again.failed_stage) == (Outcome.INFRA_FAILED, "create")
        assert "Failed to connect" in again.detail


# --- names the server does not know -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"harness": "my:Agent"}, "no seam for 'my:Agent'"),
        ({"harness": "nobody"}, "no seam for 'nobody'"),
    ],
)
async def test_an_agent_that_the_server_cannot_find_fails_alike_every_time(tmp_path, server, changes, says):
    result, _ = await roll(tmp_path, server, "works", env=config(server, **changes))
    assert (result.outcome, result.reward) == (Outcome.INFRA_FAILED, None)
    assert says in result.detail


async def test_another_dataset_under_the_same_index_is_not_taken_for_the_task(tmp_path, server):
    async with meaning(tmp_path, ScriptedEngine(WORKS), config(server)) as means:
        task = (await tasks_of(means))["works"]
        task.metadata["task_name"] = "yesterday"
        result = await run_rollout(Job("g0-0-a", 0, 0, task), means)
        assert result.outcome is Outcome.INFRA_FAILED and "is 'works' now" in result.detail
        task.metadata["split"] = "nothing"
        result = await run_rollout(Job("g0-0-b", 0, 0, task), means)
    assert (result.outcome, result.setup_failed) == (Outcome.INFRA_FAILED, True)
    assert "unknown split 'nothing'" in result.detail


async def test_tasks_are_named_counted_and_chosen_by_index(server):
    found = await inspect_server(config(server))
    assert [task.name for task in found.tasks] == KINDS and found.notes == []
    assert found.tasks[2].metadata["index"] == 2 and found.tasks[2].instruction == f"Do {KINDS[2]}."
    some = await HarborServer(config(server, tasks="1,3-4,99")).tasks()
    assert [task.name for task in some] == [KINDS[1], KINDS[3], KINDS[4]]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"split": "mars"}, ConfigError, "no dataset 'mars': set --env.split to one of /"),
        ({"split": None}, ConfigError, "several datasets: set --env.split"),
        ({"split": "empty"}, TaskError, "no Harbor tasks found"),
        ({"tasks": "500-"}, ValueError, "0-9,12"),
        ({"tasks": "500-600"}, TaskError, "has no task with --env.tasks 500-600"),
        ({"harness": "nobody"}, ConfigError, "knows no agent 'nobody': set --env.harness to one of .*opencode"),
        ({"sandbox": "e2b"}, SetupError, "'e2b' (E2B_API_KEY is not set): set --env.sandbox to one of docker"),
        ({"token_env": "NO_SUCH_VARIABLE"}, SetupError, "export NO_SUCH_VARIABLE"),
    ],
)
async def test_what_cannot_be_run_is_said_before_anything_is_started(server, changes, error, says):
    if changes.get("split") == "empty":
        changes = {"split": str(server.log.parent / "empty")}
    with pytest.raises(error, match=says.replace("(", r"\(").replace(")", r"\)")):
        await inspect_server(config(server, **changes))


async def test_what_the_server_thinks_of_its_agent_is_passed_on(server):
    (note,) = (await inspect_server(config(server, harness="eve"))).notes
    assert "agent eve: " in note

"""Each stage has its limit, its cap and its name; whatever fails in it costs one rollout and leaves nothing."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.errors import SetupError, TaskError
from harness_trainer.harnesses import load_harness
from harness_trainer.rollouts.agent_sources import open_pool
from harness_trainer.rollouts.boxes import check_tasks
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.types import Job, Outcome
from sandboxes.base import BoxSpec, Healthcheck, Network, NetworkMode, SandboxError, SandboxGone, SetupFailed
from sandboxes.docker import DockerConfig
from sandboxes.local import LocalConfig
from sandboxes.pool import Bounds, Pool, Times
from tests.capture.serving import until
from tests.rollouts.rolling import CALL, roll, rolling, shell_agent, task
from tests.sandboxes.pool_backend import ScriptedBackend

QUICK = shell_agent(CALL + "> /dev/null; touch answer.txt")


@contextlib.asynccontextmanager
async def scripted(tmp_path, backend, **settings):
    """What a runner has, over sandboxes that do what the test says."""
    async with rolling(tmp_path, ScriptedEngine(["x"]), QUICK, **settings) as means:
        async with Pool(backend, Bounds(starting=2)) as pool:
            yield replace(means, backend=backend, pool=pool)


def job(tmp_path, number=0, **options):
    return Job(f"g0-{number}-a", 0, 0, task(tmp_path, **options))


# --- failures, and the stage they come from -----------------------------------------------------------------------


async def test_a_start_that_hangs_is_given_up_at_its_limit_and_ended_later(tmp_path):
    backend = ScriptedBackend()
    backend.start_gate.clear()
    async with scripted(tmp_path, backend, start_timeout_s=0.1) as means:
        result = await run_rollout(job(tmp_path), means)
        assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, "create")
        assert "create took more than" in result.detail and not result.setup_failed
        assert result.start_hung
    assert all(box.stopped for box in backend.begun)


@pytest.mark.parametrize("others", ["start", "are warm", "had started before"])
async def test_a_start_that_hangs_is_the_tasks_fault_if_others_are_started_meanwhile(tmp_path, others):
    """One that was started ahead of need says nothing of an engine that stalls now."""
    backend, other = ScriptedBackend(), BoxSpec("other")
    async with scripted(tmp_path, backend, start_timeout_s=0.2) as means:
        if others == "had started before":
            await means.pool.give_up(await means.pool.take(other))
        if others == "are warm":
            means.pool.plan([(other, 1)])
            await backend.until(lambda: means.pool.num_ready == 1)
        backend.start_gate.clear()
        hangs = asyncio.create_task(run_rollout(job(tmp_path), means))
        await backend.until(lambda: backend.starting == 1)
        await asyncio.sleep(0.01)
        if others != "had started before":
            backend.start_gate, stalled = asyncio.Event(), backend.start_gate
            if others == "start":
                backend.start_gate.set()
            await means.pool.give_up(await means.pool.take(other))
            backend.start_gate = stalled
        result = await hangs
    assert (result.failed_stage, result.start_hung) == ("create", True)
    assert result.setup_failed is (others == "start")


async def test_who_only_waited_for_others_starts_did_not_hang(tmp_path):
    backend = ScriptedBackend()
    backend.start_gate.clear()
    async with scripted(tmp_path, backend, start_timeout_s=0.2) as means:
        others = [replace(task(tmp_path), name=name, box=BoxSpec(name)) for name in ("a", "b")]
        jobs = [Job(f"g{n}-0-a", n, 0, each) for n, each in enumerate(others)]
        results = await asyncio.gather(*(run_rollout(each, means) for each in [*jobs, job(tmp_path, 2)]))
    assert [(r.failed_stage, r.start_hung) for r in results] == [("create", True), ("create", True), ("create", False)]


async def test_a_start_that_the_pool_gives_up_hung_too(tmp_path):
    """It may have been begun ahead of need, and be over before who waits for it has waited for long."""
    backend = ScriptedBackend()
    backend.start_gate.clear()
    async with scripted(tmp_path, backend) as means:
        async with open_pool(backend, RolloutConfig(start_timeout_s=0.05)) as pool:
            result = await run_rollout(job(tmp_path), replace(means, pool=pool))
    assert (result.failed_stage, result.setup_failed, result.start_hung) == ("create", False, True)


async def test_a_health_check_has_its_own_time_beside_the_starts(tmp_path):
    backend = ScriptedBackend()
    backend.start_gate.clear()
    checked = replace(task(tmp_path), box=BoxSpec("a", healthcheck=Healthcheck("true", start_period_s=20)))
    async with scripted(tmp_path, backend, start_timeout_s=0.1) as means:
        async with open_pool(backend, means.config) as pool:
            asyncio.get_running_loop().call_later(0.3, backend.start_gate.set)
            result = await run_rollout(Job("g0-0-a", 0, 0, checked), replace(means, pool=pool))
    assert result.failed_stage not in ("create", "setup"), result.detail


@pytest.mark.parametrize(
    ("error", "deterministic"),
    [(SetupFailed("line 3: no such package"), True), (SandboxError("engine away"), False), (KeyError("Id"), False)],
)
async def test_a_box_that_cannot_be_had_is_infra_and_says_whether_another_try_can_help(tmp_path, error, deterministic):
    backend = ScriptedBackend(prepare_error=lambda spec: error)
    async with scripted(tmp_path, backend) as means:
        result = await run_rollout(job(tmp_path), means)
    assert (result.outcome, result.reward, result.failed_stage) == (Outcome.INFRA_FAILED, None, "prepare")
    assert result.setup_failed is deterministic
    assert str(error.args[0]) in result.detail


async def test_a_health_check_that_fails_is_a_setup_failure(tmp_path):
    backend = ScriptedBackend(start_error=lambda box: SetupFailed("unhealthy"))
    async with scripted(tmp_path, backend) as means:
        result = await run_rollout(job(tmp_path), means)
    assert (result.failed_stage, result.setup_failed) == ("create", True)


@pytest.mark.parametrize(
    "error", [SandboxGone("it is gone"), SandboxError("no answer"), OSError("disk"), KeyError("k")]
)
async def test_a_box_that_fails_under_its_agent_is_infra_is_ended_and_ends_no_sibling(tmp_path, error):
    backend = ScriptedBackend(run_error=lambda box: error)
    async with scripted(tmp_path, backend) as means:
        results = await asyncio.gather(*(run_rollout(job(tmp_path, n), means) for n in range(3)))
        assert backend.alive == []
    assert all((r.outcome, r.reward, r.failed_stage) == (Outcome.INFRA_FAILED, None, "agent") for r in results)
    assert all(r.warm is False and "stop" in r.stages_s for r in results)


async def test_a_box_that_broke_while_its_agent_ran_is_not_scored_as_the_agents_failure(tmp_path):
    def break_it(box):
        box.dead = True

    backend = ScriptedBackend(run_error=break_it)
    async with scripted(tmp_path, backend) as means:
        result = await run_rollout(job(tmp_path), means)
    assert (result.outcome, result.reward, result.failed_stage) == (Outcome.INFRA_FAILED, None, "agent")


async def test_a_box_without_a_way_to_the_gateway_is_refused_with_a_reason(tmp_path):
    backend = ScriptedBackend(gateway_url=None)
    async with scripted(tmp_path, backend) as means:
        result = await run_rollout(job(tmp_path), means)
    assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, "setup")
    assert "gateway" in result.detail


# --- time ---------------------------------------------------------------------------------------------------------


async def test_an_agent_that_uses_up_the_deadline_is_cut_in_time_for_its_tests(tmp_path):
    slow = shell_agent(CALL + "> /dev/null; touch answer.txt; sleep 600")
    result = await roll(tmp_path, ScriptedEngine(["x"]), slow, deadline_s=8)
    assert (result.outcome, result.reward) == (Outcome.TRUNCATED, 0.5), result.detail
    spent = result.stages_s
    assert spent["agent"] < 7.5
    assert sum(spent[stage] for stage in ("create", "setup", "agent", "verify")) < 8 + 2


async def test_tests_that_never_end_are_cut_at_the_deadline_and_count_as_unknown(tmp_path):
    endless = task(tmp_path, verify="sleep 600")
    result = await roll(tmp_path, ScriptedEngine(["x"]), QUICK, job_task=endless, deadline_s=8)
    assert (result.outcome, result.reward, result.failed_stage) == (Outcome.INFRA_FAILED, None, "verify")
    assert result.stages_s["verify"] < 10


async def test_every_stage_is_timed_in_order(tmp_path):
    result = await roll(tmp_path, ScriptedEngine(["x"]), QUICK)
    assert result.outcome is Outcome.OK, result.detail
    stages = [stage for stage in result.stages_s if "." not in stage]
    assert stages == ["prepare", "wait", "create", "setup", "agent", "capture", "verify", "stop"]
    assert "verify.tests" in result.stages_s
    assert all(seconds >= 0 for seconds in result.stages_s.values())
    assert result.failed_stage == ""


# --- caps ---------------------------------------------------------------------------------------------------------


def overlap(path):
    """The most that were inside at once, of a file with a `+` or `-` on each line."""
    inside = most = 0
    for line in path.read_text().split():
        inside += 1 if line == "+" else -1
        most = max(most, inside)
    return most


async def test_agents_and_verifiers_are_each_capped_on_their_own(tmp_path):
    """Plain local sandboxes, so that agents and tests can write into a file of ours."""
    running, verifying = tmp_path / "running", tmp_path / "verifying"
    agent = shell_agent(f"{CALL} > /dev/null; echo + >> {running}; sleep 0.3; echo - >> {running}")
    tests = f"echo + >> {verifying}; sleep 0.3; echo 1 > $SANDBOX_ROOT/logs/verifier/reward.txt; echo - >> {verifying}"
    plain = LocalConfig(root=tmp_path / "boxes", isolation="none")
    settings = {"max_concurrent": 6, "max_running": 2, "max_verifying": 1}
    async with rolling(tmp_path, ScriptedEngine("moon"), agent, sandbox=plain, **settings) as means:
        results = await asyncio.gather(*(run_rollout(job(tmp_path, n, verify=tests), means) for n in range(6)))
    assert [r.reward for r in results] == [1.0] * 6, [r.detail for r in results]
    assert overlap(running) == 2
    assert overlap(verifying) == 1
    assert max(r.stages_s["wait"] for r in results) > 0.3


# --- endings ------------------------------------------------------------------------------------------------------


class Stubborn:
    """A backend whose sandboxes work, and fail or hang when they are to be ended."""

    def __init__(self, backend, gate, error):
        self._backend, self.gate, self.error = backend, gate, error
        self.stops = []

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def sandbox(self, spec):
        sandbox = self._backend.sandbox(spec)
        stop = sandbox.stop

        async def stubborn_stop():
            self.stops.append(sandbox)
            sandbox.stop = stop  # the backend's own end is another matter
            await self.gate.wait()
            await stop()
            if self.error is not None:
                raise self.error

        sandbox.stop = stubborn_stop
        return sandbox


@pytest.mark.parametrize("ending", ["fails", "hangs"])
async def test_an_ending_that_fails_or_hangs_turns_no_good_result_bad(tmp_path, ending):
    gate = asyncio.Event()
    async with rolling(tmp_path, ScriptedEngine("the moon"), load_harness("pyagent-chat")) as means:
        stubborn = Stubborn(means.backend, gate, SandboxError("will not go") if ending == "fails" else None)
        if ending == "fails":
            gate.set()
        async with Pool(stubborn, Bounds(), Times(stop=0.2)) as pool:
            result = await run_rollout(job(tmp_path), replace(means, pool=pool))
            gate.set()
    assert (result.outcome, result.reward) == (Outcome.OK, 1.0), result.detail
    assert result.stages_s["stop"] < 2
    assert len(stubborn.stops) == 1
    assert list((tmp_path / "boxes").glob("*")) == []


@pytest.mark.parametrize("stage", ["create", "agent", "verify"])
async def test_cancelling_a_rollout_leaves_nothing_wherever_it_is(tmp_path, stage):
    agent = shell_agent(CALL + ("> /dev/null; sleep 600" if stage == "agent" else "> /dev/null"))
    slow = task(tmp_path, verify="sleep 600" if stage == "verify" else "exit 0")
    engine = ScriptedEngine(["x"])
    async with rolling(tmp_path, engine, agent) as means:
        rollout = asyncio.ensure_future(run_rollout(Job("g0-0-a", 0, 0, slow), means))
        if stage == "create":
            await until(lambda: means.pool.num_starting or engine.requests, timeout_s=20)
        elif stage == "agent":
            await until(lambda: engine.requests, timeout_s=20)
        else:
            await until(lambda: (tmp_path / "artifacts" / "g0-0-a" / "agent.stdout.log").exists(), timeout_s=20)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
    assert list((tmp_path / "boxes").glob("*")) == []
    assert list((tmp_path / "owned").glob("*.json")) == []


# --- before anything runs -----------------------------------------------------------------------------------------


async def check(tmp_path, config, *boxes):
    tasks = [replace(task(tmp_path), name=box.name, box=box) for box in boxes]
    await check_tasks(tasks, config, run_id="test", registry=tmp_path / "owned")


async def test_an_engine_that_is_not_there_is_said_before_anything_slow_starts(tmp_path):
    with pytest.raises(SetupError, match="no docker sandboxes here"):
        await check(tmp_path, DockerConfig(host=f"unix://{tmp_path}/none.sock"), BoxSpec("a"))


async def test_a_task_that_wants_no_network_at_all_is_refused_by_name_because_its_agent_needs_a_model(tmp_path):
    sealed = BoxSpec("b", network=Network(NetworkMode.NONE))
    with pytest.raises(TaskError, match=r"'b' .*proxy-only"):
        await check(tmp_path, LocalConfig(), BoxSpec("a"), sealed)


async def test_tasks_that_can_run_are_let_through(tmp_path):
    await check(tmp_path, LocalConfig(), BoxSpec("a"), BoxSpec("b"))
    assert not (tmp_path / "owned").exists() or list((tmp_path / "owned").glob("*.json")) == []

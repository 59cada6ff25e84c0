"""What stays with the runner when attempts run on nodes: reward functions, variables, a dead runner's rest."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.rewards.custom import load_reward
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.on_ray.opened import scored, variables
from harness_trainer.rollouts.sealing import close_lost, seal
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, Outcome
from harness_trainer.tasks import Task
from sandboxes.base import Access, BoxSpec
from sandboxes.e2b import E2BConfig
from tests.capture.serving import served
from tests.rollouts.policy import finished, infra

TASK = Task("moon", Path("/none"), "Say moon.", verify_script="true")


def spec_of(tmp_path, **fields):
    return RunnerSpec(
        config=RolloutConfig(), tasks="-", harness="-", harness_bin=Path(), store=tmp_path / "s", registry=tmp_path,
        artifacts=tmp_path, run_id="r", model="m", context=1, access=Access(), admin_url="", max_open_groups=1,
        num_groups=1, **fields,
    )  # fmt: skip


async def test_a_persons_reward_function_scores_here_what_a_node_has_run(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(outcome):\n    return 0.25 + len(outcome.completion)\n")
    (tmp_path / "bad.py").write_text("def reward(outcome):\n    raise KeyError('x')\n")
    async with served(ScriptedEngine("the moon", version="v1"), tmp_path / "store.sqlite") as gateway:
        session = await gateway.mint("s1")
        async with gateway.http(session) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        await gateway.admin.seal("s1")

        async def attempt(job):
            return infra(job) if job.attempt else finished(job, reward=0.0)

        mine = scored(attempt, load_reward(f"{tmp_path}/mine.py:reward"), gateway.admin)
        result = await mine(Job("s1", 0, 0, TASK))
        assert (result.outcome, result.verifier_reward) == (Outcome.OK, 0.0)
        assert result.reward is not None and result.reward > 0.25 and "reward" in result.stages_s
        assert (await mine(Job("s1", 0, 1, TASK))).reward is None, "the machinery's failures are scored by nobody"
        failing = await scored(attempt, load_reward(f"{tmp_path}/bad.py:reward"), gateway.admin)(Job("s1", 0, 0, TASK))
        assert failing.reward is None, "unknown is not 0"
        lost = await mine(Job("s2", 0, 0, TASK))  # there is no such session
        assert (lost.outcome, lost.reward, lost.failed_stage) == (Outcome.INFRA_FAILED, None, "reward")
    assert scored(attempt, load_reward("verifier"), gateway.admin) is attempt


def test_only_what_tasks_and_sandboxes_name_is_sent_to_nodes(tmp_path, monkeypatch):
    for name in ("TASK_KEY", "BOX_KEY", "E2B_API_KEY", "SECRET"):
        monkeypatch.setenv(name, f"value of {name}")
    box = BoxSpec("moon", env={"KEY": "${BOX_KEY:-none}", "PLAIN": "SECRET"})
    task = Task(
        "moon", Path("/none"), "Say.", verify_script="true", box=box, env_vars={"A": "${TASK_KEY}", "B": "${NO}"}
    )
    assert set(variables(spec_of(tmp_path), [task])) == {"TASK_KEY", "BOX_KEY"}
    e2b = spec_of(tmp_path, sandbox=E2BConfig())
    assert variables(e2b, []) == {"E2B_API_KEY": "value of E2B_API_KEY"}


async def test_attempts_of_a_killed_runner_are_closed_and_their_sessions_sealed(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.open_group(0, "moon", "h")
    store.start_rollout("s1", 0, 0, 0)
    store.start_rollout("s2", 0, 1, 0)  # it had no session yet
    async with served(ScriptedEngine("the moon", version="v1"), tmp_path / "store.sqlite") as gateway:
        await gateway.mint("s1")
        assert await close_lost(store, [partial(seal, gateway.admin)]) == ()
        assert (await gateway.admin.session("s1")).sealed
    assert store.outcome_counts() == {"cancelled": 2}
    store.close()

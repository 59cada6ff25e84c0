"""An OpenEnv environment in the runner's own process: its settings survive the way there, its server is started."""

from __future__ import annotations

import json

from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.loops import pin_env
from harness_trainer.rollouts.store import RolloutStore
from tests.capture.serving import listening
from tests.capture.stub_vllm import StubVllm, reply
from tests.loops.openenv_serving import ENVS
from tests.loops.test_white_box_process import LoopRunner

REWARDS = """
def said(environments, completions, **kwargs):
    return [len(completions[0][-1]["content"]) + environments[0].observation["total"]]
"""


async def test_groups_of_a_local_server_are_filled_and_scored(tmp_path, monkeypatch):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.publish(1)
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adding.py").symlink_to(ENVS / "adding.py")
    target = "local:adding.py:app"
    env = pin_env(OpenEnvConfig(target=target, name="adding", max_episodes=2, rewards=["rewards.py:said"]))
    async with listening(StubVllm(chunks=reply("the ", "moon")).app()) as url:
        runner = LoopRunner(tmp_path, url)
        spec = tmp_path / "runner.json"
        spec.write_text(json.dumps(json.loads(spec.read_text()) | {"env": env.model_dump(), "harness": "adding"}))
        await runner.start()
        try:
            await runner.until(lambda: store.group_counts() == {"ready": 1})
        finally:
            assert await runner.end(15) == 0
    results = store.rollouts()
    store.close()
    assert {(result.harness, result.outcome, result.reward) for result in results} == {("adding", "ok", 8.0)}
    assert [(result.rewards, result.facts) for result in results] == [({"said": 8.0}, {"steps": 0.0})] * 4

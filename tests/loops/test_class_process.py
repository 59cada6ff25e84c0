"""An environment class in the runner's own process: its settings survive the way there, its functions score there."""

from __future__ import annotations

import json

from harness_trainer.environments import EnvironmentClassConfig
from harness_trainer.loops import pin_env
from harness_trainer.rollouts.store import RolloutStore
from tests.capture.serving import listening
from tests.capture.stub_vllm import StubVllm, reply
from tests.loops.test_white_box_process import LoopRunner

RACE = """
class Race:
    def reset(self, n, **kwargs):
        self.n = n
        return f"Lap {n}."

    def get_reward(self):
        return self.n / 4


def length(completions, n, **kwargs):
    assert n == [1] or n == [2]
    return [float(len(completion[-1]["content"])) for completion in completions]
"""


async def test_groups_of_a_class_are_filled_and_scored(tmp_path, monkeypatch):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.publish(1)
    (tmp_path / "race.py").write_text(RACE)
    monkeypatch.chdir(tmp_path)
    env = pin_env(EnvironmentClassConfig(target="race.py:Race", rewards=["race.py:length"]))
    async with listening(StubVllm(chunks=reply("the ", "moon")).app()) as url:
        runner = LoopRunner(tmp_path, url)
        spec = tmp_path / "runner.json"
        spec.write_text(json.dumps(json.loads(spec.read_text()) | {"env": env.model_dump(), "harness": "Race"}))
        await runner.start()
        try:
            await runner.until(lambda: store.group_counts() == {"ready": 1})
        finally:
            await runner.end(9)
    results = store.rollouts()
    store.close()
    (n,) = {int(result.task.removeprefix("n")) for result in results}
    assert {(result.harness, result.outcome) for result in results} == {("Race", "ok")}
    assert [result.rewards for result in results] == [{"length": 8.0, "Race": n / 4}] * 4
    assert {result.reward for result in results} == {8.0 + n / 4}

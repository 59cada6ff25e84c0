"""The runner as a process on an ORS server: groups are filled, held-out splits evaluated, sessions ended with it."""

from __future__ import annotations

import signal

import pytest

from harness_trainer.environments import OrsConfig
from harness_trainer.rollouts.config import RunnerSpec
from tests.capture.serving import listening
from tests.capture.stub_vllm import StubVllm, reply
from tests.loops.ors_server import running
from tests.loops.test_white_box_process import LoopRunner, num_open_sessions


@pytest.fixture(scope="module")
def server():
    with running("answers") as one:
        yield one


class OrsRunner(LoopRunner):
    def __init__(self, folder, engine_url, config, **settings):
        super().__init__(folder, engine_url, **settings)
        spec = RunnerSpec.model_validate_json(self.spec.read_text())
        self.spec.write_text(spec.model_copy(update={"env": config, "tasks": ""}).model_dump_json())


async def test_groups_are_filled_and_evaluated_and_each_session_ends(tmp_path, store, server, monkeypatch):
    monkeypatch.setenv("THE_SECRET_VARIABLE", "a-secret-that-nobody-sees")
    config = OrsConfig(target=server.url, name="sums", secrets={"K": "env:THE_SECRET_VARIABLE"})
    evaluation = {"tasks": "test:0", "samples": 2}
    async with listening(StubVllm(chunks=reply("it is ", "4")).app()) as url:
        runner = OrsRunner(tmp_path, url, config, evaluation=evaluation)
        await runner.start()
        try:
            await runner.until(lambda: bool(store.evaluations()) and store.group_counts().get("ready") == 1)
            assert await runner.end(signal.SIGTERM) == 0
        finally:
            await runner.end(signal.SIGKILL)
    results = store.rollouts()
    done = {(r.task, r.harness, r.outcome, r.reward) for r in results if r.outcome == "ok"}
    assert done == {("train-00000", "sums", "ok", 1.0), ("test-00000", "sums", "ok", 1.0)}
    assert {tuple(r.rewards.items()) for r in results if r.outcome == "ok"} == {(("outcome", 1.0),)}
    server.settled(open=0)
    assert num_open_sessions(tmp_path) == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 2 and not any(b"a-secret-that-nobody-sees" in path.read_bytes() for path in written)

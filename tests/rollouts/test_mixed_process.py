"""The runner as a process with sources of two kinds: agents in sandboxes, and a loop whose turns are ours."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.environments import OwnLoopConfig
from harness_trainer.rollouts.__main__ import RUNNER_ERROR
from harness_trainer.rollouts.config import PipelineSpec, RolloutConfig, SourceSpec
from tests.capture.serving import listening, served
from tests.capture.stub_vllm import StubVllm, reply
from tests.loops.test_white_box_process import LOOP, num_open_sessions
from tests.rollouts.reattaching import Bench, Boxes

SETTINGS = {"group_size": 2, "max_concurrent": 4, "timeout_s": 90, "warm_total": 0, "retry_backoff_s": 0.0}


class MixedBench(Bench):
    """A source of agents and one of a loop, one group of each; the loop's model calls go to a stand-in for vLLM."""

    def __init__(self, folder, gateway, store, engine_url, *, loop=LOOP):
        super().__init__(folder, gateway, store, Boxes("none", folder), max_open_groups=2, num_groups=2)
        (folder / "moon_loop.py").write_text(loop)
        (folder / "plain.jsonl").write_text(json.dumps({"name": "plain", "prompt": "Say moon.", "n": 1}))
        spec = json.loads((folder / "runner.json").read_text())
        config = RolloutConfig(**SETTINGS)
        sources = [
            SourceSpec(name="code", config=config, tasks=spec["tasks"], harness=spec["harness"]),
            SourceSpec(
                name="moon",
                config=config,
                env=OwnLoopConfig(target=f"{folder / 'moon_loop.py'}:Moon", name="moon"),
                tasks=str(folder / "plain.jsonl"),
                harness="moon",
            ),
        ]
        pipeline = PipelineSpec(engine_url=engine_url, model="stub", transport="generate", bridging="never")
        spec |= {
            "config": config.model_dump(mode="json"),
            "sources": [source.model_dump(mode="json") for source in sources],
            "pipeline": pipeline.model_dump(mode="json"),
        }
        (folder / "runner.json").write_text(json.dumps(spec))


async def test_killed_with_both_at_work_agents_go_on_and_the_loop_is_run_again(tmp_path, store):
    hanging = StubVllm(chunks=[*reply("the moon")[:1], asyncio.Event()])
    engine = ScriptedEngine("the moon", version="v1")
    async with listening(hanging.app()) as url, served(engine, tmp_path / "store.sqlite") as gateway:
        run = MixedBench(tmp_path, gateway, store, url)
        await run.start()
        try:
            await run.until(lambda: len(run.at_work()) == 2 and hanging.streaming == 2)
            agents = {one.rollout_id for one in run.at_work()}
            await run.kill()
            assert len(run.agents()) == 2 and num_open_sessions(tmp_path) == 4
            hanging.chunks = reply("the moon")
            await run.start()
            await run.until(lambda: run.log().count("goes on in") == 2)
            await run.until(lambda: store.outcome_counts().get("ok", 0) == 2)
            assert {one.rollout_id for one in run.at_work()} == agents, "the same agents, all the while"
            run.tell_to_go_on(run.at_work())
            await run.until(lambda: store.group_counts() == {"ready": 2})
        finally:
            await run.end()
        run.check_nothing_left()
    results = [result for group in range(2) for result in store.results(group)]
    assert Counter((one.source, one.task, one.harness, one.reward) for one in results) == {
        ("code", "code/plain", "waiting", 1.0): 2,
        ("moon", "moon/plain", "moon", 2.0): 2,
    }
    assert {one.rollout_id for one in results if one.source == "code"} == agents
    assert store.outcome_counts() == {"cancelled": 2, "ok": 4}
    assert num_open_sessions(tmp_path) == 0


async def test_a_source_that_cannot_be_opened_ends_the_run_and_is_named(tmp_path, store):
    engine = ScriptedEngine("the moon", version="v1")
    async with served(engine, tmp_path / "store.sqlite") as gateway:
        run = MixedBench(tmp_path, gateway, store, "http://127.0.0.1:9", loop="class Moon:\n    pass\n")
        await run.start()
        assert await asyncio.to_thread(run.process.wait, 60) == 1
        await run.end()
    assert (store.state(RUNNER_ERROR) or "").startswith("source moon: ")

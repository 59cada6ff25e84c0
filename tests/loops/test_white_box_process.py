"""The runner as a process with a loop of one's own: groups are filled, what is killed is run again, faults are told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
from pathlib import Path

from harness_trainer.environments import OwnLoopConfig
from harness_trainer.rollouts.__main__ import RUNNER_ERROR
from harness_trainer.rollouts.config import PipelineSpec, RolloutConfig, RunnerSpec
from sandboxes.base import Access
from tests.capture.serving import listening
from tests.capture.stub_vllm import StubVllm, reply
from tests.rollouts.runner_process import RunnerProcess

LOOP = """
class Moon:
    async def run(self, task, model):
        message = {"role": "user", "content": task.metadata["row"]["prompt"]}
        first = await model.chat([message])
        second = await model.chat([message, first.message, {"role": "user", "content": "again"}])
        return {"first": "moon" in first.message["content"], "n": task.metadata["row"]["n"]} | {"first": 1.0}
"""


class LoopRunner(RunnerProcess):
    """On a stand-in for vLLM, in a folder with a store."""

    def __init__(self, folder: Path, engine_url: str, *, loop: str = LOOP, **settings) -> None:
        super().__init__(folder / "runner.json", folder / "runner.log")
        (folder / "moon_loop.py").write_text(loop)
        for name, numbers in (("rows", (1, 2)), ("held_out", (3,))):
            lines = [json.dumps({"name": f"n{n}", "prompt": "Say moon.", "n": n}) for n in numbers]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        spec = RunnerSpec(
            config=RolloutConfig(**{"group_size": 4, "max_concurrent": 4, "timeout_s": 60, **settings}),
            env=OwnLoopConfig(target=f"{folder / 'moon_loop.py'}:Moon"),
            tasks=str(folder / "rows.jsonl"),
            harness="Moon",
            harness_bin=Path(),
            store=folder / "store.sqlite",
            artifacts=folder / "artifacts",
            registry=folder / "owned",
            run_id="test",
            model="m",
            context=8192,
            access=Access(),
            admin_url="http://127.0.0.1:9",
            pipeline=PipelineSpec(engine_url=engine_url, model="stub", transport="generate", bridging="never"),
            max_open_groups=1,
            num_groups=2,
            max_staleness=0,
            max_dropped_in_a_row=3,
        )
        self.spec.write_text(spec.model_dump_json())


@contextlib.asynccontextmanager
async def running(folder: Path, stub: StubVllm, **settings):
    async with listening(stub.app()) as url:
        runner = LoopRunner(folder, url, **settings)
        await runner.start()
        try:
            yield runner
        finally:
            await runner.end(signal.SIGKILL)


def num_open_sessions(folder: Path) -> int:
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as db:
        sql = "SELECT COUNT(*) FROM capture_sessions WHERE json_extract(CAST(body AS TEXT), '$.sealed') = 0"
        return int(db.execute(sql).fetchone()[0])


async def test_groups_are_filled_and_handed_over(tmp_path, store):
    async with running(tmp_path, StubVllm(chunks=reply("the ", "moon"))) as runner:
        await runner.until(lambda: store.group_counts() == {"ready": 1})
        store.mark_trained([0], 1)
        store.publish(2)
        await runner.until(lambda: store.group_counts() == {"ready": 1, "trained": 1})
        assert await runner.end(signal.SIGTERM) == 0
    results = store.rollouts()
    assert {(result.harness, result.outcome, result.num_trainable_turns) for result in results} == {("Moon", "ok", 2)}
    assert {result.task: result.reward for result in results} == {"n1": 2.0, "n2": 3.0}
    assert num_open_sessions(tmp_path) == 0


async def test_what_a_killed_runner_ran_is_closed_and_run_again(tmp_path, store):
    hanging = StubVllm(chunks=[*reply("the moon")[:1], asyncio.Event()])
    async with running(tmp_path, hanging) as runner:
        await runner.until(lambda: hanging.streaming == 4)
        await runner.end(signal.SIGKILL)
        assert num_open_sessions(tmp_path) == 4
        hanging.chunks = reply("the moon")
        await runner.start()
        await runner.until(lambda: store.group_counts() == {"ready": 1})
        assert await runner.end(signal.SIGTERM) == 0
    assert store.outcome_counts() == {"cancelled": 4, "ok": 4}
    assert num_open_sessions(tmp_path) == 0


async def test_rollouts_that_became_too_old_are_cancelled_and_their_places_filled(tmp_path, store):
    hanging = StubVllm(chunks=[*reply("the moon")[:1], asyncio.Event()])
    async with running(tmp_path, hanging) as runner:
        await runner.until(lambda: hanging.streaming == 4)
        chunks, hanging.chunks = hanging.chunks, reply("the moon")
        store.publish(2)
        await runner.until(lambda: store.group_counts() == {"dropped": 1, "ready": 1})
        assert await runner.end(signal.SIGTERM) == 0
        chunks[-1].set()
    assert store.outcome_counts() == {"cancelled": 4, "ok": 4}
    assert num_open_sessions(tmp_path) == 0


async def test_held_out_rows_are_evaluated_on(tmp_path, store):
    evaluation = {"tasks": str(tmp_path / "held_out.jsonl"), "samples": 3}
    async with running(tmp_path, StubVllm(chunks=reply("the moon")), evaluation=evaluation) as runner:
        await runner.until(lambda: bool(store.evaluations()))
    held_out = [result for result in store.rollouts() if result.group_id < 0]
    assert [(result.task, result.reward) for result in held_out] == [("n3", 4.0)] * 3


async def test_a_loop_that_cannot_be_used_ends_the_run_with_the_reason(tmp_path, store):
    async with running(tmp_path, StubVllm(), loop="class Moon:\n    pass\n") as runner:
        assert await runner.end() == 1
    assert "run(self, task, model)" in (store.state(RUNNER_ERROR) or "")


async def test_a_loop_that_always_fails_ends_the_run(tmp_path, store):
    loop = "class Moon:\n    def run(self, task, model):\n        raise ValueError('my bug')\n"
    async with running(tmp_path, StubVllm(), loop=loop) as runner:
        assert await runner.end() == 1
    assert "too_few_scored" in (store.state(RUNNER_ERROR) or "")
    assert {result.detail for result in store.rollouts()} == {"the loop raised ValueError: my bug"}

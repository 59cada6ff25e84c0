"""The runner as a process, with real sandboxes and sessions: what is cancelled ends, what is killed continues."""

import asyncio
import json
import signal
from pathlib import Path

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.rollouts.config import RolloutConfig
from sandboxes.lifecycle import reap
from sandboxes.local import LocalConfig
from tests.capture.serving import served
from tests.rollouts.rolling import CALL, VERIFY, runner_spec
from tests.rollouts.runner_process import RunnerProcess

AGENT = {
    "name": "shell",
    "dialect": "openai_chat",
    "argv": ["sh", "-c", CALL],
    "env": {"URL": "${base_url}/v1/chat/completions", "TOKEN": "${token}"},
    "output": {"type": "text"},
}


class AgentRunner(RunnerProcess):
    """With agents in local sandboxes, in a folder with a store."""

    def __init__(self, folder: Path, gateway, **settings) -> None:
        super().__init__(folder / "runner.json", folder / "runner.log")
        self.boxes, self.registry = folder / "boxes", folder / "owned"
        (folder / "agent.yaml").write_text(json.dumps(AGENT))
        for name in ("moon", "star"):
            line = {"name": name, "instruction": f"Say {name}.", "verify": VERIFY}
            (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
        spec = runner_spec(
            folder,
            gateway,
            config=RolloutConfig(group_size=4, max_concurrent=4, timeout_s=60, **settings),
            sandbox=LocalConfig(root=self.boxes),
            tasks=str(folder / "moon.jsonl"),
            harness=str(folder / "agent.yaml"),
            registry=self.registry,
            num_groups=2,
            max_staleness=0,
        )
        self.spec.write_text(spec.model_dump_json())

    def num_boxes(self) -> int:
        return len(list(self.boxes.glob("*")))


async def test_rollouts_that_became_too_old_leave_no_sandbox_and_no_work_for_the_engine(tmp_path, store):
    engine = ScriptedEngine([Reply("hm", stall=True)])
    async with served(engine, tmp_path / "store.sqlite") as gateway:
        runner = AgentRunner(tmp_path, gateway, warm_total=0)
        await runner.start()
        await runner.until(lambda: engine.in_flight == 4)
        assert runner.num_boxes() == 4
        engine.script = "the moon"
        store.publish(2)
        await runner.until(lambda: store.group_counts() == {"dropped": 1, "ready": 1})
        assert (engine.in_flight, engine.num_aborted) == (0, 4)
        assert store.fate(0) == ("dropped", "stale")
        assert [result.reward for result in store.results(1)] == [1.0] * 4
        assert store.outcome_counts() == {"cancelled": 4, "ok": 4}
        cancelled = [result.rollout_id for result in store.rollouts() if result.outcome == "cancelled"]
        assert all([(await gateway.admin.capture(one)).session.sealed for one in cancelled])
        assert await runner.end(signal.SIGTERM) == 0
        assert runner.num_boxes() == 0


async def test_an_evaluation_that_is_killed_in_the_middle_is_finished_by_the_next_runner(tmp_path, store):
    engine = ScriptedEngine([Reply("the moon"), Reply("the moon"), Reply("hm", stall=True)])
    async with served(engine, tmp_path / "store.sqlite") as gateway:
        evaluation = {"tasks": str(tmp_path / "star.jsonl"), "samples": 6}
        runner = AgentRunner(tmp_path, gateway, evaluation=evaluation)
        await runner.start()
        await runner.until(lambda: engine.in_flight == 4 and len(store.rollouts()) >= 2)
        await runner.end(signal.SIGKILL)
        assert [item.problem for item in await asyncio.to_thread(reap, runner.registry) if item.problem] == []
        before = {result.rollout_id for result in store.rollouts()}
        assert store.group_counts() == {}, "evaluations go first"

        engine.script = "the moon"
        await runner.start()
        await runner.until(lambda: store.evaluations() and store.group_counts().get("ready", 0) == 1)
        assert await runner.end(signal.SIGTERM) == 0
    (report,) = store.evaluations()
    assert (report["step"], report["num_scored"], report["pass_at_1"]) == (0, 6, 1.0)
    kept = {result.rollout_id for result in store.results(-1)} & before
    assert len(kept) == 2, "what was finished is not run again"
    assert len(store.results(0)) == 4 and store.group_counts() == {"ready": 1}
    assert store.outcome_counts() == {"cancelled": 4, "ok": 10}


async def test_a_group_of_an_agent_that_the_run_has_no_more_is_dropped_and_replaced(tmp_path, store):
    store.open_group(0, "moon", "renamed since")
    async with served(ScriptedEngine("the moon"), tmp_path / "store.sqlite") as gateway:
        runner = AgentRunner(tmp_path, gateway, warm_total=0)
        await runner.start()
        await runner.until(lambda: store.group_counts() == {"dropped": 1, "ready": 1})
        assert await runner.end(signal.SIGTERM) == 0
    assert store.fate(0) == ("dropped", "agent_gone") and len(store.results(1)) == 4
    assert "'renamed since' is none of the run's any more" in (tmp_path / "runner.log").read_text()

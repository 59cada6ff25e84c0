"""A node's worker in this process, without Ray: what it opens, one attempt through it, and what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from pathlib import Path

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.trace import to_row_trace
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec, SourceSpec
from harness_trainer.rollouts.on_ray import afterwards, files
from harness_trainer.rollouts.on_ray.errand import Errand
from harness_trainer.rollouts.on_ray.files import bundle
from harness_trainer.rollouts.on_ray.messages import Order, Setup, SourceAgents
from harness_trainer.rollouts.on_ray.worker import Worker
from harness_trainer.rollouts.types import Outcome
from harness_trainer.tasks import Task
from sandboxes.base import Access, BoxSpec, Endpoint
from sandboxes.docker import DockerConfig
from sandboxes.lifecycle import LifecycleError, default_registry
from sandboxes.local import LocalConfig
from sandboxes.ownership import Owner
from tests.capture.serving import served, until
from tests.rollouts.rolling import CALL, VERIFY, shell_agent


class InProcess:
    """`errand.NodeWorker`, without a network between."""

    def __init__(self, worker):
        self.worker, self._telling = worker, set()

    def attempt(self, order):
        return self.worker.attempt(order)

    async def call(self, method, *arguments):
        return await getattr(self.worker, method)(*arguments)

    def tell(self, method, *arguments):
        telling = asyncio.ensure_future(self.call(method, *arguments))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    def kill(self):
        raise AssertionError("nothing here kills it")


@pytest.fixture
def state(tmp_path, monkeypatch):
    """The node's registry and temporary folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return default_registry()


def task_of(tmp_path):
    for name, text in {"tests/test.sh": VERIFY, "environment/answer.txt": "here"}.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text)
    box = BoxSpec("moon", build_dir=tmp_path / "task" / "environment")
    return Task("moon", tmp_path / "task", "Say moon.", tests_dir=tmp_path / "task" / "tests", box=box)


def setup_of(tmp_path, script, sandbox, **settings):
    config = RolloutConfig(timeout_s=60, warm_total=0, executor="ray", **settings)
    spec = RunnerSpec(
        config=config, sandbox=sandbox, tasks="-", harness="-", harness_bin=Path(), store=tmp_path / "store.sqlite",
        registry=tmp_path / "runners", artifacts=tmp_path / "artifacts", run_id="r", model="m", context=8192,
        access=Access(), admin_url="http://127.0.0.1:9", max_open_groups=1, num_groups=1,
    )  # fmt: skip
    source = SourceSpec(config=config, tasks="-", harness="-")
    return Setup(spec, [SourceAgents(source, {"shell": shell_agent(script)})], [("", task_of(tmp_path))])


@contextlib.asynccontextmanager
async def working(tmp_path, engine, script):
    """A worker with a task, and an errand through it."""
    setup = setup_of(tmp_path, script, LocalConfig(root=tmp_path / "boxes", isolation="none"))
    async with served(engine, tmp_path / "store.sqlite") as gateway:
        worker = Worker(watched=False)
        access = Access(gateway=Endpoint(url=gateway.agent_url))
        assert await worker.open(setup, access, False) == ""
        try:
            await worker.bring(bundle(setup.tasks[0][1]))
            boxes = []
            order = Order("g0-0-a", 0, 0, "", "moon", "shell", 0.0, None)
            yield (
                Errand(InProcess(worker), order, gateway.admin, tmp_path / "artifacts", lambda: boxes.append(1)),
                boxes,
                gateway,
            )
        finally:
            await worker.close()


async def test_an_attempt_is_whole_and_the_gateways_admin_side_is_asked_by_the_runner_alone(tmp_path, state):
    script = f"cat answer.txt; {CALL}"
    async with working(tmp_path, ScriptedEngine("the moon", version="v1"), script) as (errand, boxes, gateway):
        result = await errand.run()
        assert (result.outcome, result.reward, result.num_turns, result.detail) == (Outcome.OK, 1.0, 1, "")
        capture = await gateway.admin.capture("g0-0-a")
        assert result.trace == to_row_trace(capture).model_dump() and result.num_trainable_turns == 1
        assert boxes == [1], "the runner is told when there is a sandbox: the rollout's age counts from there"
        assert (await gateway.admin.session("g0-0-a")).sealed
        kept = tmp_path / "artifacts" / "g0-0-a"
        assert (kept / "agent.stdout.log").read_text().startswith("here"), "the task's files were brought"
        assert not list((tmp_path / "tmp").glob("*/artifacts/*")), "what was kept has been sent"
    assert list(state.glob("*.json")) == [] and list((tmp_path / "tmp").iterdir()) == []


async def test_artifacts_that_cannot_be_sent_are_no_reason_to_lose_the_rollout(tmp_path, state, monkeypatch):
    def pieces(folder):
        raise PermissionError(f"cannot read {folder.name}")
        yield b""

    monkeypatch.setattr(files, "pieces", pieces)
    async with working(tmp_path, ScriptedEngine("the moon", version="v1"), CALL) as (errand, _, _):
        result = await errand.run()
        assert (result.outcome, result.reward) == (Outcome.OK, 1.0)
        assert "artifacts: warning not_kept: cannot read g0-0-a" in result.findings


async def test_a_cancelled_attempt_leaves_no_sandbox_and_no_agent(tmp_path, state):
    engine = ScriptedEngine([Reply("hm", stall=True)])
    async with working(tmp_path, engine, CALL) as (errand, _, _):
        running = asyncio.create_task(errand.run())
        await until(lambda: engine.in_flight == 1)
        assert list((tmp_path / "boxes").iterdir())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert list((tmp_path / "boxes").iterdir()) == []


async def test_a_session_that_the_gateway_refuses_fails_the_attempt_in_its_own_words(tmp_path, state):
    async with working(tmp_path, ScriptedEngine("the moon", version="v1"), CALL) as (errand, _, gateway):
        await gateway.mint("g0-0-a", max_turns=1)  # the id is taken, by another policy
        result = await errand.run()
    assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, "setup")
    assert "g0-0-a" in result.detail


async def test_a_node_without_what_sandboxes_need_says_so_and_keeps_nothing(tmp_path, state):
    sandbox = DockerConfig(host=f"unix://{tmp_path}/none.sock", image="none")
    said = await Worker(watched=False).open(setup_of(tmp_path, CALL, sandbox), Access(), False)
    assert "none.sock" in said
    assert list(state.glob("*.json")) == [] and list((tmp_path / "tmp").iterdir()) == []


async def test_whoever_reads_the_gateways_address_sees_the_old_one_or_the_new_one(tmp_path):
    worker = Worker(watched=False)
    address = worker._address = tmp_path / "gateway_address"
    gateway = Endpoint(url="", public_url_file=address)
    await worker._note_address("https://one.example")
    reading = address.open()
    await asyncio.gather(*(worker._note_address("https://two.example") for _ in range(8)))
    assert (reading.read(), gateway.public_now()) == ("https://one.example", "https://two.example")
    reading.close()
    await worker._note_address(None)
    assert gateway.public_now() is None


def test_what_a_dead_worker_left_is_tried_again_when_it_could_not_be_ended(tmp_path, monkeypatch):
    tries = []

    def reap(registry):
        tries.append(registry)
        if len(tries) < 3:
            raise (OSError if len(tries) == 1 else LifecycleError)("the registry is being written")
        return []

    monkeypatch.setattr("sandboxes.lifecycle.reap", reap)
    monkeypatch.setattr(afterwards, "_AGAIN_S", (0.0, 0.01, 0.01))
    ended = subprocess.Popen(["true"])
    ended.wait()
    afterwards.watch(ended.pid, Owner.current().start_ticks, tmp_path)
    assert tries == [tmp_path] * 3

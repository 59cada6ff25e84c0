"""One agent in one scenario: gateway, sandbox and rollout for it alone, started and ended here.

Owns what stands around the rollout; the rollout itself is `rollouts.rollout`'s and is not told that it is a test.
Called by `qualify.check`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from capture_proxy.admin import admin_app
from capture_proxy.admin_client import AdminClient
from capture_proxy.engines.base import Engine
from capture_proxy.engines.scripted import ScriptedEngine
from capture_proxy.gateway import Gateway, agent_app
from capture_proxy.http_server import Server, listening
from capture_proxy.rendering import Bridging
from capture_proxy.store import Store
from capture_proxy.types import Capture
from harness_trainer.harnesses.base import Harness
from harness_trainer.qualify.director import Director
from harness_trainer.qualify.scenarios import Scenario, task_of
from harness_trainer.qualify.step import Step
from harness_trainer.qualify.wire import Wire
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.rollouts.budget import Caps
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.harbor import open_harbor
from harness_trainer.rollouts.proxies import open_access
from harness_trainer.rollouts.rollout import Means, run_rollout
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult
from harness_trainer.tasks import Task
from sandboxes import SandboxConfig, open_backend
from sandboxes.base import Access, Endpoint
from sandboxes.pool import Bounds, Pool

SCRIPTED_MODEL = "scripted"
PIECE_DELAY_S = 0.01  # between the pieces of a scripted reply, so that they leave one by one


@dataclass(frozen=True, slots=True)
class Setting:
    """What all scenarios of a run share."""

    sandbox: SandboxConfig
    timeout_s: float  # of the agent in one scenario
    logs: Path  # a folder per harness and scenario is made in it
    registry: Path
    run_id: str
    engine: Callable[[], Engine] | None = None  # a new one per scenario; None = the scripted one
    model: str = SCRIPTED_MODEL
    context: int = 1_000_000
    bridging: Bridging = field(default_factory=Bridging)
    take_step: Callable[[RolloutResult], Awaitable[Step]] | None = None  # None = nobody learns


@dataclass(slots=True)
class Evidence:
    """What came of one scenario. `capture` None = the rollout ended before there was one."""

    result: RolloutResult
    wire: Wire
    director: Director
    capture: Capture | None = None
    num_coalesced: int = 0  # repeated requests that got an earlier attempt's reply
    ready_at: float | None = None  # time.monotonic(): the sandbox was there; None = it never was
    # Hosts that were refused to the agent; None = nobody watched.
    refused: list[str] | None = None
    step: Step | None = None  # what a learner made of it; None = nobody learns
    logs: Path = field(default_factory=Path)

    @property
    def first_call_s(self) -> float | None:
        """From a sandbox that is ready to the agent's first request; None = there was none."""
        if self.ready_at is None or self.wire.first_call_at is None:
            return None
        return self.wire.first_call_at - self.ready_at


async def play(harness: Harness, programs: Path, scenario: Scenario, setting: Setting) -> Evidence:
    """Run the scenario to its end. Raises SandboxError or HarnessTrainerError when it cannot be had here."""
    logs = setting.logs / harness.name / scenario.name
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="qualify-") as folder:
        store = Path(folder) / "store.sqlite"
        return await _play(harness, programs, scenario, setting, store, logs)


async def _play(
    harness: Harness, programs: Path, scenario: Scenario, setting: Setting, store: Path, logs: Path
) -> Evidence:
    director = Director(scenario, lambda: wire.cut_next())
    scripted = ScriptedEngine(director, version="v1", piece_delay_s=PIECE_DELAY_S)
    engine: Engine = scripted if setting.engine is None else setting.engine()
    gateway = Gateway(engine, await asyncio.to_thread(Store.open, store), bridging=setting.bridging)
    wire = Wire(agent_app(gateway))
    task = task_of(scenario, logs, setting.timeout_s)
    key = secrets.token_urlsafe(16)
    job_id = f"qualify-{secrets.token_hex(4)}"
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_quiet())
        await stack.enter_async_context(gateway.running())
        agent_url = await stack.enter_async_context(listening(Server(wire)))
        admin_url = await stack.enter_async_context(listening(Server(admin_app(gateway, key))))
        admin = await stack.enter_async_context(AdminClient(admin_url, key))
        spec = _spec(programs, scenario, setting, store, logs, agent_url, admin_url)
        means = await _means(stack, spec, task, harness, admin, key)
        evidence = Evidence(_never_ran(task, harness, job_id), wire, director, logs=logs)

        def ready() -> None:
            evidence.ready_at = time.monotonic()

        evidence.result = await run_rollout(Job(job_id, 0, 0, task, ready), means)
        evidence.num_coalesced = gateway.metrics.retries.total()
        if "capture" in evidence.result.stages_s:
            evidence.capture = await admin.capture(job_id)
        if scenario.sealed:
            evidence.refused = _hosts(await admin.events(job_id)) if evidence.capture else None
    if setting.take_step is not None:  # the sandbox is gone: a step may take its time
        evidence.step = await setting.take_step(evidence.result)
    return evidence


def _spec(
    programs: Path, scenario: Scenario, setting: Setting, store: Path, logs: Path, agent_url: str, admin_url: str
) -> RunnerSpec:
    return RunnerSpec(
        config=RolloutConfig(
            timeout_s=setting.timeout_s,
            max_turns=scenario.max_turns,
            max_tokens=scenario.max_tokens,
            verify="same",
            warm_total=0,
        ),
        sandbox=setting.sandbox,
        tasks="-",
        harness="-",
        harness_bin=programs,
        store=store,
        artifacts=logs,
        registry=setting.registry,
        run_id=setting.run_id,
        model=setting.model,
        context=setting.context,
        access=Access(gateway=Endpoint(url=agent_url)),
        admin_url=admin_url,
        max_open_groups=1,
        num_groups=1,
    )


async def _means(
    stack: contextlib.AsyncExitStack, spec: RunnerSpec, task: Task, harness: Harness, admin: AdminClient, key: str
) -> Means:
    access = await open_access(stack, spec, [task], key, harness)
    boxes = Boxes(spec, harness, access)
    backend = open_backend(spec.sandbox, run_id=spec.run_id, registry=spec.registry, access=access)
    await stack.enter_async_context(backend)
    boxes.check(task, backend)
    pool = await stack.enter_async_context(Pool(backend, Bounds(0, 0, 1)))
    harbor = await open_harbor(stack, spec, backend, harness)
    return Means(boxes=boxes, backend=backend, pool=pool, caps=Caps(spec.config), admin=admin, harbor=harbor)


def _never_ran(task: Task, harness: Harness, job_id: str) -> RolloutResult:
    return RolloutResult(job_id, 0, task.name, harness.name, 0, Outcome.INFRA_FAILED, None, detail="it was not run")


def _hosts(events: list[dict[str, Any]]) -> list[str]:
    return sorted({str(event["detail"]).split(" ")[0] for event in events})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """uvicorn reports an answer that was broken on purpose as an error of ours."""
    log = logging.getLogger("uvicorn.error")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def with_model(
    setting: Setting,
    engine: Callable[[], Engine],
    model: str,
    context: int,
    bridging: Bridging,
    take_step: Callable[[RolloutResult], Awaitable[Step]],
) -> Setting:
    """The same, played by a real engine beside a learner."""
    return replace(setting, engine=engine, model=model, context=context, bridging=bridging, take_step=take_step)

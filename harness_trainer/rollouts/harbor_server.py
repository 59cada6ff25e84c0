"""Rollouts that an `openenv harbor serve` server runs, on our model: a second way to fill a slot of a group.

Owns the order of the stages, what the server is asked, and what its answer comes to. The server has tasks, sandboxes,
agents and verifiers; each of its model calls goes through a capture proxy of its own to our gateway, with the token of
the rollout's session. What is trained is our capture, never the server's; the reward is the server's. The wire is
`environments.openenv_harbor`'s; `__main__` opens a server for each source that names one.

The server asks an engine it does not know some questions of its own, with the rollout's token. It asks none of a model
that is not in the engine's list, so it gets a name that is not (the gateway serves its one model under any). Where
another version asks all the same, its questions are left out of the capture. It finds no token ids behind our gateway
and calls the rollout `eval`: it then keeps its hands off what agents ask for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capture_proxy.admin_client import AdminClient
from capture_proxy.errors import CaptureError
from capture_proxy.trace import to_row_trace
from capture_proxy.types import Session, SessionPolicy
from harness_trainer.environments import OpenEnvHarborConfig
from harness_trainer.environments.openenv_harbor import HarborServer, ServerFailed
from harness_trainer.environments.openenv_harbor import Session as Place
from harness_trainer.rewards.custom import RewardFunction, load_reward
from harness_trainer.rollouts import scoring
from harness_trainer.rollouts.budget import Budget, Limits, StageTimeout
from harness_trainer.rollouts.config import RunnerSpec, SourceSpec
from harness_trainer.rollouts.sealing import SEAL_TIMEOUT_S, sealing
from harness_trainer.rollouts.server_verdict import describe, judge, without_questions
from harness_trainer.rollouts.sources import OpenSource, named
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult
from harness_trainer.tasks import Task

log = logging.getLogger("harness_trainer.rollouts")

CAPTURE_TIMEOUT_S = 120.0  # to seal the session and read it back
_UNLISTED = "-in-training"  # behind the model's name, so that the server does not find it in our list


@dataclass(frozen=True, slots=True)
class ServerMeans:
    """What all rollouts of a runner share."""

    spec: RunnerSpec
    server: HarborServer
    admin: AdminClient
    reward: RewardFunction | None = None  # None = the server's reward counts

    @property
    def reward_key(self) -> str:
        """The named reward that the server is to take; of several that are weighed, any will do. "" = it chooses."""
        return self.server.config.reward_key or next(iter(self.spec.config.reward_weights), "")

    @property
    def llm_url(self) -> str:
        """The gateway as the server reaches it, with /v1: OpenEnv takes an address that has a path as it is."""
        gateway = self.spec.access.gateway
        address = None if gateway is None else gateway.public_now() or gateway.public_url or gateway.url
        if address is None:
            raise ServerFailed("the gateway has no address that a server could reach: set --gateway.public-url")
        return f"{address.rstrip('/')}/v1"


async def open_server(
    spec: RunnerSpec, source: SourceSpec, config: OpenEnvHarborConfig, admin: AdminClient
) -> OpenSource:
    """The server's tasks, and how a rollout of one is run. Raises what the start of a run does (`environments`)."""
    await asyncio.to_thread(_import_client)
    server = HarborServer(config)
    tasks = named(source.name, await server.tasks())
    means = ServerMeans(spec.of_source(source), server, admin, load_reward(source.config.reward))
    return OpenSource(
        source.config,
        tasks,
        sealing(admin, lambda job: run_rollout(job, means)),
        lambda number, task: config.harness,
        name=source.name,
        weight=source.weight,
        evaluation_tasks=[] if source.config.evaluation.tasks is None else tasks,  # where nothing is trained
    )


def _import_client() -> None:
    """Seconds, which no rollout should wait for and the event loop cannot stand still for."""
    import openenv.core
    import openenv.harbor.models

    assert openenv.core.GenericEnvClient and openenv.harbor.models.HarborRolloutResult


async def run_rollout(job: Job, means: ServerMeans) -> RolloutResult:
    """Have the server run its agent on the task and score it. Raises nothing but cancellation."""
    result = RolloutResult(
        rollout_id=job.rollout_id,
        group_id=job.group_id,
        task=job.task.name,
        harness=means.server.config.harness,
        attempt=job.attempt,
        outcome=Outcome.INFRA_FAILED,
        reward=None,
    )
    budget = Budget(_limits(means.spec, job.task), result.stages_s)
    try:
        await _run(job, means, budget, result)
    except Exception as error:
        expected = isinstance(error, CaptureError | ServerFailed | StageTimeout | OSError)
        if not expected:  # one rollout's bad luck, or a bug of ours, must not end its siblings
            log.exception("rollout %s failed in its stage %s", job.rollout_id, budget.stage)
        result.outcome, result.reward, result.failed_stage = Outcome.INFRA_FAILED, None, budget.stage
        named = {StageTimeout: "", ServerFailed: f"the server at {means.server.config.url}: "}
        who = next((name for kind, name in named.items() if isinstance(error, kind)), f"{type(error).__name__}: ")
        result.detail = f"{who}{error}"
    return result


def _limits(spec: RunnerSpec, task: Task) -> Limits:
    """Of our own stages, and an image that the server may have to build first: we cannot tell when it does."""
    limits = Limits.of(spec.config, task)
    build_s = 0.0 if spec.config.deadline_s is not None else task.box.build_timeout_s
    return replace(limits, total_s=limits.total_s + build_s)


async def _run(job: Job, means: ServerMeans, budget: Budget, result: RolloutResult) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(budget.turn(means.server.places))
        async with budget.outside("create"):  # a busy server must not make agents look slow
            place = await stack.enter_async_context(means.server.session(means.spec.config.start_timeout_s))
        job.has_box()
        session = await stack.enter_async_context(_session(job, means, budget))
        told = await _ask(job, means, place, session, budget)
    await asyncio.to_thread(_keep, means.spec.artifacts / job.rollout_id, told)
    async with budget.outside("capture", CAPTURE_TIMEOUT_S):
        await means.admin.seal(job.rollout_id)
        capture = await asyncio.to_thread(without_questions, await means.admin.capture(job.rollout_id))
        await asyncio.to_thread(describe, result, capture, told)
        result.trace = (await asyncio.to_thread(to_row_trace, capture)).model_dump()
    judge(result, capture, told, means.reward_key)
    if means.reward is not None and result.outcome is not Outcome.INFRA_FAILED:
        async with budget.outside("reward"):  # the server is done: a person's function may take its time
            await scoring.score(result, capture, means.reward)


@asynccontextmanager
async def _session(job: Job, means: ServerMeans, budget: Budget) -> AsyncIterator[Session]:
    """The rollout's right to call the model. If the rollout is given up, so is this: its agent may be still at work."""
    config = means.spec.config
    async with budget.timed("setup", config.start_timeout_s):
        policy = SessionPolicy(
            sampling={"temperature": config.temperature, **config.sampling},
            max_tokens=config.max_tokens,
            max_turns=config.max_turns,
            deadline=time.time() + max(0.0, budget.left_s - budget.limits.reserved_s),
            # The server passes an error of ours on as one that agents try again for minutes; a reply ends them at once.
            at_limit="reply",
        )
        labels = {"task": job.task.name, "harness": means.server.config.harness, "group": str(job.group_id)}
        session = await means.admin.mint(job.rollout_id, policy, labels)
    try:
        yield session
    except BaseException:
        with suppress(CaptureError, TimeoutError):  # the rollout failed already, for a reason of its own
            async with asyncio.timeout(SEAL_TIMEOUT_S):
                await means.admin.seal(job.rollout_id)
        raise


async def _ask(job: Job, means: ServerMeans, place: Place, session: Session, budget: Budget) -> Any:
    """The server's `HarborRolloutResult`. Raises ServerFailed, StageTimeout."""
    from openenv.harbor.models import HarborRolloutResult

    config, about, agent_s = means.server.config, job.task.metadata, budget.agent_s
    if agent_s <= 0:  # to the server, 0 is the task's own limit
        raise StageTimeout(f"nothing of the rollout's {budget.limits.total_s:.0f} s was left for the agent")
    asked = {
        "split": about["split"],
        "task_index": about["index"],
        "harness": config.harness,
        "sandbox": config.sandbox,
        "reward_key": means.reward_key,
        "llm_url": means.llm_url,
        "model": means.spec.model + _UNLISTED,
        "api_key": session.token,
        "purpose": "eval",
        "agent_timeout_sec": agent_s,
        "agent_step_limit": means.spec.config.max_turns,
    }
    limit_s = budget.left_s
    async with budget.timed("agent", limit_s):  # the server's sandbox, agent and verifier
        text = await place.call("run_rollout", asked, limit_s + 1.0)
    try:
        told = HarborRolloutResult.model_validate_json(text)
    except ValueError as error:
        raise ServerFailed(f"its result is none ({error.__class__.__name__}): {text[:200]!r}") from error
    if told.task_name and told.task_name != about["task_name"]:
        raise ServerFailed(
            f"its task {about['index']} is {told.task_name!r} now, and was {about['task_name']!r} when the run began:"
            " serve the same dataset, or start another run"
        )
    return told


def _keep(folder: Path, told: Any) -> None:
    """What the server says of the rollout: its result with the conversations, and the end of the agent's log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "server_result.json").write_text(told.model_dump_json(indent=1, exclude={"turns"}), encoding="utf-8")
    if told.agent_log_tail:
        (folder / "agent.stdout.log").write_text(told.agent_log_tail, encoding="utf-8")

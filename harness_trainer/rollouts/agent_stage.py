"""A rollout from its sandbox to an agent that has ended: one of its own, or one that a killed runner left at work.

Owns the stages create, setup and agent, and what of their time is told of an agent that was taken over: its own, by its
sandbox's account, and apart from it (`away`) the time in which it had ended and no runner was there. Called by
`rollout`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from capture_proxy.types import SessionPolicy
from harness_trainer.rollouts import agents
from harness_trainer.rollouts.budget import GRACE_S, Budget, StageTimeout
from harness_trainer.rollouts.journal import Entry
from harness_trainer.rollouts.means import Means
from harness_trainer.rollouts.place import Place
from harness_trainer.rollouts.types import Job, RolloutResult, Taken
from sandboxes.base import BoxSpec, RunResult
from sandboxes.pool import Lease, StartHung

HUNG = 0.9  # of the limit on getting a sandbox: a start that took this much of it did not end for being queued


@asynccontextmanager
async def box(job: Job, means: Means, spec: BoxSpec, budget: Budget, result: RolloutResult) -> AsyncIterator[Lease]:
    """A sandbox of the pool. However it is left, ending it takes no longer than the pool allows and spoils nothing."""
    if job.taken is not None:
        lease = means.pool.adopt(job.taken.sandbox)
        result.warm = job.taken.facts.warm
    else:
        limit_s, began = min(budget.limits.start_s, budget.left_s), time.monotonic()
        try:
            async with budget.timed("create", limit_s):
                lease = await means.pool.take(spec)
        except (StageTimeout, StartHung) as error:
            result.start_hung = isinstance(error, StartHung) or means.pool.hangs(spec, HUNG * limit_s)
            # The task's fault if others got theirs started meanwhile, else the engine's, which stalls for all of them.
            result.setup_failed = result.start_hung and means.pool.has_started_another(spec, began)
            raise
        result.warm = lease.warm
    try:
        yield lease
    finally:
        stage = budget.stage
        async with budget.timed("stop"):
            await means.pool.give_up(lease)
        budget.stage = stage  # the one that failed, if one did


async def run_agent(job: Job, means: Means, lease: Lease, budget: Budget, artifacts: Path) -> RunResult:
    """To its end or its limit. Raises what `agents.Agent.run` does, and StageTimeout."""
    version = job.has_box() or 0
    if job.taken is not None:
        return await _await_agent(job.taken, budget)
    sandbox = lease.sandbox
    async with AsyncExitStack() as stack:
        setup_s = max(0.0, budget.limits.start_s - budget.spent_s("create"))
        async with budget.timed("setup", setup_s):
            # What Harbor sets up is set up with the session's token, and its own time only begins after that.
            open_s = budget.agent_s + (0.0 if means.boxes.harness.harbor is None else setup_s)
            session = await means.admin.mint(job.rollout_id, _policy(means, open_s), _labels(job, means))
            place = Place(job.rollout_id, job.task, means.boxes, sandbox, session, artifacts)
            journal = means.journal
            entry = None if journal is None else Entry(journal, job, sandbox, budget, version, lease.warm)
            agent = await stack.enter_async_context(agents.set_up(place, means.harbor, entry))
        limit_s = budget.agent_s
        if limit_s <= 0:
            raise StageTimeout(f"nothing of the rollout's {budget.limits.total_s:.0f} s was left for the agent")
        async with budget.timed("agent", limit_s + GRACE_S):
            ran = await agent.run(limit_s)
            # A sandbox that broke under the agent (its way to the gateway, say) must not be scored as its failure.
            await sandbox.renew()
        return ran


def budget_of(taken: Taken, budget: Budget) -> None:
    """Set the clock of a rollout that is taken over: as if it had gone on all the time."""
    facts = taken.facts
    budget.stages_s.update(facts.stages_s)
    budget.stages_s["agent"] = max(0.0, time.time() - facts.started_at)
    budget.set_left(facts.left_s - budget.stages_s["agent"])


async def _await_agent(taken: Taken, budget: Budget) -> RunResult:
    facts, before_s = taken.facts, budget.spent_s("agent")
    left_s = max(0.0, facts.limit_s - before_s)
    async with budget.timed("agent", left_s + GRACE_S):
        ran = await agents.TakenAgent(taken).run(left_s)
        await taken.sandbox.renew()
    # If it had ended before we came, the time until then is nobody's.
    away_s = 0.0 if taken.running else max(0.0, before_s - ran.duration_s)
    budget.stages_s.update({"agent": budget.spent_s("agent") - away_s, "away": away_s})
    budget.set_left(budget.left_s + away_s)
    return ran


def _policy(means: Means, agent_s: float) -> SessionPolicy:
    config = means.config
    return SessionPolicy(
        sampling={"temperature": config.temperature, **config.sampling},
        max_tokens=config.max_tokens,
        max_turns=config.max_turns,
        deadline=time.time() + agent_s,
        closed_status=means.boxes.harness.closed_status,
    )


def _labels(job: Job, means: Means) -> dict[str, str]:
    return {"task": job.task.name, "harness": means.boxes.harness.name, "group": str(job.group_id)}

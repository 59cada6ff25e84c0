"""One rollout whose turns are ours, from an episode to a scored result: a third way to fill a slot of a group.

Owns the order of the stages and what a rollout came to. The turns, their limits and the reward are a source's
(`loops`); its model calls pass the same pipeline as an agent's, in this process (`model_side`), so that captures,
traces and rows are the same. Called by `white_box_run`.

What it came to, most decisive fact first. A fault of the model side, or an episode that was lost, is an infra failure
and is tried again. A limit that was met is truncation, scored or not. A person's own loop that raised has failed like
an agent. Where nothing scored the rollout its reward is None: it is out of its group's baseline, and is no infra
failure, because another try would be unscored too; what its reward function failed on, its group replaces. A fault of
the task (`reset` raised, a row or a reward that cannot be used) is an infra failure that counts as set-up, wherever
in the rollout it shows: another try fails alike, the task goes into quarantine, the run goes on.

A source that turns out to bear fewer episodes than are open (`NoPlace`) is not asked for more: rollouts wait for a
place before their clock runs, those that it refused among them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from capture_proxy.errors import CaptureError
from capture_proxy.trace import to_row_trace
from capture_proxy.types import Capture, SessionPolicy, Severity
from harness_trainer.errors import HarnessTrainerError
from harness_trainer.loops.base import EpisodeLost, Model, NoPlace, Played, Scores, SetupFailure, Source
from harness_trainer.loops.own_loop import FAILED
from harness_trainer.loops.places import Places
from harness_trainer.loops.tool_loop import CUT, DONE, STOP
from harness_trainer.rollouts.budget import Budget, Limits, StageTimeout
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.counts import count
from harness_trainer.rollouts.model_side import ModelSide, OwnSession
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult

log = logging.getLogger("harness_trainer.rollouts")

CAPTURE_TIMEOUT_S = 120.0  # to seal the session and read it back


@dataclass(frozen=True, slots=True)
class WhiteBoxMeans:
    """What all white-box rollouts of a runner share."""

    config: RolloutConfig
    model_side: ModelSide
    sources: Mapping[str, Source]  # by name, as `Job.harness` has it; all are open
    places: Mapping[str, Places]  # of each; sources of one server share its places


async def run_rollout(job: Job, means: WhiteBoxMeans) -> RolloutResult:
    """Play the task's episode with the model and score it. Raises nothing but cancellation."""
    source = means.sources[job.harness]
    result = RolloutResult(
        rollout_id=job.rollout_id,
        group_id=job.group_id,
        task=job.task.name,
        harness=source.name,
        attempt=job.attempt,
        outcome=Outcome.INFRA_FAILED,
        reward=None,
    )
    budget = Budget(Limits.of(means.config, job.task), result.stages_s)
    try:
        await _run(job, source, means, budget, result)
    except Exception as error:
        foreseen = (CaptureError, EpisodeLost, SetupFailure, HarnessTrainerError, StageTimeout, OSError)
        if not isinstance(error, foreseen):  # one rollout's bad luck, or a bug of ours, must not end its siblings
            log.exception("rollout %s failed in its stage %s", job.rollout_id, budget.stage)
        result.outcome, result.reward, result.rewards = Outcome.INFRA_FAILED, None, {}
        result.failed_stage = budget.stage
        result.setup_failed = isinstance(error, SetupFailure | HarnessTrainerError)
        plain = isinstance(error, StageTimeout | SetupFailure)
        result.detail = str(error) if plain else f"{type(error).__name__}: {error}"
    finally:
        if source.group_rewards is not None and not result.awaits_group:
            await source.group_rewards.drop([job.rollout_id])
    return result


async def _run(job: Job, source: Source, means: WhiteBoxMeans, budget: Budget, result: RolloutResult) -> None:
    config = means.config
    limits = config.loop.limits(max_tokens=config.max_tokens, start_timeout_s=config.start_timeout_s)
    async with AsyncExitStack() as stack:
        sessions: list[OwnSession] = []

        async def play() -> Played:
            return await source.play(job.task, job.rollout_id, begin, limits, budget)

        async def begin() -> Model:
            job.has_box()
            policy = _policy(config, time.time() + budget.agent_s)
            labels = {"task": job.task.name, "harness": source.name, "group": str(job.group_id)}
            session = await stack.enter_async_context(means.model_side.session(job.rollout_id, policy, labels))
            sessions.append(session)
            return session.endpoint

        played = await _played(source, means.places[job.harness], budget, play)
        async with budget.outside("capture", CAPTURE_TIMEOUT_S):
            capture = await sessions[0].capture()
            await asyncio.to_thread(count, result, capture)
            result.trace = (await asyncio.to_thread(to_row_trace, capture)).model_dump()
    decide(result, capture, played)


async def _played(source: Source, places: Places, budget: Budget, play: Callable[[], Awaitable[Played]]) -> Played:
    """In one of the source's places. To wait for one is not the rollout's time."""
    while True:
        places.learn(source.max_episodes)
        async with AsyncExitStack() as stack:
            if places.limit is None:
                await stack.enter_async_context(places.held())
            else:
                async with budget.outside("wait"):
                    await stack.enter_async_context(places.held())
            try:
                return await play()
            except NoPlace as error:
                log.info("a rollout waits for a place of %s: %s", source.name, error)


def _policy(config: RolloutConfig, deadline: float) -> SessionPolicy:
    return SessionPolicy(
        sampling={"temperature": config.temperature, **config.sampling},
        max_tokens=config.max_tokens,
        max_turns=config.max_turns,
        max_total_tokens=config.loop.max_completion_tokens,
        deadline=deadline,
        chat_template_kwargs=dict(config.loop.chat_template_kwargs),
    )


def decide(result: RolloutResult, capture: Capture, played: Played) -> None:
    """Fill in what the rollout came to, by the rule at the top."""
    take_scores(result, played.scores)
    result.findings += played.findings
    if played.num_calls is not None:
        result.tool_calls, result.tool_failures = played.num_calls, played.num_failures
    result.tool_use = played.tool_use
    take_facts(result, played.facts)
    fault, limit = capture.session.last_fault, capture.session.limit_hit
    if fault is not None:
        result.outcome, result.failed_stage, result.detail = Outcome.INFRA_FAILED, "agent", f"model side: {fault}"
        result.reward, result.rewards = None, {}
        return
    result.awaits_group = played.scores.awaits_group
    if played.how == FAILED:
        result.outcome, result.detail = Outcome.AGENT_FAILED, f"the loop raised {played.failure}"
    elif played.how not in (STOP, DONE):
        met = limit or played.how if played.how == CUT else played.how  # the session knows what cut a reply
        result.outcome, result.detail = Outcome.TRUNCATED, f"limit: {met}"
    elif limit is not None:  # a loop of a person's own may have caught it
        result.outcome, result.detail = Outcome.TRUNCATED, f"limit: {limit}"
    else:
        result.outcome, result.detail = Outcome.OK, ""
    if not result.num_trainable_turns and result.outcome is not Outcome.AGENT_FAILED:
        fatal = [finding for finding in result.findings if f" {Severity.FATAL} " in finding]
        why = "; ".join(fatal) or "nothing was sampled"
        result.outcome, result.detail = Outcome.CAPTURE_INVALID, f"{result.detail}; {why}".removeprefix("; ")


def take_scores(result: RolloutResult, scores: Scores) -> None:
    """What the rollout earned, by name and in all. What is no finite number says nothing, and a person is told."""
    result.rewards = {}
    for name, value in scores.by_name.items():
        if value is not None and math.isfinite(value):
            result.rewards[name] = float(value)
        elif value is not None:
            result.findings.append(f"reward: warning reward_not_finite: {name} is {value}")
    total = scores.total
    result.reward = total if total is not None and math.isfinite(total) else None


def take_facts(result: RolloutResult, facts: Mapping[str, float]) -> None:
    result.facts = {name: value for name, value in facts.items() if math.isfinite(value)}

"""One rollout, from a fresh session to a scored result.

Owns the order of the stages and the decision what a rollout came to. It runs the agent, the verifier and the capture
through their rooms and knows none of their insides. Every failure becomes a result; only cancellation leaves early.
What a killed runner left is gone on with from the agent: its end, or what is left of its time, then the ordinary rest.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

from capture_proxy.errors import CaptureError
from capture_proxy.trace import to_row_trace
from capture_proxy.types import Capture, Severity, Turn, TurnRole, TurnStatus
from harness_trainer.errors import DriverFailed, TaskError
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.reading import AgentReport, read_report
from harness_trainer.rewards.verifier import VerifierResult, VerifyMode, verify
from harness_trainer.rollouts import agent_stage, scoring
from harness_trainer.rollouts.budget import Budget, Limits, StageTimeout
from harness_trainer.rollouts.counts import count
from harness_trainer.rollouts.means import Means as Means
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult
from sandboxes.base import RunResult, SandboxError, SetupFailed

log = logging.getLogger("harness_trainer.rollouts")

CAPTURE_TIMEOUT_S = 120.0  # to seal the session and read it back


async def run_rollout(job: Job, means: Means) -> RolloutResult:
    """Run the agent on the task and score it. Raises nothing but cancellation."""
    result = RolloutResult(
        rollout_id=job.rollout_id,
        group_id=job.group_id,
        task=job.task.name,
        harness=means.boxes.harness.name,
        attempt=job.attempt,
        outcome=Outcome.INFRA_FAILED,
        reward=None,
    )
    budget = Budget(Limits.of(means.config, job.task), result.stages_s)
    if job.taken is not None:
        agent_stage.budget_of(job.taken, budget)
    try:
        await _run(job, means, budget, result)
    except Exception as error:
        expected = isinstance(error, CaptureError | DriverFailed | SandboxError | TaskError | StageTimeout | OSError)
        if not expected:  # one rollout's bad luck, or a bug of ours, must not end its siblings
            log.exception("rollout %s failed in its stage %s", job.rollout_id, budget.stage)
        result.outcome, result.reward = Outcome.INFRA_FAILED, None
        result.failed_stage = budget.stage
        result.setup_failed |= isinstance(error, SetupFailed | TaskError)  # `agent_stage` has judged a start that hung
        result.detail = str(error) if isinstance(error, StageTimeout) else f"{type(error).__name__}: {error}"
    return result


async def _run(job: Job, means: Means, budget: Budget, result: RolloutResult) -> None:
    spec = means.boxes.spec_of(job.task)
    artifacts = means.boxes.spec.artifacts / job.rollout_id
    if job.taken is None:
        async with budget.outside("prepare"):  # an image is built once, for all rollouts of the task
            await means.pool.prepare(spec)
    async with AsyncExitStack() as stack:
        box = agent_stage.box(job, means, spec, budget, result)
        if job.taken is not None:  # its sandbox is there, and to be ended on every path
            lease = await stack.enter_async_context(box)
        async with budget.turn(means.caps.running):
            if job.taken is None:
                lease = await stack.enter_async_context(box)
            sandbox = lease.sandbox
            agent = await agent_stage.run_agent(job, means, lease, budget, artifacts)
            result.exit_code, result.timed_out = agent.exit_code, agent.timed_out
        await asyncio.to_thread(_keep_agent_logs, artifacts, agent)
        async with budget.outside("capture", CAPTURE_TIMEOUT_S):
            await means.admin.seal(job.rollout_id)
            capture = await means.admin.capture(job.rollout_id)
            await asyncio.to_thread(_describe, result, capture, agent)
            result.trace = (await asyncio.to_thread(to_row_trace, capture)).model_dump()
        report = read_report(means.boxes.harness, agent.stdout, agent.exit_code)
        answer = report.final_message or _last_words(capture)
        async with budget.turn(means.caps.verifying) as queued:
            async with budget.timed("verify", budget.left_s):
                if queued:  # its own deadline went on while it waited
                    await sandbox.renew()
                verdict = await verify(
                    job.task,
                    sandbox,
                    backend=means.backend,
                    final_message=answer,
                    mode=VerifyMode(means.config.verify),
                    spec=spec,
                    timeout_s=budget.tests_s,
                    keep=artifacts,
                    registry=means.boxes.spec.registry,
                    before_tests=lambda: _note_tests(job, means),
                )
        result.stages_s |= {f"verify.{stage}": seconds for stage, seconds in verdict.stages_s.items()}
        await asyncio.to_thread(_keep_verifier_log, artifacts, verdict)
        decide(result, capture, agent, verdict, report, means.boxes.harness)
        if job.taken is not None:
            _doubt_failure(result, capture)
    if means.reward is not None and result.outcome is not Outcome.INFRA_FAILED:
        async with budget.outside("reward"):  # the sandbox is gone: a person's function may take its time
            await scoring.score(result, capture, means.reward)


async def _note_tests(job: Job, means: Means) -> None:
    if means.journal is not None:
        await asyncio.to_thread(means.journal.store.note_tests, job.rollout_id)


def _doubt_failure(result: RolloutResult, capture: Capture) -> None:
    """Of an agent that was taken over: the dead runner may have been its way to the model, and cut a call."""
    last = _last_turn(capture)
    cut = result.outcome is Outcome.OK and last is not None and last.status is not TurnStatus.OK
    if cut or result.outcome in (Outcome.AGENT_FAILED, Outcome.CAPTURE_INVALID):
        result.outcome, result.failed_stage = Outcome.INFRA_FAILED, "agent"
        result.reward, result.rewards, result.turn_rewards = None, {}, {}
        why = "the runner was killed while the agent worked, which may be why it failed"
        result.detail = f"{why}: {result.detail}" if result.detail else why


def _describe(result: RolloutResult, capture: Capture, agent: RunResult) -> None:
    count(result, capture)
    if agent.oom:
        result.findings.append("agent: warning out_of_memory: the memory limit ended a process while the agent ran")


def _last_turn(capture: Capture) -> Turn | None:
    return next((turn for turn in reversed(capture.turns) if turn.role is TurnRole.AGENT), None)


def _last_words(capture: Capture) -> str | None:
    """What the agent said last by the capture's account, for agents whose own output does not tell."""
    for turn in reversed(capture.turns):
        if turn.role is TurnRole.AGENT and turn.status is TurnStatus.OK and turn.message.get("content"):
            return str(turn.message["content"])
    return None


def _keep_agent_logs(folder: Path, agent: RunResult) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.stdout.log").write_text(agent.stdout, encoding="utf-8")
    (folder / "agent.stderr.log").write_text(agent.stderr, encoding="utf-8")


def _keep_verifier_log(folder: Path, verdict: VerifierResult) -> None:
    (folder / "verifier.log").write_text(f"{verdict.detail}\n{verdict.output}", encoding="utf-8")


def decide(
    result: RolloutResult,
    capture: Capture,
    agent: RunResult,
    verdict: VerifierResult,
    report: AgentReport,
    harness: Harness,
) -> None:
    """The table that says what a rollout came to, most decisive fact first.

    A model-side fault that no later call recovered from is infra, whatever the agent's exit code says. A limit that
    was hit is truncation even if the agent then exits with an error. Only then is a non-zero exit the agent's own, or
    what it says of itself where its exit code says nothing.
    """
    fault = capture.session.last_fault
    last = _last_turn(capture)
    stderr_tail = " ".join(agent.stderr.split())[-200:]
    result.reward, result.rewards = verdict.reward, dict(verdict.rewards)
    result.findings += [f"verifier: {finding}" for finding in verdict.findings]
    scoring.judge_turns(result, capture, verdict.turn_rewards, "verifier")
    if fault is not None:
        result.outcome, result.failed_stage = Outcome.INFRA_FAILED, "agent"
        result.detail = f"model side: {fault}"
    elif last is None:
        result.outcome, result.failed_stage = Outcome.INFRA_FAILED, "agent"
        result.detail = f"the agent made no model call (exit code {agent.exit_code}): {stderr_tail or 'no message'}"
    elif capture.session.limit_hit is not None:
        result.outcome, result.detail = Outcome.TRUNCATED, f"limit: {capture.session.limit_hit}"
    elif agent.timed_out:
        result.outcome, result.detail = Outcome.TRUNCATED, "limit: agent time-out"
    elif report.limit is not None:
        result.outcome, result.detail = Outcome.TRUNCATED, f"limit of the agent's own: {report.limit}"
    elif last.finish_reason == "length":
        result.outcome, result.detail = Outcome.TRUNCATED, "the last reply reached its output cap"
    elif agent.exit_code != 0:
        result.outcome = Outcome.AGENT_FAILED
        result.detail = f"exit code {agent.exit_code}: {report.failure or stderr_tail}"
    elif report.failure is not None and not harness.exit_0_is_success:
        result.outcome, result.detail = Outcome.AGENT_FAILED, f"the agent says: {report.failure[:200]}"
    else:
        result.outcome, result.detail = Outcome.OK, ""
    if result.outcome is not Outcome.INFRA_FAILED and verdict.reward is None:
        result.outcome, result.detail = Outcome.INFRA_FAILED, f"not scored: {verdict.detail}"
        result.failed_stage = "verify"
    if result.outcome is Outcome.INFRA_FAILED:
        result.reward, result.rewards = None, {}
    if result.outcome is not Outcome.INFRA_FAILED and not result.num_trainable_turns:
        fatal = [finding for finding in result.findings if f" {Severity.FATAL} " in finding]
        result.outcome, result.detail = Outcome.CAPTURE_INVALID, "; ".join(fatal) or "nothing was sampled"

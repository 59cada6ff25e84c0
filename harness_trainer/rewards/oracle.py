"""Whether tasks can be used: their reference solution earns the top of the reward range, and doing nothing does not.

Owns one check of one task: build its box, run the solution in a fresh box and score it, score another box in which
nothing was done. Scoring is `verifier`'s, the same as for rollouts. Called by `harness-trainer tasks check`.
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness_trainer.errors import TaskError
from harness_trainer.rewards.verifier import VerifierResult, VerifyMode, verify
from harness_trainer.tasks import Found, Task, resolve_box, resolve_solution_env
from sandboxes.base import Backend, BoxSpec, Command, NetworkMode, RunResult, Sandbox, SandboxError, SetupFailed

SOLUTION = "/solution"
_SLACK_S = 120.0  # for copying and scoring, beyond the time limits of solution and tests
_OUTPUT_CAP = 1_000_000  # bytes of the solution's output that are kept
# As Harbor runs it: made executable and executed, so that its first line decides what reads it.
_SOLVE = 'chmod +x "$1" && "$1"'


@dataclass(slots=True)
class TaskReport:
    """What the check of one task came to. None = not got that far.

    Example: TaskReport("cheer", valid=True, built=True, oracle=1.0, empty=0.0, seconds=3.2, logs="runs/../cheer").
    """

    name: str
    valid: bool = False
    built: bool | None = None
    oracle: float | None = None  # reward of the reference solution
    empty: float | None = None  # reward of doing nothing
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)  # each makes the task fail
    notes: list[str] = field(default_factory=list)  # worth knowing, no failure
    logs: str | None = None  # folder of what solution and tests printed

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


async def check_tasks(
    entries: Sequence[Found],
    backend: Backend,
    logs: Path,
    *,
    jobs: int,
    on_report: Callable[[TaskReport], None],
    mode: VerifyMode = VerifyMode.AUTO,
) -> list[TaskReport]:
    """A report per entry, in order; `on_report` gets each as it is ready. At most `jobs` tasks at a time.

    What is wrong with a task or its sandbox is in its report. Cancellation ends every sandbox.
    """
    slots = asyncio.Semaphore(jobs)

    async def one(number: int, found: Found) -> TaskReport:
        report = TaskReport(found.name)
        if found.task is None:
            report.problems.append(str(found.problem))
        else:
            async with slots:
                folder = logs / f"{number:03}-{_file_name(found.name)}"
                await _Check(found.task, backend, mode, folder, report).run()
        on_report(report)
        return report

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(number, found)) for number, found in enumerate(entries)]
    return [task.result() for task in running]


async def run_solution(task: Task, sandbox: Sandbox) -> RunResult:
    """Run the reference solution as Harbor's oracle does. Raises SandboxError, or TaskError for an unset variable."""
    if task.solution_dir is not None:
        await sandbox.put_dir(task.solution_dir, SOLUTION)
    else:
        await sandbox.put_text(task.solution_script or "", f"{SOLUTION}/solve.sh", 0o755)
    return await sandbox.run(
        Command(
            ["sh", "-c", _SOLVE, "sh", sandbox.resolve(f"{SOLUTION}/solve.sh")],
            env={"DEBIAN_FRONTEND": "noninteractive", **resolve_solution_env(task)},
            timeout_s=task.agent_timeout_s,
            output_cap=_OUTPUT_CAP,
        )
    )


@dataclass(slots=True)
class _Check:
    """The check of one valid task."""

    task: Task
    backend: Backend
    mode: VerifyMode
    logs: Path
    report: TaskReport

    async def run(self) -> None:
        report, began = self.report, time.monotonic()
        report.valid = True
        report.notes += self.task.findings
        report.logs = str(self.logs)
        await asyncio.to_thread(self.logs.mkdir, parents=True, exist_ok=True)
        try:
            box = self._box()
            self.backend.check(box)
            await self.backend.prepare(box)
            report.built = True
            await self._solve(box)
            await self._do_nothing(box)
        except SetupFailed as error:
            report.built = bool(report.built)  # a health check fails after the build
            report.problems.append(_one_line(error))
            if error.log_path is not None and error.log_path.is_file():
                await asyncio.to_thread(shutil.copyfile, error.log_path, self.logs / error.log_path.name)
        except (SandboxError, TaskError) as error:
            report.problems.append(_one_line(error))
        report.seconds = round(time.monotonic() - began, 2)

    def _box(self) -> BoxSpec:
        box = resolve_box(self.task)
        if box.network.mode is NetworkMode.PROXY_ONLY and NetworkMode.NONE in self.backend.traits.networks:
            box = replace(box, network=replace(box.network, mode=NetworkMode.NONE))  # no model is called here
        deadline_s = self.task.agent_timeout_s + self.task.verifier_timeout_s + _SLACK_S
        own_s = box.limits.deadline_s
        limits = replace(box.limits, deadline_s=deadline_s if own_s is None else min(own_s, deadline_s))
        return replace(box, limits=limits)

    async def _solve(self, box: BoxSpec) -> None:
        report, top = self.report, self.task.reward_range[1]
        if self.task.solution_dir is None and self.task.solution_script is None:
            report.problems.append("no solution/solve.sh: nothing shows that the task can be solved")
            return
        async with self.backend.sandbox(box) as sandbox:
            solved = await run_solution(self.task, sandbox)
            await self._write("oracle.log", solved.stdout + solved.stderr)
            verdict = await self._score(sandbox, box, "oracle")
        report.oracle = verdict.reward
        report.notes += [f"solution: {finding}" for finding in verdict.findings]
        ended = "it did not end in time" if solved.timed_out else f"its exit code was {solved.exit_code}"
        if verdict.reward is None:
            report.problems.append(f"the solution was not scored ({ended}): {verdict.detail}")
        elif not math.isclose(verdict.reward, top):
            report.problems.append(f"the solution scores {verdict.reward:g}, not {top:g} ({ended})")
        elif solved.exit_code != 0:
            report.notes.append(f"solution: {ended}, and it scores all the same")

    async def _do_nothing(self, box: BoxSpec) -> None:
        report, top = self.report, self.task.reward_range[1]
        async with self.backend.sandbox(box) as sandbox:
            verdict = await self._score(sandbox, box, "empty")
        report.empty = verdict.reward
        if verdict.reward is None:
            report.notes.append(f"doing nothing is not scored, so such a rollout is lost: {verdict.detail}")
        elif verdict.reward >= top or math.isclose(verdict.reward, top):
            report.problems.append(f"doing nothing scores {verdict.reward:g}, as much as the solution should")

    async def _score(self, sandbox: Sandbox, box: BoxSpec, name: str) -> VerifierResult:
        """Exactly as a rollout is scored, but nothing was said."""
        verdict = await verify(
            self.task,
            sandbox,
            backend=self.backend,
            final_message=None,
            mode=self.mode,
            spec=box,
            keep=self.logs / name,
        )
        await self._write(f"{name}.verifier.log", f"reward: {verdict.reward}\n{verdict.detail}\n{verdict.output}")
        return verdict

    async def _write(self, name: str, text: str) -> None:
        await asyncio.to_thread((self.logs / name).write_text, text, encoding="utf-8")


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip(".") or "task"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

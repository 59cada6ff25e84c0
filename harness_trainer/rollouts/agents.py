"""How a rollout's agent is set up and run: a command in the sandbox, or an agent that Harbor drives.

Owns the choice and the command. What Harbor drives is `harbor_run`'s; when which stage begins and ends is `rollout`'s.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from harness_trainer.errors import SetupError
from harness_trainer.harnesses import base as harness_base
from harness_trainer.rollouts.harbor import HarborAgents
from harness_trainer.rollouts.harbor_run import harbor_agent
from harness_trainer.rollouts.journal import Entry
from harness_trainer.rollouts.place import Place
from harness_trainer.rollouts.types import Taken
from sandboxes.base import Command, RunResult, Sandbox, SandboxError


class Agent(Protocol):
    """An agent that is ready to start."""

    async def run(self, limit_s: float) -> RunResult:
        """To its end or the limit. Raises SandboxError, and DriverFailed when what drives it from outside failed."""
        ...


class CommandAgent:
    """A command in the sandbox, detached: it outlives this process, and another runner can take it over."""

    def __init__(self, sandbox: Sandbox, command: Command, entry: Entry | None) -> None:
        self._sandbox, self._command, self._entry = sandbox, command, entry

    async def run(self, limit_s: float) -> RunResult:
        if self._entry is not None:
            await self._entry.starting(limit_s)
        job_id = await self._sandbox.start_job(replace(self._command, timeout_s=limit_s))
        if self._entry is not None:
            await self._entry.started(job_id)
        began = time.monotonic()
        ran = await _ended(self._sandbox, job_id)
        return replace(ran, duration_s=min(ran.duration_s, time.monotonic() - began))


class TakenAgent:
    """One that a killed runner has started. Its sandbox holds its limit."""

    def __init__(self, taken: Taken) -> None:
        self._taken = taken

    async def run(self, limit_s: float) -> RunResult:
        ran = await _ended(self._taken.sandbox, self._taken.job_id)
        return replace(ran, duration_s=min(ran.duration_s, self._taken.facts.limit_s)) if ran.timed_out else ran


async def _ended(sandbox: Sandbox, job_id: str) -> RunResult:
    """`duration_s` is infinite where the sandbox does not tell."""
    try:
        status = await sandbox.wait_job(job_id)
    except KeyError as error:
        raise SandboxError("the sandbox does not know the agent's command any more") from error
    # Killed together with everything in its sandbox (a limit of the whole, a `kill -9 -1` of its own): as by a signal.
    code = 128 + signal.SIGKILL if status.lost else status.exit_code
    return RunResult(
        exit_code=code,
        stdout=status.stdout,
        stderr=status.stderr,
        timed_out=status.timed_out,
        truncated=status.truncated,
        duration_s=math.inf if status.duration_s is None else status.duration_s,
        oom=status.oom,
    )


@asynccontextmanager
async def set_up(place: Place, harbor: HarborAgents | None, entry: Entry | None = None) -> AsyncIterator[Agent]:
    """The place's agent, ready to start; nothing that drives it from outside is left afterwards.

    `entry` = where what another runner would need is written; an agent that Harbor drives ends with this process.
    Raises SandboxError, SetupFailed among them when the agent cannot be had there, and DriverFailed.
    """
    await place.put_files()
    if place.harness.harbor is None:
        yield CommandAgent(place.sandbox, _command(place), entry)
        return
    if harbor is None:
        raise SetupError(f"harness {place.harness.name} is Harbor's, whose worker was not started")
    async with harbor_agent(place, harbor) as agent:
        yield agent


def _command(place: Place) -> Command:
    harness, values = place.harness, place.values
    return Command(
        argv=[str(harness_base.render(part, values)) for part in harness.argv],
        env={
            "HOME": str(values["home"]),
            **place.search_path(),
            **place.network_env(),
            **harness_base.render_env(harness, values),
        },
        stdin=None if harness.stdin is None else str(harness_base.render(harness.stdin, values)),
    )

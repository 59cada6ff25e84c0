"""How a rollout's agent is set up and run: a command in the sandbox, or an agent that Harbor drives.

Owns the choice and the command. What Harbor drives is `harbor_run`'s; when which stage begins and ends is `rollout`'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from harness_trainer.errors import SetupError
from harness_trainer.harnesses import base as harness_base
from harness_trainer.rollouts.harbor import HarborAgents
from harness_trainer.rollouts.harbor_run import harbor_agent
from harness_trainer.rollouts.place import Place
from sandboxes.base import Command, RunResult, Sandbox


class Agent(Protocol):
    """An agent that is ready to start."""

    async def run(self, limit_s: float) -> RunResult:
        """To its end or the limit. Raises SandboxError, and DriverFailed when what drives it from outside failed."""
        ...


class CommandAgent:
    """A command in the sandbox."""

    def __init__(self, sandbox: Sandbox, command: Command) -> None:
        self._sandbox, self._command = sandbox, command

    async def run(self, limit_s: float) -> RunResult:
        return await self._sandbox.run(replace(self._command, timeout_s=limit_s))


@asynccontextmanager
async def set_up(place: Place, harbor: HarborAgents | None) -> AsyncIterator[Agent]:
    """The place's agent, ready to start; nothing that drives it from outside is left afterwards.

    Raises SandboxError, SetupFailed among them when the agent cannot be had there, and DriverFailed.
    """
    await place.put_files()
    if place.harness.harbor is None:
        yield CommandAgent(place.sandbox, _command(place))
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

"""A backend whose sandboxes do nothing but live and die as a test says: for tests of who gets which when."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sandboxes.base import BoxSpec, Command, JobStatus, NetworkMode, RunResult, SandboxError, SandboxGone, Traits

TRAITS = Traits(True, True, True, frozenset(NetworkMode), frozenset())


@dataclass(eq=False)
class Box:
    backend: ScriptedBackend
    spec: BoxSpec
    number: int
    started: bool = False
    stopped: bool = False
    dead: bool = False
    renewed: int = 0

    async def __aenter__(self) -> Box:
        backend = self.backend
        backend.starting += 1
        backend.most_starting = max(backend.most_starting, backend.starting)
        backend.begun.append(self)
        backend.changed.set()
        try:
            await backend.start_gate.wait()
            if error := backend.start_error(self):
                raise error
            self.started = True
            backend.most_alive = max(backend.most_alive, len(backend.alive))
            return self
        finally:
            backend.starting -= 1
            backend.changed.set()

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def renew(self) -> None:
        await self.backend.renew_gate.wait()
        self.renewed += 1
        if self.dead or self.stopped:
            raise SandboxGone(f"box {self.number} is gone")

    @property
    def gateway_url(self) -> str | None:
        return self.backend.gateway_url

    workdir = "/app"

    def resolve(self, path: str) -> str:
        return path

    async def run(self, command: Command) -> RunResult:
        if error := self.backend.run_error(self):
            raise error
        return RunResult(0, "", "", False, False)

    async def start_job(self, command: Command) -> str:
        if error := self.backend.run_error(self):
            raise error
        return "job"

    async def wait_job(self, job_id: str, timeout_s: float | None = None) -> JobStatus:
        return JobStatus(False, 0, "", "", False)

    async def stop(self) -> None:
        await self.backend.stop_gate.wait()
        self.stopped = True
        self.backend.changed.set()
        if self.backend.stop_error is not None:
            raise self.backend.stop_error


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass
class ScriptedBackend:
    start_gate: asyncio.Event = field(default_factory=_open_gate)  # cleared: starts hang
    stop_gate: asyncio.Event = field(default_factory=_open_gate)
    renew_gate: asyncio.Event = field(default_factory=_open_gate)
    prepare_gate: asyncio.Event = field(default_factory=_open_gate)
    start_error: Callable[[Box], Exception | None] = lambda box: None
    stop_error: Exception | None = None
    run_error: Callable[[Box], Exception | None] = lambda box: None
    gateway_url: str | None = "http://127.0.0.1:9"
    prepare_error: Callable[[BoxSpec], Exception | None] = lambda spec: None
    begun: list[Box] = field(default_factory=list)  # whose start was begun
    prepared: list[str] = field(default_factory=list)  # names, one entry per call
    starting: int = 0
    most_starting: int = 0
    most_alive: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    traits: Traits = TRAITS
    _numbers: Any = field(default_factory=itertools.count)

    @property
    def alive(self) -> list[Box]:
        return [box for box in self.begun if box.started and not box.stopped]

    def check(self, spec: BoxSpec) -> None:
        return None

    async def prepare(self, spec: BoxSpec) -> None:
        self.prepared.append(spec.name)
        self.changed.set()
        await self.prepare_gate.wait()
        if error := self.prepare_error(spec):
            raise error

    def sandbox(self, spec: BoxSpec) -> Box:
        return Box(self, spec, next(self._numbers))

    async def attach(self, sandbox_id: str) -> Box:
        raise SandboxGone(sandbox_id)

    async def __aenter__(self) -> ScriptedBackend:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for the condition, looked at after every change; fails the test if it does not come."""
        async with asyncio.timeout(5):
            while not condition():
                self.changed.clear()
                with contextlib.suppress(TimeoutError):  # not everything that can be asked for is a change of ours
                    await asyncio.wait_for(self.changed.wait(), 0.01)


def broken(message: str = "no space left") -> SandboxError:
    return SandboxError(message)

"""Waiting until a started sandbox is healthy, by the task's own command and Harbor's rules.

Used by backends after they started a sandbox and before anybody gets it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from sandboxes.base import BoxSpec, Command, Healthcheck, RunResult, SetupFailed

_OUTPUT_CAP = 10_000


def patience_s(spec: BoxSpec) -> float:
    """How long the health check of the spec may take, beyond the start itself."""
    check = spec.healthcheck
    if check is None:
        return 0.0
    return check.start_period_s + check.retries * (check.interval_s + check.timeout_s)


async def wait_healthy(
    run: Callable[[Command], Awaitable[RunResult]], check: Healthcheck, name: str, log: Path | None = None
) -> None:
    """Return when the command has exited 0. `run` is the sandbox's, `name` the task's.

    Raises SetupFailed after `retries` failures in a row; those within the start period do not count. What each try
    said is written to `log` then.
    """
    started = time.monotonic()
    failures = 0
    tries: list[str] = []
    while True:
        result = await run(Command.shell(check.command, timeout_s=check.timeout_s, output_cap=_OUTPUT_CAP))
        if result.exit_code == 0:
            return
        passed = time.monotonic() - started
        starting = passed < check.start_period_s
        failures += not starting
        how = "timed out" if result.timed_out else f"exit code {result.exit_code}"
        tries.append(f"after {passed:.1f} s: {how}\n{result.stdout}{result.stderr}")
        if failures >= max(1, check.retries):
            if log is not None:
                await asyncio.to_thread(_write, log, "".join(tries))
            said = " ".join((result.stderr or result.stdout).split())[-200:]
            message = f"task {name!r} is not healthy after {failures} tries: {how}: {said or 'no message'}"
            raise SetupFailed(message, log)
        await asyncio.sleep(check.start_interval_s if starting else check.interval_s)


def _write(log: Path, text: str) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(text, encoding="utf-8")

"""The commands of one local sandbox that somebody waits for: their time limits, their output, and what ended them.

Owns which of them run now. How one is started is `local_launch`'s, whether one may be and the limits of the whole
sandbox are those of `local_box`, the only caller. Detached commands are `local_jobs`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from sandboxes.base import Command, RunResult, SandboxError, SandboxGone
from sandboxes.local_files import in_thread
from sandboxes.local_launch import Launcher, stdin_of
from sandboxes.local_process import NotStarted, Running
from sandboxes.output import Capture

_TERM_GRACE_S = 0.7  # between SIGTERM and SIGKILL at a time limit


@dataclass(slots=True)
class _Command:
    """A running command, and the limit of the whole sandbox that ended it ("" = none did)."""

    running: Running | None = None
    broken: str = ""


class Commands:
    """`check_alive` is asked after a command that ended by itself. Raises SandboxGone."""

    def __init__(self, check_alive: Callable[[], None]) -> None:
        self._check_alive = check_alive
        self._stopped = False
        self._captures: set[Capture] = set()  # of every command, while something holds its output open
        self._running: dict[str, _Command] = {}  # by id

    def num_running(self) -> int:
        return len(self._running)

    def break_all(self, reason: str) -> None:
        """Note that those that run are about to be ended by a limit of the whole sandbox."""
        for command in self._running.values():
            command.broken = command.broken or reason

    def stop(self) -> None:
        """No more output is read, and those that run are nobody's result."""
        self._stopped = True
        for capture in list(self._captures):
            capture.close()

    async def run(self, launcher: Launcher, command: Command, ends_at: float | None) -> RunResult:
        """See `sandboxes.base.Sandbox.run`. `ends_at` is the sandbox's deadline."""
        began = time.monotonic()
        call = launcher.call(command)
        out, err = (Capture(command.output_cap, self._captures.discard) for _ in range(2))
        self._captures |= {out, err}
        state = self._running[call.command_id] = _Command()
        try:
            state.running = launcher.start(call, stdin_of(command), out, err)
            timed_out = await _wait(state.running, command.timeout_s, ends_at)
        except NotStarted as e:
            if e.what == "cwd":  # the agent may have removed it: its doing, not ours
                return RunResult(126, "", f"sandbox: no folder {call.folder} to run in\n", False, False)
            raise SandboxError(f"cannot start {' '.join(command.argv[:1])} in the sandbox: {e}") from e
        except BaseException:
            if state.running is not None:
                await asyncio.shield(asyncio.to_thread(state.running.end))
            raise
        finally:
            del self._running[call.command_id]
            if state.running is not None:
                state.running.release()
            out.finish()
            err.finish()
        if self._stopped:
            raise SandboxGone("the sandbox is gone: it was stopped while a command ran")
        timed_out = timed_out or state.broken.startswith("deadline")
        if not timed_out:
            self._check_alive()  # else nobody knows how the command ended
        return RunResult(
            exit_code=None if timed_out else state.running.exit_code,
            stdout=out.text(),
            stderr=err.text() + (f"sandbox: killed at its {state.broken}\n" if state.broken else ""),
            timed_out=timed_out,
            truncated=out.truncated or err.truncated,
            duration_s=time.monotonic() - began,
            oom=state.broken.startswith("memory"),
        )


async def _wait(running: Running, limit: float | None, ends_at: float | None) -> bool:
    """Until the command is over or its time is; whether its time was. Nothing of it lives on in that case."""
    if ends_at is not None:
        left = max(0.0, ends_at - time.monotonic())
        limit = left if limit is None else min(limit, left)
    try:
        await asyncio.wait_for(running.over(), limit)
        return False
    except TimeoutError:
        running.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.over(), _TERM_GRACE_S)
        await in_thread(running.end)
        return True

"""The runner as a process on a spec file, started and ended by the test."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.capture.serving import KEY, until


class RunnerProcess:
    """`python -m harness_trainer.rollouts`; may be started again after its end. Its output is in `log`."""

    def __init__(self, spec: Path, log: Path) -> None:
        self.spec, self._log = spec, log

    async def start(self) -> None:
        env = {**os.environ, "CAPTURE_PROXY_ADMIN_KEY": KEY}
        argv = [sys.executable, "-m", "harness_trainer.rollouts", "--spec", str(self.spec)]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=log, stderr=log)

    async def end(self, signum: int | None = None) -> int:
        """Its exit code; without a signal it is to end by itself."""
        if signum is not None and self._process.returncode is None:
            self._process.send_signal(signum)
        return await asyncio.wait_for(self._process.wait(), 60)

    async def until(self, condition: Callable[[], object], timeout_s: float = 90) -> None:
        """Fails with the end of its log as soon as it is no longer there."""

        def is_so() -> object:
            assert self._process.returncode is None, self._log.read_text()[-3000:]
            return condition()

        await until(is_so, timeout_s=timeout_s)

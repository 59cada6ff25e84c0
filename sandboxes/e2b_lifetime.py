"""The lifetime of one sandbox in E2B's cloud: extended while it is used, and its end noticed.

Owns the task that looks after it and when the sandbox would end by itself. What follows from its being gone is the
caller's, `e2b_sandbox`; how E2B is asked is `e2b_service`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sandboxes.base import SandboxError, SandboxGone
from sandboxes.e2b_service import Service, end_task

log = logging.getLogger(__name__)

_MARGIN_S = 120.0  # of a lifetime over the deadline: time to read what happened
_NO_DEADLINE_S = 3600.0  # lifetime at a time of a sandbox without a deadline


def wanted_s(deadline_s: float | None, ends_at: float | None) -> float:
    """The lifetime to ask for now. `deadline_s` is the spec's, None = none; `ends_at` (monotonic), once it counts."""
    if deadline_s is None:
        return _NO_DEADLINE_S
    left = deadline_s if ends_at is None else max(0.0, ends_at - time.monotonic())
    return left + _MARGIN_S


class Lifetime:
    """Of a sandbox that has just been given `wanted` seconds, within what the plan allows.

    `wanted` is asked anew each time; `gone` is told what E2B said; `look_s`: how often one looks whether it still is.
    """

    def __init__(
        self,
        service: Service,
        box_id: str,
        *,
        wanted: Callable[[], float],
        gone: Callable[[SandboxGone], None],
        look_s: float,
    ) -> None:
        self._service = service
        self._box_id = box_id
        self._wanted = wanted
        self._gone = gone
        self._look_s = look_s
        self._lives_until = time.monotonic() + service.cut(wanted())
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look after it, in a task, until `end`."""
        self._keeper = asyncio.create_task(self._keep(), name=f"lifetime of {self._box_id}")

    async def end(self) -> None:
        """Look after it no more. Idempotent."""
        if self._keeper is not None:
            await end_task(self._keeper)

    async def extend(self) -> None:
        lifetime_s = await self._service.extend(self._box_id, self._wanted())
        self._lives_until = time.monotonic() + lifetime_s

    async def look_if_possible(self) -> None:
        """Raises SandboxGone, also told to `gone`, when it is; silent when E2B does not answer."""
        try:
            await self._service.info(self._box_id)
        except SandboxGone as e:
            self._gone(e)
            raise
        except SandboxError as e:
            log.debug("whether %s is gone could not be asked: %s", self._box_id, e)

    async def _keep(self) -> None:
        pause = self._pause()
        while True:
            await asyncio.sleep(pause)
            try:
                await self._keep_once()
                pause = self._pause()
            except SandboxGone as e:
                self._gone(e)
                return
            except SandboxError as e:
                log.warning("E2B sandbox %s: %s; trying again", self._box_id, e)
                pause = min(5.0, self._pause())

    def _pause(self) -> float:
        return max(0.1, min(self._look_s, (self._lives_until - time.monotonic()) / 2))

    async def _keep_once(self) -> None:
        wanted = self._service.cut(self._wanted())
        if time.monotonic() + wanted > self._lives_until + 1.0:
            await self.extend()
        else:
            await self._service.info(self._box_id)

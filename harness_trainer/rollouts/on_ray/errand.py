"""One attempt on a node, as the runner sees it: what it asks for is answered, what it keeps is put in its place.

Owns that conversation and its end on every path: a cancelled attempt is told to end, and waited for. What becomes of a
worker that is lost meanwhile is `executor`'s.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

from capture_proxy.errors import CaptureError
from harness_trainer.rollouts.means import Sessions
from harness_trainer.rollouts.on_ray.messages import Event, Order, WorkerFailed
from harness_trainer.rollouts.types import RolloutResult
from sandboxes.archive import unpack
from sandboxes.base import SandboxError

log = logging.getLogger("harness_trainer.rollouts")

END_S = 90.0  # for a cancelled attempt to end its sandbox; longer than the pool gives one


class NodeWorker(Protocol):
    """A worker as the runner sees it, see `cluster.RayWorker`."""

    def attempt(self, order: Order) -> AsyncIterator[Event]: ...

    async def call(self, method: str, *arguments: Any) -> Any: ...

    def tell(self, method: str, *arguments: Any) -> None: ...

    def kill(self) -> None: ...


HasBox: TypeAlias = Callable[[], object]


class Errand:
    """Example: await Errand(worker, order, admin, artifacts, job.has_box).run()."""

    def __init__(
        self,
        worker: NodeWorker,
        order: Order,
        admin: Sessions,
        artifacts: Path,
        has_box: HasBox,
        *,
        end_s: float = END_S,
    ) -> None:
        self._worker = worker
        self._order = order
        self._admin = admin
        self._artifacts = artifacts
        self._has_box = has_box
        self._end_s = end_s
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> RolloutResult:
        """Raises what `cluster.RayWorker` does; a cancelled one has ended on its node, or its worker is lost."""
        listening = asyncio.create_task(self._listen(), name=f"errand {self._order.rollout_id}")
        try:
            result = await asyncio.shield(listening)
        except asyncio.CancelledError:
            await asyncio.shield(self._end(listening))
            raise
        if result is None:
            raise WorkerFailed("the attempt was cancelled on its node, and not from here")
        return result

    async def _end(self, listening: asyncio.Task[RolloutResult | None]) -> None:
        self._worker.tell("cancel", self._order.rollout_id)
        await asyncio.wait([listening], timeout=self._end_s)
        if not listening.done():
            log.warning("rollout %s did not end on its node within %.0f s", self._order.rollout_id, self._end_s)
            listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self) -> RolloutResult | None:
        """None = it was cancelled. To the end, so that nothing of it is left on the node either."""
        last: Event | None = None
        try:
            with tempfile.TemporaryFile() as kept:
                async for event in self._worker.attempt(self._order):
                    if event.kind == "file":
                        await asyncio.to_thread(kept.write, event.payload)
                    elif event.kind in ("result", "cancelled"):
                        last = event
                    else:
                        self._serve(event)
                if last is None:
                    raise WorkerFailed("the attempt ended without a last word")
                result: RolloutResult | None = last.payload
                if result is not None:
                    await self._keep(kept, result)
                return result
        finally:
            for answering in self._answering:
                answering.cancel()

    def _serve(self, event: Event) -> None:
        if event.kind == "box":
            self._has_box()
            return
        asked: dict[str, Callable[..., Awaitable[Any]]] = {
            "mint": self._admin.mint,
            "seal": self._admin.seal,
            "capture": self._admin.capture,
        }
        answering = asyncio.create_task(self._answer(event.number, asked[event.kind](*event.payload)))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def _answer(self, number: int, asked: Awaitable[Any]) -> None:
        value: Any = None
        failed: Exception | None = None
        try:
            value = await asked
        except CaptureError as error:
            failed = error
        except Exception as error:  # told in words: it may be of a kind that does not travel
            log.exception("rollout %s: its question could not be answered", self._order.rollout_id)
            failed = CaptureError(f"{type(error).__name__}: {error}")
        self._worker.tell("answer", self._order.rollout_id, number, value, failed)

    async def _keep(self, kept: BinaryIO, result: RolloutResult) -> None:
        """Put the attempt's logs and artifacts where those of an attempt on this host are."""
        if not kept.tell():
            return
        kept.seek(0)
        try:
            await asyncio.to_thread(unpack, kept, self._artifacts / self._order.rollout_id)
        except SandboxError as error:  # logs for people: no reason to lose the rollout
            result.findings.append(f"artifacts: warning not_kept: {error}")

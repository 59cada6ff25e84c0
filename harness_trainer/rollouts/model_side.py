"""The model as white-box rollouts reach it: the capture pipeline, opened once in the runner, on the run's store.

Owns what of a run the pipeline is made of, and a rollout's session there from mint to capture. The run's gateway has a
pipeline of its own on the same store, for agents; neither touches the other's sessions while they are open.

**An engine without a policy.** The gateway is told to hold its calls before another engine is started. Here the store
is read: it numbers the run's engines, and says whether the present one was sent a policy; it says that an engine is
gone before the next one is started. A call is made only while there is a policy, and its reply is thrown away, to be
sampled anew, if the number changed meanwhile. So none is of base weights, whatever the timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.errors import CaptureError, EngineUnreachable
from capture_proxy.gate import Gate
from capture_proxy.graph import assign_roles
from capture_proxy.pipeline import Pipeline
from capture_proxy.rendering import Bridging
from capture_proxy.store import Store
from capture_proxy.types import Capture, SessionPolicy
from harness_trainer.loops.endpoint import Endpoint
from harness_trainer.rollouts.config import PipelineSpec
from harness_trainer.rollouts.policy_records import engine_at

log = logging.getLogger("harness_trainer.rollouts")

ENGINE_KEY = "CAPTURE_PROXY_ENGINE_KEY"  # the gateway's name for it
LOOK_S = 0.25
SEAL_TIMEOUT_S = 10.0


class EngineGate(Gate):
    """Open while the present engine of the run has a policy, by the store's account."""

    def __init__(self, store: Path, *, patience_s: float) -> None:
        super().__init__(held=True, patience_s=patience_s)
        # Of its own, and read in the event loop: readers of a WAL file are not held up by its writers.
        self._db = sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=1)

    @contextlib.asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        before = await self._look()
        async with super().attempt():
            yield
        if await self._look() != before:
            raise EngineUnreachable("another engine has taken its place while it answered")

    async def watching(self) -> None:
        """Until cancelled. So that calls which wait go on, and those at an engine that is gone end."""
        while True:
            await self._look()
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        self._db.close()

    async def _look(self) -> int | None:
        try:
            engine = engine_at(self._db)
        except sqlite3.Error as error:
            log.warning("the run's store does not tell whether the engine may be asked: %s", error)
            engine = None
        if engine is None:
            await self.hold()
        else:
            self.release()
        return engine


class OwnSession:
    """One rollout's session."""

    def __init__(self, pipeline: Pipeline, session_id: str, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.sealed = False
        self._pipeline = pipeline
        self._session_id = session_id

    async def capture(self) -> Capture:
        """Seal it; all that was recorded, roles decided. Raises StoreError."""
        await self._pipeline.sessions.seal(self._session_id)
        self.sealed = True
        capture = await self._pipeline.sessions.capture(self._session_id)
        assign_roles(capture.turns)
        return capture


class ModelSide:
    """Makes sessions on an open pipeline; `model` is the name that calls give. Use `open_model_side`."""

    def __init__(self, pipeline: Pipeline, model: str) -> None:
        self._pipeline = pipeline
        self._model = model

    @asynccontextmanager
    async def session(
        self, session_id: str, policy: SessionPolicy, labels: dict[str, str]
    ) -> AsyncIterator[OwnSession]:
        """Open until this is left; then calls under way are aborted. Raises BadRequest, StoreError."""
        sessions = self._pipeline.sessions
        minted = await sessions.mint(session_id, policy, labels)
        live = await sessions.resolve(minted.token)
        own = OwnSession(self._pipeline, session_id, Endpoint(self._pipeline.turns, live, self._model))
        try:
            yield own
        finally:
            if not own.sealed:
                await asyncio.shield(self.seal(session_id))

    async def seal(self, session_id: str) -> None:
        """End it, also one of a runner that is gone. Raises nothing: what is amiss with the store shows elsewhere."""
        with suppress(CaptureError, TimeoutError):
            async with asyncio.timeout(SEAL_TIMEOUT_S):
                await self._pipeline.sessions.seal(session_id)


@asynccontextmanager
async def open_model_side(spec: PipelineSpec, store: Path) -> AsyncIterator[ModelSide]:
    """Raises StoreError, FamilyError."""
    engine = VllmEngine(
        spec.engine_url,
        transport=spec.transport,
        model=spec.model,
        api_key=os.environ.get(ENGINE_KEY) or None,
        adapters=spec.adapters,
    )
    async with AsyncExitStack() as stack:
        gate = stack.enter_context(closing(EngineGate(store, patience_s=spec.engine_patience_s)))
        pipeline = Pipeline(
            engine,
            await asyncio.to_thread(Store.open, store),
            hang_up_grace_s=0.0,  # nobody asks again
            bridging=Bridging(spec.bridging, spec.renderer, spec.tokenizer, spec.thinking_retention),
            gate=gate,
            restarted=False,
        )
        await stack.enter_async_context(pipeline.running())
        watching = asyncio.create_task(gate.watching(), name="watch the engine")
        stack.callback(watching.cancel)
        yield ModelSide(pipeline, spec.model)

"""Cancelling a rollout reaches the model side at once: its session is sealed while its sandbox is being ended.

Owns that order, sealing a session that may not be there (for `takeover` too), closing a killed runner's attempts where
nothing of them can go on, and ending what is open at gateways that a continued run has no more. Sealing aborts what the
engine samples for the session. Without it an agent could go on for as long as ending a sandbox takes, and the engine's
work for it would be in the way of fresh rollouts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from capture_proxy.admin_client import AdminClient
from capture_proxy.errors import CaptureError, StoreError
from capture_proxy.store import Store
from harness_trainer.engine.replicas import name_of
from harness_trainer.rollouts.slots import Attempt
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult

log = logging.getLogger("harness_trainer.rollouts")

Seal: TypeAlias = Callable[[str], Awaitable[None]]  # ends one session; raises nothing but cancellation
SEAL_TIMEOUT_S = 2.0  # cancelled rollouts of a run that is being stopped must not hold it up


def sealing(admin: AdminClient, attempt: Attempt) -> Attempt:
    """The attempt, which then seals its session when it is cancelled, or failed before it was sealed.

    It still ends only when all of it has ended.
    """

    async def run(job: Job) -> RolloutResult:
        running = asyncio.ensure_future(attempt(job))
        try:
            result = await asyncio.shield(running)
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.gather(seal(admin, job.rollout_id), running, return_exceptions=True)
            raise
        if result.outcome is Outcome.INFRA_FAILED:  # wherever that was: what is left of its agent gets no more tokens
            await seal(admin, job.rollout_id)
        return result

    return run


async def seal(admin: AdminClient, session_id: str) -> None:
    """End the session, if there is one and the gateway answers soon. Raises nothing but cancellation."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SEAL_TIMEOUT_S):
            try:
                await admin.seal(session_id)
            except CaptureError as error:  # it had none yet, or the gateway is gone as well
                log.info("session %s was not sealed: %s", session_id, error)


async def close_lost(store: RolloutStore, seals: Sequence[Seal]) -> Sequence[Job]:
    """Attempts of a killed runner have ended with it, or on their nodes: nothing goes on, and their slots run again.

    Whose session it is the gateways know, and the pipeline of a loop of our own: only that one has one of this name.
    """
    lost = await asyncio.to_thread(store.unfinished_rollouts)
    await asyncio.to_thread(store.close_lost)
    await asyncio.gather(*(seal_one(each.rollout_id) for each in lost for seal_one in seals))
    if lost:
        log.info("%d rollouts were under way when the last runner ended: they start over", len(lost))
    return ()


async def seal_removed(store: Path, num_gateways: int) -> None:
    """End the sessions of gateways that the run has no more: it is continued with fewer `engine.replicas`.

    A gateway ends its own sessions only, so nobody else would. To be called when a killed runner's attempts are closed,
    as none of them goes on there: sealed before, one would be cut short by a run that has the replica again. All such
    sessions, and not only those of the attempts just closed: a runner may be killed between the two.
    """
    present = {"", *(name_of("gateway", replica) for replica in range(1, num_gateways))}  # the first has no name
    try:
        file = await asyncio.to_thread(Store.open, store)
        try:
            removed = [session for session in await file.open_sessions() if session.gateway not in present]
            for session in removed:
                session.sealed = True
                await file.put_session(session)
        finally:
            await asyncio.shield(file.close())
    except StoreError as error:  # that of a run which cannot write its store shows elsewhere, and ends it
        log.warning("sessions of gateways that the run has no more may be open still: %s", error)
        return
    if removed:
        gone = ", ".join(sorted({session.gateway for session in removed}))
        log.info("sealed %d sessions of gateways that the run has no more: %s", len(removed), gone)

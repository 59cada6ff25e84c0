"""E2B's control plane: sandboxes made, found, kept alive and ended, through the official SDK.

Owns retries, the plan's longest lifetime and what the SDK's errors mean. What happens inside a sandbox is `e2b_envd`,
what one sandbox is in a run `e2b_sandbox`. Imports the SDK (half a second), so it is imported only when E2B is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import httpx
from connectrpc.errors import ConnectError
from e2b import AsyncSandbox, SandboxQuery
from e2b.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    RateLimitException,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    ServiceBusyException,
    TemplateException,
    TimeoutException,
)

from sandboxes.base import SandboxError, SandboxGone, SetupFailed
from sandboxes.docker_labels import CLAIM

if TYPE_CHECKING:
    from e2b.sandbox.sandbox_api import SandboxNetworkOpts

log = logging.getLogger(__name__)

# What a call of the SDK raises when it fails, besides CancelledError. Some of its errors are plain `Exception`s.
E2B_ERRORS = (Exception,)

_REQUEST_S = 30.0  # for any answer of the API
_CREATE_REQUEST_S = 75.0  # a busy service takes its time; longer `Retry-After`s than this are cut to our own back-off
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_READY_S = 60.0  # for the daemon inside to answer once the sandbox exists
_CAP = re.compile(r"timeout cannot be greater than (\d+) *(hour|minute|second)", re.IGNORECASE)
_UNITS = {"hour": 3600, "minute": 60, "second": 1}
_LOWER = (24 * 3600, 8 * 3600, 3600, 1800, 600, 300)  # tried in turn when a refusal does not say how long is allowed


@dataclass(frozen=True, slots=True)
class Connection:
    """Where E2B is. None = the SDK's own environment variables (E2B_API_KEY, E2B_DOMAIN, ...), else its cloud."""

    api_key: str | None = None
    domain: str | None = None
    api_url: str | None = None
    sandbox_url: str | None = None

    def options(self) -> dict[str, Any]:
        """As every call of the SDK takes them."""
        given = {
            "api_key": self.api_key,
            "domain": self.domain,
            "api_url": self.api_url,
            "sandbox_url": self.sandbox_url,
            "debug": False,  # E2B_DEBUG would make the SDK skip kills
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def address(self) -> str:
        """The API's URL, as records of what is owned there name it."""
        domain = self.domain or os.environ.get("E2B_DOMAIN") or "e2b.app"
        return self.api_url or os.environ.get("E2B_API_URL") or f"https://api.{domain}"

    @property
    def has_key(self) -> bool:
        return bool(self.api_key or os.environ.get("E2B_API_KEY"))


@dataclass(frozen=True, slots=True)
class Order:
    """A sandbox to make. `lifetime_s` is cut to what the plan allows; `metadata` carries the claim that finds it."""

    template: str
    metadata: Mapping[str, str]
    network: Mapping[str, object]
    lifetime_s: int

    @property
    def claim_id(self) -> str:
        return self.metadata[CLAIM]


class Service:
    """E2B for one run. `max_creating` bounds the creations under way, `first_wait_s` is the back-off's first step."""

    def __init__(self, connection: Connection, *, max_creating: int, first_wait_s: float = _FIRST_WAIT_S) -> None:
        self.connection = connection
        self.max_lifetime_s: int | None = None  # of the plan; None = not refused yet
        self._options = connection.options()
        self._creating = asyncio.Semaphore(max_creating)
        self._first_wait_s = first_wait_s

    # --- making ---

    async def create(self, order: Order, *, within_s: float) -> tuple[AsyncSandbox, bool]:
        """A sandbox that answers, and whether others of the same claim may exist: made by a request that got no answer.

        Overload, rate limits and lost connections are retried within the time. Raises SetupFailed for a template that
        does not exist, SandboxError for all else; others of the claim may then exist too (see `kill_claim`).
        """
        ends_at = time.monotonic() + within_s
        doubt = False
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._creating:
                    return await self._create_once(order, attempt, ends_at, look_first=doubt), doubt
            except _Retry as e:
                doubt = doubt or e.doubt
                reason = e.reason
            wait = random.uniform(0, min(_LONGEST_WAIT_S, self._first_wait_s * 2 ** min(attempt, 10)))
            if time.monotonic() + wait >= ends_at:
                raise SandboxError(f"E2B made no sandbox in {within_s:.0f} s and {attempt} tries; the last: {reason}")
            log.info("E2B makes no sandbox (%s); trying again in %.1f s", reason, wait)
            await asyncio.sleep(wait)

    async def _create_once(self, order: Order, attempt: int, ends_at: float, *, look_first: bool) -> AsyncSandbox:
        """Raises _Retry when another try may do better."""
        try:
            if look_first and (made := await self._adopt(order)):
                return await self._ready(made, ends_at)
            left = max(1.0, ends_at - time.monotonic())
            # The SDK retries once on its own: it alone sees Retry-After. Its retries share the key, ours must not: the
            # sandbox of an earlier key may be one that we ended.
            sandbox: AsyncSandbox = await AsyncSandbox.create(
                order.template,
                timeout=self.cut(order.lifetime_s),
                metadata=dict(order.metadata),
                network=cast("SandboxNetworkOpts", order.network),
                lifecycle={"on_timeout": "kill"},
                idempotency_key=f"{order.claim_id}-{attempt}",
                retries=1,
                request_timeout=min(_CREATE_REQUEST_S, left),
                **self._options,
            )
        except E2B_ERRORS as e:
            if self._learn_cap(e, self.cut(order.lifetime_s)):
                return await self._create_once(order, attempt, ends_at, look_first=False)
            raise _refused(e, order.template) from e
        return await self._ready(sandbox, ends_at)

    async def _adopt(self, order: Order) -> AsyncSandbox | None:
        """The sandbox that a request without an answer made."""
        for sandbox_id in await self._find({CLAIM: order.claim_id}):
            with contextlib.suppress(SandboxNotFoundException):
                lifetime = self.cut(order.lifetime_s)
                made: AsyncSandbox = await AsyncSandbox.connect(sandbox_id, timeout=lifetime, **self._options)
                return made
        return None

    async def _ready(self, sandbox: AsyncSandbox, ends_at: float) -> AsyncSandbox:
        """Wait for the daemon inside. The proxy in front may not know a new sandbox yet, so a 502 means "not yet"."""
        until = min(ends_at, time.monotonic() + _READY_S)
        wait = 0.05
        while True:
            try:
                if await sandbox.is_running(request_timeout=5):
                    return sandbox
                reason = "its proxy answers 502"
            except E2B_ERRORS as e:
                reason = said(e)
            if time.monotonic() + wait >= until:
                await self.kill(sandbox.sandbox_id)
                raise _Retry(f"sandbox {sandbox.sandbox_id} never answered: {reason}", doubt=True)
            await asyncio.sleep(wait)
            wait = min(2.0, wait * 2)

    # --- lifetimes ---

    def cut(self, lifetime_s: float) -> int:
        """Whole seconds, at most what the plan allows."""
        wanted = math.ceil(lifetime_s)
        return wanted if self.max_lifetime_s is None else min(wanted, self.max_lifetime_s)

    def _learn_cap(self, error: Exception, asked: int) -> bool:
        """Whether the error says that the plan allows less than was asked for."""
        if getattr(error, "status_code", None) != 400 or "timeout" not in str(error).lower():
            return False
        if found := _CAP.search(str(error)):
            cap: int | None = int(found[1]) * _UNITS[found[2].lower()]
        else:
            cap = next((rung for rung in _LOWER if rung < asked), None)
        if not cap or cap >= asked:
            return False
        log.warning("E2B's plan ends sandboxes after %d s; %d s were asked for", cap, asked)
        self.max_lifetime_s = cap
        return True

    async def extend(self, sandbox_id: str, lifetime_s: float) -> int:
        """Let it live so many seconds from now, or what the plan allows; how many were set. Raises SandboxGone."""
        asked = self.cut(lifetime_s)
        try:
            await AsyncSandbox.set_timeout(sandbox_id, asked, request_timeout=_REQUEST_S, **self._options)
        except E2B_ERRORS as e:
            if self._learn_cap(e, asked):
                return await self.extend(sandbox_id, lifetime_s)
            raise as_sandbox_error(e, f"its lifetime cannot be set to {asked} s") from e
        return asked

    async def info(self, sandbox_id: str) -> dict[str, str]:
        """Its metadata. Raises SandboxGone when it does not exist or no longer runs."""
        try:
            info = await AsyncSandbox.get_info(sandbox_id, request_timeout=_REQUEST_S, **self._options)
        except E2B_ERRORS as e:
            raise as_sandbox_error(e, "E2B does not say how it is") from e
        if info.state.value != "running":
            raise SandboxGone(f"E2B sandbox {sandbox_id} is gone: it is {info.state.value}")
        return dict(info.metadata)

    async def connect(self, sandbox_id: str, lifetime_s: float) -> AsyncSandbox:
        """A running sandbox made by another process. Raises SandboxGone."""
        try:
            sandbox: AsyncSandbox = await AsyncSandbox.connect(
                sandbox_id, timeout=self.cut(lifetime_s), request_timeout=_REQUEST_S, **self._options
            )
        except E2B_ERRORS as e:
            if self._learn_cap(e, self.cut(lifetime_s)):
                return await self.connect(sandbox_id, lifetime_s)
            raise as_sandbox_error(e, "it cannot be taken over") from e
        return sandbox

    # --- ending ---

    async def kill(self, sandbox_id: str) -> str:
        """End a sandbox, trying a few times; what went wrong, "" when it is gone. Never raises."""
        problem = ""
        for wait in (0.2, 1.0, 3.0, 0.0):
            try:
                await AsyncSandbox.kill(sandbox_id, request_timeout=10, **self._options)
                return ""
            except E2B_ERRORS as e:
                problem = f"E2B sandbox {sandbox_id} could not be ended: {said(e)}"
                if isinstance(e, AuthenticationException):
                    break
            await asyncio.sleep(wait)
        log.warning("%s; it ends by itself at the end of its lifetime, or with the next start", problem)
        return problem

    async def kill_claim(self, claim_id: str) -> str:
        """End every sandbox of the claim; what went wrong, or "". Never raises."""
        problem = ""
        for wait in (0.2, 1.0, 0.0):
            try:
                found = await self._find({CLAIM: claim_id})
            except E2B_ERRORS as e:
                problem = f"E2B does not list the sandboxes of {claim_id}: {said(e)}"
                await asyncio.sleep(wait)
                continue
            return "; ".join(filter(None, await asyncio.gather(*map(self.kill, found))))
        log.warning("%s", problem)
        return problem

    async def list_all(self, metadata: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Sandboxes whose metadata contain these, with their metadata, all pages. Raises SandboxError."""
        try:
            return await self._find(metadata)
        except E2B_ERRORS as e:
            raise as_sandbox_error(e, "E2B does not list its sandboxes") from e

    async def _find(self, metadata: Mapping[str, str]) -> dict[str, dict[str, str]]:
        pages = AsyncSandbox.list(
            query=SandboxQuery(metadata=dict(metadata)), limit=100, request_timeout=_REQUEST_S, **self._options
        )
        found: dict[str, dict[str, str]] = {}
        while pages.has_next:
            for info in await pages.next_items():
                # A service that ignores a filter it does not know must not make us end a stranger's sandbox.
                if metadata.items() <= info.metadata.items():
                    found[info.sandbox_id] = dict(info.metadata)
        return found


@contextlib.contextmanager
def heeding_cancellation() -> Iterator[None]:
    """Raises CancelledError for a cancellation that was swallowed inside, as Python 3.11's `wait_for`, which the SDK's
    transport uses, does when an answer arrives at the same moment."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel until it is over: a single cancellation can be swallowed, see `heeding_cancellation`."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)


# --- what the SDK's errors mean ----------------------------------------------------------------------------------


class _Retry(Exception):
    """Another try may do better. `doubt`: the service may have done what was asked all the same."""

    def __init__(self, reason: str, *, doubt: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.doubt = doubt


def _refused(error: Exception, template: str) -> Exception:
    """What a failed creation means: _Retry, SetupFailed or SandboxError."""
    status = getattr(error, "status_code", None)
    if isinstance(error, (_Retry, SandboxError)):
        return error
    if isinstance(error, (RateLimitException, ServiceBusyException)):
        return _Retry(said(error), doubt=False)
    if isinstance(error, httpx.ConnectError):
        return _Retry(f"cannot connect: {said(error)}", doubt=False)
    if isinstance(error, TemplateException):
        return SetupFailed(f"E2B's template {template!r} is too old for this version: build it again ({said(error)})")
    if isinstance(error, (AuthenticationException, InvalidArgumentException)):
        return as_sandbox_error(error, "E2B makes no sandbox")
    if status is not None and 400 <= status < 500 and status not in (408, 409, 425):
        if status == 404 or (status in (400, 403) and "template" in str(error).lower()):
            return SetupFailed(
                f"E2B has no usable template {template!r} ({said(error)}): build it with the e2b command line, or name "
                "another one as `image` in task.toml or as the sandbox's `template`"
            )
        return SandboxError(f"E2B makes no sandbox: {said(error)}")
    return _Retry(said(error), doubt=True)


def as_sandbox_error(error: Exception, what: str) -> SandboxError:
    """Any failure of the SDK as one of ours. `what` it means, e.g. "its lifetime cannot be set"."""
    if isinstance(error, SandboxError):
        return error
    if isinstance(error, (SandboxNotFoundException, SandboxNotRunningException)):
        return SandboxGone(f"the E2B sandbox is gone (killed, or its lifetime is over): {said(error)}")
    if isinstance(error, AuthenticationException):
        return SandboxError(f"{what}: E2B refuses the API key; check E2B_API_KEY ({said(error)})")
    return SandboxError(f"{what}: {said(error)}")


def may_be_gone(error: Exception) -> bool:
    """Whether only the API can tell if the sandbox still exists after this failure of a call into it."""
    kinds = (TimeoutException, httpx.TransportError, ConnectError, OSError)
    return isinstance(error, kinds) and not isinstance(error, SandboxNotRunningException)


def said(error: Exception) -> str:
    """The error's text in one line, without the SDK's advice to its own users."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, SandboxException):
        text = text.partition(": The sandbox was killed or reached")[0]
    return text[:300]

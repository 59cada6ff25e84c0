"""The interception proxies of a run: one for each list of hosts that its tasks ask for, none when none does.

An agent that takes no base URL has one in every task, if need be with an empty list.

Owns which lists there are, where the proxies keep their files, and that one which dies is started again. What a proxy
is, is `capture_proxy.intercept`'s; how a sandbox is led to one, `sandboxes`'; what its agent is given for it, `boxes`'.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

from capture_proxy.intercept.launch import InterceptConfig, InterceptError, Interceptor
from harness_trainer.errors import SetupError
from harness_trainer.harnesses.base import Harness
from harness_trainer.rollouts.boxes import network_of
from harness_trainer.rollouts.config import RunnerSpec
from harness_trainer.tasks import Task
from sandboxes.base import Access, Endpoint, Network, NetworkMode, Proxy

log = logging.getLogger("harness_trainer.rollouts")

_DEATHS, _WITHIN_S = 3, 60.0  # of one proxy: then something is wrong that starting it again does not mend


async def open_access(
    stack: AsyncExitStack, spec: RunnerSpec, tasks: Sequence[Task], admin_key: str, *harnesses: Harness
) -> Access:
    """The run's access with the proxies that its tasks and agents need, started; they end with `stack`.

    Raises SetupError. A proxy that dies for good cancels the caller's task, and `stack` then raises RuntimeError.
    """
    gateway = spec.access.gateway
    if gateway is None or gateway.url is None:
        return spec.access
    proxies = []
    for number, allow in enumerate(_lists(spec, tasks, harnesses)):
        of = f"{spec.replica}-{number}" if spec.replica else f"{number}"
        folder = spec.store.parent / "internal" / f"intercept-{of}"
        config = InterceptConfig(
            gateway_url=gateway.url,
            admin_url=spec.admin_url,
            admin_key=admin_key,
            confdir=folder,
            allow=allow,
            events_path=spec.artifacts / f"network-{of}.jsonl",
        )
        try:
            proxy = await stack.enter_async_context(_kept_up(config))
        except InterceptError as error:
            needing = [f"harness {harness.name} needs" for harness in harnesses if harness.needs_intercept]
            what = next(iter(needing), "tasks with network mode allowlist need")
            raise SetupError(f"{what} an interception proxy: {error}") from error
        proxies.append(Proxy(Endpoint(url=proxy.url), allow, proxy.ca_certificate.parent.resolve()))
    return replace(spec.access, proxies=(*spec.access.proxies, *proxies))


@asynccontextmanager
async def _kept_up(config: InterceptConfig) -> AsyncIterator[Interceptor]:
    """A proxy that is started again when it dies, where it was: agents at work know its address and its certificate,
    and it knows nothing of them but their connections.

    Raises InterceptError when it cannot be started at first. When it cannot be kept up, the owner's task is cancelled
    and RuntimeError raised here: no judgement of the run's, so a runner is started again.
    """
    owner = asyncio.current_task()
    assert owner is not None
    async with Interceptor(config) as proxy:
        keeping = asyncio.create_task(_keep_up(proxy, owner), name="interception proxy")
        keeping.add_done_callback(lambda done: done.cancelled() or done.exception() is None or owner.cancel())
        try:
            yield proxy
        except BaseException:  # what came of the cancellation
            if keeping.done() and not keeping.cancelled() and (error := keeping.exception()) is not None:
                owner.uncancel()
                raise RuntimeError(str(error)) from error
            raise
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])


async def _keep_up(first: Interceptor, owner: asyncio.Task[object]) -> None:
    url, proxy = first.url, first
    what = f"the interception proxy {url} (for {', '.join(first.config.allow) or 'no host but the gateway'})"
    died: deque[float] = deque(maxlen=_DEATHS)
    try:
        while True:
            why = await proxy.wait()
            if owner.cancelling():  # it was told to end with us
                return
            died.append(asyncio.get_running_loop().time())
            if len(died) == _DEATHS and died[-1] - died[0] < _WITHIN_S:
                raise RuntimeError(f"{what} died {_DEATHS} times within {_WITHIN_S:.0f} s, at last so: {why}")
            log.warning("%s died and is started again: %s", what, why)
            proxy = Interceptor(replace(first.config, bind=urlsplit(url).netloc))
            try:
                await proxy.start()
            except InterceptError as error:
                raise RuntimeError(f"{what} died ({why}) and cannot be started again: {error}") from error
    finally:
        await proxy.stop()


def _lists(spec: RunnerSpec, tasks: Sequence[Task], harnesses: Sequence[Harness]) -> list[tuple[str, ...]]:
    forced = getattr(spec.sandbox, "network", None)  # a mode for every task, where the kind of sandbox has one
    if forced not in (None, NetworkMode.ALLOWLIST):
        for harness in filter(lambda one: one.needs_intercept, harnesses):
            raise SetupError(
                f"harness {harness.name} is to be intercepted, which network mode {forced} has no proxy for: "
                "leave sandbox.network out, or set rollouts.entry to base_url"
            )
        return []
    found: list[Network] = []
    for network in (network_of(task, harness) for task in tasks for harness in harnesses):
        if network.mode is NetworkMode.ALLOWLIST and not any(_alike(network, other) for other in found):
            found.append(network)
    return [network.allow for network in found if spec.access.proxy_for(network) is None]


def _alike(one: Network, other: Network) -> bool:
    return {entry.lower() for entry in one.allow} == {entry.lower() for entry in other.allow}

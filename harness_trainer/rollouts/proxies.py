"""The interception proxies of a run: one for each list of hosts that its tasks ask for, none when none does.

An agent that takes no base URL has one in every task, if need be with an empty list.

Owns which lists there are and where the proxies keep their files. What a proxy is, is `capture_proxy.intercept`'s; how
a sandbox is led to one, `sandboxes`'; what its agent is given for it, `boxes`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from capture_proxy.intercept.launch import InterceptConfig, InterceptError, Interceptor
from harness_trainer.errors import SetupError
from harness_trainer.harnesses.base import Harness
from harness_trainer.rollouts.boxes import network_of
from harness_trainer.rollouts.config import RunnerSpec
from harness_trainer.tasks import Task
from sandboxes.base import Access, Endpoint, Network, NetworkMode, Proxy


async def open_access(
    stack: AsyncExitStack, spec: RunnerSpec, tasks: Sequence[Task], admin_key: str, *harnesses: Harness
) -> Access:
    """The run's access with the proxies that its tasks and agents need, started; they end with `stack`.

    Raises SetupError.
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
            proxy = await stack.enter_async_context(Interceptor(config))
        except InterceptError as error:
            needing = [f"harness {harness.name} needs" for harness in harnesses if harness.needs_intercept]
            what = next(iter(needing), "tasks with network mode allowlist need")
            raise SetupError(f"{what} an interception proxy: {error}") from error
        proxies.append(Proxy(Endpoint(url=proxy.url), allow, proxy.ca_certificate.parent.resolve()))
    return replace(spec.access, proxies=(*spec.access.proxies, *proxies))


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

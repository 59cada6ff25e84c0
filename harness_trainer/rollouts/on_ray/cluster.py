"""The only importer of ray: a connection to a cluster, its nodes, and one worker on each.

Owns the calls and the mapping of Ray's errors: what kills a worker is `WorkerLost`, an error that its code raised
`WorkerFailed`. Which nodes are used is `members`', what for, `executor`'s. Workers are ordinary actors of this driver:
they end with it, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from harness_trainer.errors import SetupError
from harness_trainer.rollouts.on_ray.messages import Event, Order, WorkerFailed, WorkerLost
from harness_trainer.rollouts.on_ray.nodes import RESOURCE, NodeInfo
from harness_trainer.rollouts.on_ray.worker import Worker

log = logging.getLogger("harness_trainer.rollouts")

CONNECT_S = 60.0
DIAL_S = 5.0
_AT_ONCE = 10_000  # calls of one worker; how many attempts it runs is the runner's to say
# Ray would run the worker on uvloop where that is installed; the runner itself runs on asyncio's own loop.
_WORKER_ENV = {"env_vars": {"RAY_USE_UVLOOP": "0"}}


class Cluster:
    """A connection, made by `connect`; one per process."""

    @classmethod
    async def connect(cls, address: str) -> Cluster:
        """Raises SetupError, in seconds where nobody listens at the address."""
        await asyncio.to_thread(dial, address)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Not on the main thread, where Ray would take SIGTERM from us; a daemon, because it may hang for minutes.
        threading.Thread(target=_connect, args=(address, done, done.get_loop()), daemon=True).start()
        try:
            await asyncio.wait_for(done, CONNECT_S)
            _keep_signals()
        except TimeoutError as error:
            raise SetupError(
                f"the Ray cluster at {address} does not answer within {CONNECT_S:.0f} s: look at `ray status` there"
            ) from error
        return cls()

    async def close(self) -> None:
        """Whatever this driver's workers still do ends."""
        await asyncio.to_thread(ray.shutdown)

    async def nodes(self) -> list[NodeInfo]:
        """Those that are alive. Raises WorkerLost when the head does not say: its nodes may live on."""
        try:
            found = await asyncio.to_thread(ray.nodes)
        except Exception as error:  # of Ray's core, in no class of its own
            raise WorkerLost(f"the Ray cluster's head does not answer: {_first_line(error)}") from error
        return [NodeInfo(n["NodeID"], n["NodeManagerAddress"], dict(n["Resources"])) for n in found if n["Alive"]]

    def own_address(self) -> str:
        """This host's, as Ray knows it."""
        return str(ray.util.get_node_ip_address())

    async def put(self, value: Any) -> Any:
        """A reference that `RayWorker.call` takes for the value: it travels to each node once."""
        return await asyncio.to_thread(ray.put, value)

    def start(self, node: NodeInfo) -> RayWorker:
        """A worker on the node, and nowhere else. Whether it could be started its first call tells."""
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_concurrency": _AT_ONCE,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            "runtime_env": _WORKER_ENV,
        }
        if node.declared is not None:
            options["resources"] = {RESOURCE: node.declared}
        return RayWorker(ray.remote(Worker).options(**options).remote())


class RayWorker:
    """One worker. Every method but `kill` raises WorkerLost, and WorkerFailed."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            raise WorkerFailed(_last_line(error)) from error
        except RayError as error:
            raise WorkerLost(_reason(error)) from error

    def tell(self, method: str, *arguments: Any) -> None:
        """A call whose outcome nobody waits for."""
        getattr(self._actor, method).remote(*arguments)

    async def attempt(self, order: Order) -> AsyncIterator[Event]:
        """What the attempt says, to its last word."""
        try:
            async for reference in self._actor.attempt.options(num_returns="streaming").remote(order):
                yield await reference
        except RayTaskError as error:
            raise WorkerFailed(_last_line(error)) from error
        except RayError as error:
            raise WorkerLost(_reason(error)) from error

    def kill(self) -> None:
        """Also one that only cannot be reached now: what it may still do counts for nothing. Idempotent."""
        try:
            ray.kill(self._actor, no_restart=True)
        except RayError as error:  # the head is gone, and what it knew of the worker with it
            log.warning("a worker could not be told to end: %s", _first_line(error))


def dial(address: str) -> None:
    """Raises SetupError when nobody listens there: Ray would try for two minutes, and end the process then."""
    address = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), DIAL_S).close()
    except (OSError, OverflowError) as error:
        raise SetupError(
            f"no Ray cluster at {address}: {error}. Start one with `ray start --head --port=6379`, and give its "
            "address with --ray-address HOST:PORT"
        ) from error


def _connect(address: str, done: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
    error: Exception | None = None
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    except ConnectionError as failed:
        error = SetupError(
            f"no Ray cluster for {address} here ({_first_line(failed)}): join one with `ray start "
            "--address=HEAD:6379`, start one with `ray start --head`, or give --ray-address HOST:PORT"
        )
    except Exception as failed:  # Ray raises RuntimeError and ValueError of its own for what it finds there
        error = SetupError(f"cannot use the Ray cluster at {address}: {_first_line(failed)}. {advice(str(failed))}")
    except SystemExit as failed:
        error = SetupError(f"Ray gave up on the cluster at {address} (exit code {failed.code})")
    loop.call_soon_threadsafe(lambda: _settle(done, error))


def _keep_signals() -> None:
    """Ray's core has put a handler of its own below Python's: it would end this process on the spot, with a dump."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        if (handler := signal.getsignal(signum)) is not None:
            signal.signal(signum, handler)
            signal.siginterrupt(signum, False)


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def advice(said: str) -> str:
    """What to do about an error of Ray's at connecting."""
    if "version mismatch" in said.lower():
        return "All hosts need one version of Ray and of Python: install the cluster's here, or ours there"
    return "This host has to be in the cluster: `ray start --address=HEAD:6379` joins it"


def _reason(error: RayError) -> str:
    return reason(str(error)) or _first_line(error)


def reason(said: str) -> str:
    """Of the end of a worker, where Ray's own words do not say what to do; "" = they do."""
    if "No module named 'harness_trainer" in said:
        return (
            "harness-trainer is not installed in the node's Python: pip install 'harness-trainer[ray]' there, and "
            "start the node from that environment"
        )
    return ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400] or type(error).__name__


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:400] if lines else type(error).__name__

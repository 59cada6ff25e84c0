"""The nodes of a Ray cluster that a run uses: who is there, who takes how many rollouts, who is lost.

Owns a worker on each node that takes rollouts, opened when it joins, also in the middle of a run, with what may keep it
from being of use; and back-off where that was so. What runs on the nodes is `executor`'s; Ray itself, `cluster`'s.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness_trainer.errors import SetupError
from harness_trainer.rollouts.on_ray import reach
from harness_trainer.rollouts.on_ray.errand import NodeWorker
from harness_trainer.rollouts.on_ray.messages import NodeFacts, Setup, WorkerFailed, WorkerLost
from harness_trainer.rollouts.on_ray.nodes import NO_NODES, NodeInfo
from harness_trainer.rollouts.on_ray.worker import ask, facts_here

log = logging.getLogger("harness_trainer.rollouts")

LOOK_S = 1.0  # between two looks at who is in the cluster
START_S = 120.0  # for a node to start a worker: a Python process that imports this package
OPEN_S = 1200.0  # for it to be ready: agents may be installed there first
CLOSE_S = 45.0
SETTLE_S = 10.0  # for Ray to say that a node has left, after a worker on it was lost
_AGAIN_S = 10.0  # after a worker was lost or could not be opened; doubled each time, up to
_AGAIN_MAX_S = 300.0
SILENT_S = 120.0  # a worker that has not answered for so long hangs; Ray sees only processes and hosts that are gone
_ASKS = 8  # times that it is asked within that
_REST_S = 5.0  # of a node that cannot make sandboxes, while others can; doubled each time, up to _AGAIN_MAX_S


class Nodes(Protocol):
    """What of `cluster.Cluster` is used here."""

    async def nodes(self) -> list[NodeInfo]: ...

    async def put(self, value: Any) -> Any: ...

    def own_address(self) -> str: ...

    def start(self, node: NodeInfo) -> NodeWorker: ...


@dataclass(slots=True, eq=False)
class Node:
    """One with an open worker. Example: Node(info, worker, capacity=16, running=3)."""

    info: NodeInfo
    worker: NodeWorker
    capacity: int  # rollouts at once
    running: int = 0
    brought: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # tasks whose folders it has, or gets now
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)  # one task's folders at a time: they are in memory then
    rests_until: float = 0.0  # monotonic
    num_unmade: int = 0  # attempts in a row that ended before they had a sandbox

    def note(self, *, made: bool) -> None:
        """Whether an attempt had a sandbox. One that fails at once is free again first, and would draw them all."""
        if made:
            self.num_unmade, self.rests_until = 0, 0.0
        else:
            rest_s = min(_REST_S * 2.0 ** min(self.num_unmade, 60), _AGAIN_MAX_S)
            self.num_unmade, self.rests_until = self.num_unmade + 1, time.monotonic() + rest_s
            said = (
                "Ray node %s made no sandbox, %d times in a row: it rests for %.0f s as long as other nodes do better"
            )
            log.warning(said, self.info.name, self.num_unmade, rest_s)


class Members:
    """`tell` is for what a person should read once; `changed` is set after every change of `open` or of a node."""

    def __init__(
        self,
        cluster: Nodes,
        setup: Setup,
        *,
        tell: Callable[..., None],
        look_s: float = LOOK_S,
        silent_s: float = SILENT_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.open: dict[str, Node] = {}  # by the node's id
        self.changed = asyncio.Event()
        self._cluster = cluster
        self._setup = setup
        self._settings = setup.spec.config
        self._tell = tell
        self._look_s = look_s
        self._silent_s = silent_s
        self._settle_s = settle_s
        self._reference: Any = None
        self._here: NodeFacts = facts_here()
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._problems: dict[str, str] = {}  # of nodes that take none now
        self._lost_at: dict[str, float] = {}  # monotonic: of those, where a worker was lost while it was opened
        self._again: dict[str, tuple[float, float]] = {}  # not before (monotonic), and how long was waited
        self._none_since = time.monotonic()

    @property
    def given_up(self) -> str | None:
        """Why the run ends, once no node has been open for `ray.patience_s`; None = it does not."""
        patience_s = self._settings.ray.patience_s
        if self.open or time.monotonic() - self._none_since <= patience_s:
            return None
        return (
            f"no Ray node has taken rollouts for {patience_s:.0f} s (rollouts.ray.patience_s): {self._why_none}. "
            "Run the same command again to go on"
        )

    @property
    def _why_none(self) -> str:
        return "; ".join(dict.fromkeys(self._problems.values())) or NO_NODES

    def ready(self) -> list[Node]:
        """The open nodes, without those that rest as long as there are others."""
        now = time.monotonic()
        return [node for node in self.open.values() if node.rests_until <= now] or list(self.open.values())

    async def wait_for_change(self) -> None:
        """Or until it is time to look again in any case."""
        self.changed.clear()
        try:
            await asyncio.wait_for(self.changed.wait(), self._look_s)
        except TimeoutError:
            return

    async def close(self) -> None:
        """Every worker has ended what it runs, and then itself."""
        ending = [*self._opening.values(), *self._watching]
        for one in ending:
            one.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*(self._end(node) for node in list(self.open.values())))
        self.open.clear()

    async def _end(self, node: Node) -> None:
        try:
            await asyncio.wait_for(node.worker.call("close"), CLOSE_S)
        except (WorkerLost, WorkerFailed, TimeoutError) as error:
            log.warning("the worker on Ray node %s did not end in order: %s", node.info.name, error)
        node.worker.kill()

    async def first_node(self) -> None:
        """Until one is open. Where none is there it waits for one, as a run whose nodes are all gone: before anything
        was started there was one, and this may be a runner that was started again. Raises SetupError when one that is
        there cannot be used, and when none has come for `ray.patience_s`.
        """
        self._reference = await self._cluster.put(self._setup)
        has_told = False
        while not self.open:
            try:
                await self._compare(await self._cluster.nodes())
            except WorkerLost as error:
                raise SetupError(str(error)) from error
            if not self._opening:
                if self._problems and not self._may_have_left():
                    raise SetupError(self._why_none)
                if (why := self.given_up) is not None:
                    raise SetupError(why)
                if not has_told and not self._problems:
                    has_told = True
                    self._tell_of_waiting()
            await self.wait_for_change()

    def _may_have_left(self) -> bool:
        """Whether each node that takes none may be about to leave: Ray says so a moment after its worker is lost."""
        since = time.monotonic() - self._settle_s
        return all(self._lost_at.get(node_id, since) > since for node_id in self._problems)

    def _tell_of_waiting(self) -> None:
        patience = f"{self._settings.ray.patience_s:.0f} s (rollouts.ray.patience_s)"
        line = f"waiting up to {patience} for a Ray node, as none is there that takes rollouts: {NO_NODES}"
        log.warning("%s", line)
        self._tell("waiting_for_node", line)

    async def look(self) -> None:
        """For ever: who has come, who has left."""
        while True:
            await asyncio.sleep(self._look_s)
            try:
                alive = await self._cluster.nodes()
            except WorkerLost as error:  # Ray ends this process if that lasts
                log.warning("%s", error)
            else:
                await self._compare(alive)

    async def _compare(self, alive: Sequence[NodeInfo]) -> None:
        """Open workers on nodes that have come; those of nodes that have left are lost."""
        now = time.monotonic()
        ids = {info.node_id for info in alive}
        for node_id in set(self.open) - ids:
            self.lose(self.open[node_id], "it has left the cluster")
        for node_id in set(self._problems) - ids:
            del self._problems[node_id]
            self._lost_at.pop(node_id, None)
        for info in alive:
            known = info.node_id in self.open or info.node_id in self._opening
            wait_until, _ = self._again.get(info.node_id, (0.0, 0.0))
            if not known and now >= wait_until and self._capacity(info) > 0:
                opening = asyncio.create_task(self._try_open(info), name=f"open {info.name}")
                self._opening[info.node_id] = opening

    def _capacity(self, info: NodeInfo) -> int:
        return info.capacity(self._settings.ray.per_node, self._settings.max_concurrent)

    async def _try_open(self, info: NodeInfo) -> None:
        worker: NodeWorker | None = None
        problem, opened = "", False
        try:
            worker = self._cluster.start(info)
            problem = await self._opened(info, worker)
            opened = not problem
        except SetupError as error:
            problem = str(error)
        except (WorkerLost, WorkerFailed) as error:
            problem = f"the worker on Ray node {info.name} failed: {error}"
            if isinstance(error, WorkerLost):
                self._lost_at.setdefault(info.node_id, time.monotonic())
        except Exception as error:  # nobody foresaw it: the node is named, left out, and tried again like any other
            log.exception("no worker could be opened on Ray node %s", info.name)
            problem = f"no worker could be opened on Ray node {info.name}: {type(error).__name__}: {error}"
        finally:
            self._opening.pop(info.node_id, None)
            if not opened and worker is not None:
                worker.kill()
        if opened and worker is not None:
            node = self.open[info.node_id] = Node(info, worker, self._capacity(info))
            watching = asyncio.create_task(self._watch(node), name=f"watch {info.name}")
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
            self._problems.pop(info.node_id, None)
            self._lost_at.pop(info.node_id, None)
            log.info("Ray node %s takes rollouts: %d at once", info.name, node.capacity)
        else:
            if self._problems.get(info.node_id) != problem:
                log.warning("Ray node %s takes no rollouts: %s", info.name, problem)
                self._tell("node_unusable", f"Ray node {info.name} takes no rollouts: {problem}", node=info.node_id)
            self._problems[info.node_id] = problem
            self._try_later(info)
        self.changed.set()

    async def _opened(self, info: NodeInfo, worker: NodeWorker) -> str:
        """What is wrong, "" = it is open. Raises SetupError, WorkerLost, WorkerFailed."""
        spec = self._setup.spec
        try:
            facts: NodeFacts = await asyncio.wait_for(worker.call("facts"), START_S)
        except TimeoutError:
            return (
                f"Ray node {info.name} did not start a worker within {START_S:.0f} s: another run may hold its "
                "`rollouts` (see `ray status`), or the node is overloaded"
            )
        _require_same(info.name, facts, self._here)
        own_address = self._cluster.own_address()
        access = reach.access_on(facts, info.name, self._here, spec.access, spec.sandbox.type, own_address)
        follows = False
        if access is not spec.access and access.gateway is not None:
            url = access.gateway.public_url or ""
            headers = {"authorization": f"Bearer no-session-{secrets.token_urlsafe(16)}"}
            asked = ask((spec.access.gateway or access.gateway).url or url, headers)
            try:
                async with asyncio.timeout(START_S):
                    seen, own = await asyncio.gather(worker.call("look", url, headers), asked)
            except TimeoutError:
                return (
                    f"Ray node {info.name} did not say within {START_S:.0f} s whether it reaches the gateway at {url}"
                )
            if problem := reach.judge(info.name, url, seen, own):
                return problem
            follows = spec.access.gateway is not None and spec.access.gateway.public_url_file is not None
        try:
            problem = await asyncio.wait_for(worker.call("open", self._reference, access, follows), OPEN_S)
        except TimeoutError:
            return f"Ray node {info.name} was not ready within {OPEN_S:.0f} s"
        return f"on Ray node {info.name}: {problem}" if problem else ""

    async def _watch(self, node: Node) -> None:
        """Until the node is lost: a worker that hangs would hold its rollouts, and the run, without an end."""
        while self.open.get(node.info.node_id) is node:
            await asyncio.sleep(self._silent_s / _ASKS)
            try:
                await asyncio.wait_for(node.worker.call("facts"), self._silent_s)
            except TimeoutError:
                self.lose(node, f"its worker has not answered for {self._silent_s:.0f} s")
            except (WorkerLost, WorkerFailed) as error:
                self.lose(node, str(error))

    def _try_later(self, info: NodeInfo) -> None:
        _, before = self._again.get(info.node_id, (0.0, 0.0))
        wait_s = min(max(_AGAIN_S, 2 * before), _AGAIN_MAX_S)
        self._again[info.node_id] = (time.monotonic() + wait_s, wait_s)

    def lose(self, node: Node, reason: str) -> None:
        """Whatever runs there counts for nothing from now on. Idempotent."""
        if self.open.get(node.info.node_id) is not node:
            return
        del self.open[node.info.node_id]
        if not self.open:
            self._none_since = time.monotonic()
        node.worker.kill()
        self._try_later(node.info)
        line = f"Ray node {node.info.name} is lost with {node.running} rollouts, which start over: {reason}"
        log.warning("%s", line)
        self._tell("node_lost", line, node=node.info.node_id, rollouts=node.running)
        self.changed.set()


def _require_same(name: str, there: NodeFacts, here: NodeFacts) -> None:
    """Raises SetupError. What travels between the two is pickled."""
    if there.version != here.version:
        raise SetupError(
            f"Ray node {name} has harness-trainer {there.version}, this host {here.version}: install the same on both"
        )
    if there.python.split(".")[:2] != here.python.split(".")[:2]:
        raise SetupError(
            f"Ray node {name} runs Python {there.python}, this host {here.python}: use one minor version on all hosts"
        )

"""A Ray cluster of several nodes on this machine, and a runner that uses it: for tests of `rollouts.executor: ray`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness_trainer.rollouts.on_ray.nodes import RESOURCE
from tests.rollouts.reattaching import Bench, Boxes

ROOT = Path(__file__).parents[2]
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "PYTHONPATH": str(ROOT),
}
_SMALL = {"object_store_memory": 80_000_000, "include_dashboard": False}


class Nodes:
    """The cluster. Its head takes no rollouts; its nodes' own state is below `home`."""

    def __init__(self, home: Path) -> None:
        from ray.cluster_utils import Cluster

        self.registry = home / "state" / "harness-trainer" / "owned"
        self._temp = tempfile.mkdtemp(prefix="ray-")  # holds sockets: pytest's own folders are too long for them
        # Where Ray notes a cluster for `auto`: not the machine's own note, whose folder may not even be there.
        self._env = {**_QUIET, "XDG_STATE_HOME": str(home / "state"), "RAY_TMPDIR": self._temp}
        temp = Path(self._temp, "ray")
        temp.mkdir()
        self._cluster = Cluster()
        try:
            with self._environment():
                self._cluster.add_node(num_cpus=0, temp_dir=str(temp), **_SMALL)
        except BaseException:
            self.close()
            raise
        self.address = self._cluster.address

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """Nodes have ours, and so have their workers. Ray's own handler of SIGTERM is not pytest's."""
        before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
        os.environ.update(self._env)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)
            os.environ.clear()
            os.environ.update(before)

    def add(self, rollouts: int) -> Any:
        """Without a CPU: Ray would start a process for each ahead of need. Blocks, and wants the main thread."""
        with self._environment():
            return self._cluster.add_node(num_cpus=0, resources={RESOURCE: rollouts}, wait=False, **_SMALL)

    def kill(self, node: Any) -> None:
        """As when its host loses power; what ran there is left to its own devices."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        with self._environment():
            self._cluster.shutdown()
        shutil.rmtree(self._temp, ignore_errors=True)  # its last processes may still be writing logs


class RayBench(Bench):
    """`Bench` with the runner's attempts on the cluster; sandboxes are on record in the nodes' registry."""

    def __init__(self, folder: Path, gateway: Any, store: Any, nodes: Nodes | None, **settings: object) -> None:
        boxes = Boxes("none", folder)
        address = "auto" if nodes is None else nodes.address
        own = {"executor": "ray", "ray": {"address": address, "patience_s": 60}, "max_concurrent": 4}
        super().__init__(folder, gateway, store, boxes, **{**own, "group_size": 4, **settings})
        self.nodes = nodes

    def begun(self) -> set[str]:
        """Sandboxes whose agent waits for the word."""
        return {box for box in self.boxes.ids() if self.boxes.has(box, "/app/begun")}

    def tell_all(self, text: str = "") -> None:
        for box in self.begun():
            self.boxes.put(box, "/app/go", text)

    def nothing_left(self) -> bool:
        assert self.nodes is not None
        left = [path.name for folder in (self.registry, self.nodes.registry) for path in folder.glob("*.json")]
        return not self.agents() and not self.boxes.ids() and not left

"""Asks for the Ray cluster of a run before anything slow is started, in a process of its own: `require_cluster`.

Owns that process (Ray keeps state in whoever connects, and ends a process that it cannot connect), what a person is
told, and the settings that do not go with it. Called by `workload`, `opened`, `doctor` and `plan`; the process is
`python -m harness_trainer.rollouts.on_ray.precheck '{"address": "auto"}'`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Collection

from harness_trainer.errors import ConfigError, HarnessTrainerError, SetupError
from harness_trainer.harnesses.base import Harness
from harness_trainer.rollouts.boxes import network_of
from harness_trainer.rollouts.on_ray.config import RayConfig
from harness_trainer.rollouts.on_ray.nodes import NO_NODES, NodeInfo
from harness_trainer.tasks import Task
from sandboxes import SandboxConfig
from sandboxes.base import NetworkMode

LIMIT_S = 75.0  # longer than `cluster.CONNECT_S`
INSTALL = "pip install 'harness-trainer[ray]'"


def require_cluster(config: RayConfig, max_concurrent: int) -> str:
    """What there is, as one line. Blocking, for some seconds. Raises SetupError, naming what to do."""
    return summary(ask_nodes(config), config, max_concurrent)


def ask_nodes(config: RayConfig) -> list[NodeInfo]:
    """Those that are alive. Blocking, for some seconds. Raises SetupError, naming what to do."""
    if importlib.util.find_spec("ray") is None:
        raise SetupError(f"--executor ray needs Ray, which is not installed here: {INSTALL}")
    argv = [sys.executable, "-m", "harness_trainer.rollouts.on_ray.precheck", config.model_dump_json()]
    try:
        asked = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"the Ray cluster at {config.address} does not answer within {LIMIT_S:.0f} s: look at `ray status` there"
        ) from error
    try:
        found = json.loads(asked.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        said = " ".join(asked.stderr.split())[-300:] or f"exit code {asked.returncode}"
        raise SetupError(f"cannot use the Ray cluster at {config.address}: {said}") from error
    if "error" in found:
        raise SetupError(found["error"])
    return [NodeInfo(**node) for node in found["nodes"]]


def summary(nodes: list[NodeInfo], config: RayConfig, max_concurrent: int) -> str:
    """Raises SetupError when none takes rollouts."""
    places = [places for node in nodes if (places := node.capacity(config.per_node, max_concurrent))]
    if not places:
        raise SetupError(NO_NODES)
    together = min(sum(places), max_concurrent)
    return f"{len(places)} of the Ray cluster's {len(nodes)} nodes take rollouts, {together} at a time in all"


def require_possible(
    tasks: Collection[Task], harnesses: Collection[Harness], sandbox: SandboxConfig, num_replicas: int
) -> None:
    """Raises ConfigError for what attempts on nodes cannot have."""
    if num_replicas > 1:
        raise ConfigError(
            "--executor ray leads nodes to one gateway, and each engine replica has one: leave engine.replicas out"
        )
    if getattr(sandbox, "network", None) not in (None, NetworkMode.ALLOWLIST):
        return
    for task in tasks:
        for harness in harnesses:
            if network_of(task, harness).mode is NetworkMode.ALLOWLIST:
                raise ConfigError(
                    f"with --executor ray {harness.name} cannot work on task {task.name!r}: it needs an interception "
                    "proxy, and that needs the gateway's admin port, which stays on this host. Use network mode "
                    "proxy-only or public and an agent that takes a base URL, or --executor local"
                )


async def _look(config: RayConfig) -> dict[str, object]:
    from harness_trainer.rollouts.on_ray.cluster import Cluster

    cluster = await Cluster.connect(config.address)
    try:
        nodes = await cluster.nodes()
    finally:
        await cluster.close()
    return {"nodes": [{"node_id": n.node_id, "address": n.address, "resources": dict(n.resources)} for n in nodes]}


def main() -> int:
    config = RayConfig.model_validate_json(sys.argv[1])
    try:
        found: dict[str, object] = asyncio.run(_look(config))
    except HarnessTrainerError as error:
        found = {"error": str(error)}
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

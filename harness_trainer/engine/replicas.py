"""Several engines of one run: copies of the model that share the rollouts, each with its own port, GPUs and gateway.

Owns the arithmetic: what the parts are called, which ports, GPUs and cores each engine gets, and what does not go
together with replicas. For a dense model vLLM's own data parallel is exactly this: it refuses `--data-parallel-rank`
there and says to launch independent servers, one behind each external load balancer's address. Starts nothing; called
by the run's config (`refusal`), the supervisor (`settings_of`) and `doctor`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping

from harness_trainer.engine.config import EngineConfig
from harness_trainer.errors import SetupError

_ASK_S = 30.0
_SANDBOXES = ("local", "docker")  # whose way to the gateway is on this machine, so that each may have its own


def name_of(part: str, replica: int) -> str:
    """Example: name_of("engine", 1) == "engine-1"; the first has the name that the only one would have."""
    return f"{part}-{replica}" if replica else part


def port_of(port: int, replica: int) -> int:
    """0 = any free one."""
    return port + replica if port else 0


def refusal(
    engine: EngineConfig,
    *,
    gateway_port: int,
    is_exposed: bool,
    sandbox: str,
    environments: Iterable[str],
    weight_sync: str = "shm",
    executor: str = "local",
) -> str | None:
    """Why a run cannot have so many replicas, and what to do; None = it can. `environments`: types of its sources."""
    number = engine.replicas
    if number == 1:
        return None
    ours = f"engine.replicas is {number}"
    if is_exposed:
        return f"{ours}, and the gateway of one replica only can be opened to the outside: leave gateway.expose out"
    if sandbox not in _SANDBOXES:
        return f"{ours}, and sandboxes of type {sandbox} reach one gateway only: use docker or local, or one replica"
    if others := sorted(set(environments) - {"own"}):
        return f"{ours}, and sources of type {others[0]} reach one engine only: leave them out, or use one replica"
    if executor != "local":
        return f"{ours}, and rollouts.executor {executor} leads its nodes to one gateway only: leave one of them out"
    if weight_sync == "nccl":
        return f"{ours}, and weight_sync nccl reaches one engine only: use shm (on one host) or lora"
    ends = {"engine.port": port_of(engine.port, number - 1), "gateway.port": port_of(gateway_port, number - 1)}
    for name, last in ends.items():
        if last > 65535:
            return f"{ours}, and {name} leaves no ports for them: the last would be {last}"
    if engine.port and gateway_port and abs(engine.port - gateway_port) < number:
        return f"{ours}, so engine.port and gateway.port take {number} ports each, and these overlap: move one of them"
    if engine.gpus is not None and len(engine.gpus) != number * engine.tensor_parallel_size:
        wanted = number * engine.tensor_parallel_size
        return f"{ours} of {engine.tensor_parallel_size} GPUs each: engine.gpus must name {wanted}"
    return None


def settings_of(engine: EngineConfig, kind: str, *, num_learner_gpus: int) -> list[EngineConfig]:
    """The settings of each replica; `kind`: "cpu" or "cuda". Raises SetupError when there are too few GPUs."""
    number = engine.replicas
    if number == 1:
        return [engine]
    changes: list[dict[str, object]] = [{"replicas": 1, "port": port_of(engine.port, each)} for each in range(number)]
    if kind == "cuda":
        size = engine.tensor_parallel_size
        gpus = engine.gpus or _left_by_learner(visible_gpus(os.environ), number * size, num_learner_gpus)
        for replica, change in enumerate(changes):
            change["gpus"] = gpus[replica * size : (replica + 1) * size]
    elif engine.cpu_threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // number)
        changes = [{**change, "cpu_threads": threads} for change in changes]
    return [engine.model_copy(update=change) for change in changes]


def _left_by_learner(gpus: list[str], wanted: int, num_learner_gpus: int) -> list[str]:
    """The learner's processes take the first ones, by themselves."""
    if len(gpus) < wanted + num_learner_gpus:
        raise SetupError(
            f"the engine's replicas want {wanted} GPUs and the learner {num_learner_gpus}, and {len(gpus)} are visible:"
            " lower engine.replicas, or name the engine's in engine.gpus (a GPU may be named for several)"
        )
    return gpus[num_learner_gpus : num_learner_gpus + wanted]


def visible_gpus(environ: Mapping[str, str], ask: Callable[[], str] | None = None) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them, else their indices; [] = none. `ask` = nvidia-smi's list of indices."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    return (ask or _ask)().split()


def _ask() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""

"""What passes between the runner and a node's worker. Owns data only, all of it plain enough to be pickled, and what
is raised where nothing passes any more.

Both sides are of one version of this package (`NodeFacts.version`), so nothing here is versioned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from harness_trainer.harnesses.base import Harness
from harness_trainer.rollouts.config import RunnerSpec, SourceSpec
from harness_trainer.tasks import Task

# What an attempt says while it runs. box, mint, seal, capture: see `desk`; file: a piece of the archive of its files;
# result: the last word; cancelled: the last word of one that was told to end.
Kind: TypeAlias = Literal["box", "mint", "seal", "capture", "file", "result", "cancelled"]


class WorkerFailed(Exception):
    """The worker's code raised what it should not have."""


class WorkerLost(Exception):
    """The worker is gone, or its node, or the way to it: nothing more comes of what it did."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Where a worker runs. Example: NodeFacts("node3", "7afb..", "net:[4026]", "3.11.9", "0.1.0", 4711)."""

    host: str
    boot_id: str
    network: str  # of the network namespace: loopback is the same only within one
    python: str
    version: str  # of this package
    pid: int


@dataclass(frozen=True, slots=True)
class SourceAgents:
    """One source and the agents of its rollouts, as they are led to the gateway."""

    spec: SourceSpec
    harnesses: dict[str, Harness]  # by name


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker opens, the same on every node. Paths in it are the runner's; the worker has its own."""

    spec: RunnerSpec
    sources: list[SourceAgents]
    tasks: list[tuple[str, Task]]  # name of the source, task; their folders come with `files.Bundle`
    env: dict[str, str] = field(default_factory=dict)  # variables that tasks and sandboxes ask for


@dataclass(frozen=True, slots=True)
class Order:
    """One attempt. Example: Order("g00017-2-5f0c12ab", 17, 0, "", "moon", "opencode", 0.3, None)."""

    rollout_id: str
    group_id: int
    attempt: int
    source: str
    task: str  # name
    harness: str
    queued_s: float
    gateway: str | None  # its public address now; None = there is none, or not now


@dataclass(frozen=True, slots=True)
class Event:
    """Example: Event("mint", 3, (session_id, policy, labels)); the answer bears the number. 0 = none is expected."""

    kind: Kind
    number: int = 0
    payload: Any = None

"""The engine's replicas in a run: each an engine and the gateway before it, watched and held apart from the others.

Owns which gateway may let calls through: one whose own engine runs and has a policy of the run. What each engine is
asked to be is `engine.replicas`'; the parts are `engine` and `gateway` here. Made by `run` and `collect`. A run with
one engine is one with one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness_trainer.errors import SetupError
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.supervision.engine import EnginePart
from harness_trainer.supervision.gateway import Gateway
from harness_trainer.supervision.parts import Part
from harness_trainer.supervision.remote import RemoteHost


@dataclass(frozen=True, slots=True)
class Entrance:
    """`agents_socket` is where the gateway listens for sealed containers; None = nowhere."""

    gateway: Gateway
    agents_socket: Path | None


@dataclass(frozen=True, slots=True)
class Replica(Entrance):
    """`part` is the engine's."""

    engine: EnginePart
    part: Part


def release_served(replicas: Sequence[Replica], store: RolloutStore) -> None:
    """Let calls through to the engines that have a policy. Called at every look at the run."""
    serving = store.serving(len(replicas))
    for replica in replicas:
        if replica.part.running and replica.engine.replica in serving:
            replica.gateway.release()


def require_one_in_containers(num_replicas: int) -> None:
    """Raises SetupError where engine and gateway run in containers of their own, which hold one of each."""
    if num_replicas > 1 and RemoteHost.find("engine") is not None:
        raise SetupError(
            f"engine.replicas is {num_replicas}, and compose.yaml has one container for the engine and one for the"
            " gateway: leave it at 1 there, or run `harness-trainer train` on the machine itself"
        )

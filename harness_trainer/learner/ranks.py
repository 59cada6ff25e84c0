"""The learner's processes among themselves: what the main one hands out, gathers and says while the others wait.

One of them, the main process (rank 0), knows the groups, the store and the engine; the others compute their share of
each step. Owns the messages between them; `rank_watch` sees to it that none outlives another. `train` and `trl_compat`
use it; `rank_watch` makes one for the learner process. With a single process every method answers at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from harness_trainer.errors import SetupError

T = TypeVar("T")

_BEAT_S = 5.0  # between two words of the main process to those that wait for their share


class Ranks:
    """This process among its peers. Example of two: Ranks(group) with rank 1 and size 2; `Ranks()` is alone."""

    def __init__(self, group: Any = None) -> None:
        """`group` is a gloo group of all processes: it moves Python objects, whatever moves the gradients."""
        self._group = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.size: int = 1 if group is None else dist.get_world_size(group)
        self._last_word = time.monotonic()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def hand_out(self, shares: Sequence[T]) -> T:
        """Main process only: give each process its share, in the order of their ranks; the main process's own."""
        self._scatter([(share,) for share in shares])
        return shares[0]

    def keep_waiting(self) -> None:
        """Main process only, every few seconds while it waits itself: the others' limit starts anew."""
        if time.monotonic() - self._last_word > _BEAT_S:
            self._scatter([None] * self.size)

    def take(self) -> Any:
        """What the main process hands out next; waits as long as it says that it is there."""
        while True:
            found: list[Any] = [None]
            dist.scatter_object_list(found, None, src=0, group=self._group)
            if found[0] is not None:
                return found[0][0]

    def gather(self, item: T) -> list[T]:
        """What each process gave, in the order of their ranks, to all of them."""
        if self._group is None:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self._group)
        return items

    def _scatter(self, messages: list[Any]) -> None:
        if self._group is not None:
            found: list[Any] = [None]
            dist.scatter_object_list(found, messages, src=0, group=self._group)
        self._last_word = time.monotonic()


def join(num_processes: int, *, cpu: bool, timeout_s: float) -> Ranks:
    """Meet the other processes of the launch that this one is of; each call on them fails after `timeout_s`.

    Accelerate chooses what moves the gradients, as the trainer would; what is made here it will find. Raises SetupError
    when this process was not launched as one of so many.
    """
    if num_processes == 1:
        return Ranks()
    if os.environ.get("WORLD_SIZE") != str(num_processes):
        raise SetupError(
            f"learner.num_processes is {num_processes}, but this process was launched as one of"
            f" {os.environ.get('WORLD_SIZE', '1')}: start it by python -m harness_trainer.learner.launch"
        )
    from accelerate import PartialState

    timeout = timedelta(seconds=timeout_s)
    PartialState(cpu=cpu, timeout=timeout)
    return Ranks(dist.new_group(backend="gloo", timeout=timeout))


def shard_on_cpu_too() -> None:
    """Before a trainer is made: Accelerate turns its FSDP plug-in on for GPUs only, and FSDP2 knows no such limit."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState._shared_state
    asked_for = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked_for and state.get("distributed_type") == DistributedType.MULTI_CPU:
        state["distributed_type"] = DistributedType.MULTI_GPU  # what the plug-in is looked for under; the device stays

"""Weights to every replica of the engine: written once, loaded by all of them at the same time.

Owns what the replicas share of an update and what each has of its own; sending to one engine is `weight_transfer`'s and
`adapter_transfer`'s, who is there `replicas`'. Each replica samples again as soon as it has the version, and is not
paused for the others. Made by `transfers`; the trainer calls it as it does a transfer to one engine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.adapter_transfer import AdapterTransfer
from harness_trainer.learner.engine_calls import version_name
from harness_trainer.learner.replicas import Replicas
from harness_trainer.learner.weight_transfer import ShmWeightTransfer

if TYPE_CHECKING:
    import torch

T = TypeVar("T", ShmWeightTransfer, AdapterTransfer)


class _Replicated(Generic[T]):
    """`make` gives the transfer to the replica of that number at that address."""

    def __init__(
        self,
        replicas: Replicas,
        make: Callable[[int, str], T],
        *,
        announce: Callable[[int], None] = lambda version: None,
    ) -> None:
        self._replicas = replicas
        self._make: Callable[[int, str], T] = make
        self._announce = announce
        self._transfers: dict[int, T] = {}
        self._greeted: dict[int, int] = {}  # replica -> number of the engine that was told of us

    @property
    def last_timings(self) -> dict[str, float]:
        """Seconds of each phase of the latest sync, of the replica that took longest."""
        found: dict[str, float] = {}
        for transfer in self._transfers.values():
            for phase, seconds in transfer.last_timings.items():
                found[phase] = max(seconds, found.get(phase, 0.0))
        return found

    def next_version(self, version: int) -> None:
        self._announce(version)

    def compare_next(self) -> None:
        for transfer in self._transfers.values():
            transfer.compare_next()

    def init_weight_transfer(self) -> None:
        """Say hello to those that were not told yet: at the start all, later those that have come back."""
        there = self._replicas.present()
        for replica in there:
            if replica not in self._transfers:
                self._transfers[replica] = self._make(replica, self._replicas.url(replica))
        self._replicas.each([one for one in there if not self._is_greeted(one)], self._greet)

    def resume(self) -> None:
        """Each was resumed when it had the weights."""

    def destroy(self) -> None:
        """Close the connections; idempotent."""
        for transfer in self._transfers.values():
            transfer.destroy()

    def _targets(self, version: int) -> list[int]:
        self.init_weight_transfer()
        # One that came back since the line above has not been told of us: it is sent the version next time.
        return [replica for replica in self._replicas.lacking(version) if self._is_greeted(replica)]

    def _is_greeted(self, replica: int) -> bool:
        return self._greeted.get(replica) == self._replicas.number(replica)

    def _greet(self, replica: int) -> None:
        number = self._replicas.number(replica)
        self._transfers[replica].init_weight_transfer()
        self._greeted[replica] = number


class ReplicatedWeights(_Replicated[ShmWeightTransfer]):
    """TRL's `WeightTransferProtocol`, as `ShmWeightTransfer`."""

    _version: int | None = None

    def next_version(self, version: int) -> None:
        """Say which policy version the next `send_weights` publishes. Call it before each sync."""
        super().next_version(version)
        self._version = version

    def pause(self) -> None:
        """As `ShmWeightTransfer`: an engine is paused when the weights are written."""
        for transfer in self._transfers.values():
            transfer.pause()

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish to every replica that lacks the version. Raises TrainingFailed when one that lives refuses it."""
        if self._version is None:
            raise TrainingFailed("next_version() must name the policy version before its weights are sent")
        version, self._version = self._version, None
        targets = self._targets(version)
        if not targets:
            return
        name, writer = version_name(version), self._transfers[targets[0]]
        file, names = writer.write(iterator)
        try:
            for replica in targets:
                self._transfers[replica].check.compare_as(writer.check)

            def deliver(replica: int) -> None:
                self._transfers[replica].load(file, names, name)
                self._transfers[replica].resume()

            self._replicas.has(version, self._replicas.each(targets, deliver))
            writer.keep(file, name)
        finally:
            file.unlink(missing_ok=True)


class ReplicatedAdapters(_Replicated[AdapterTransfer]):
    """As `AdapterTransfer`. Each replica has its files to itself: one may still read what another has given back."""

    def __init__(
        self,
        replicas: Replicas,
        make: Callable[[int, str], AdapterTransfer],
        *,
        directory: Path,
        announce: Callable[[int], None] = lambda version: None,
    ) -> None:
        super().__init__(replicas, make, announce=announce)
        self._directory = directory.absolute()

    def folder_of(self, version: int) -> Path:
        """Where the adapter of `version` is to be written before `publish`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory / version_name(version)

    def pause(self) -> None:
        """Nothing is paused."""

    def publish(self, version: int) -> None:
        """Serve the adapter in `folder_of(version)` from every replica that lacks it."""
        written = self.folder_of(version)
        for transfer in self._transfers.values():
            transfer.last_timings = {}

        def deliver(replica: int) -> None:
            own = self._transfers[replica].folder_of(version)
            shutil.rmtree(own, ignore_errors=True)  # of an engine that has died
            shutil.copytree(written, own, copy_function=os.link)
            self._transfers[replica].publish(version)

        self._replicas.has(version, self._replicas.each(self._targets(version), deliver))
        shutil.rmtree(written, ignore_errors=True)

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise TrainingFailed("weight_sync lora sends adapters only: use weight_sync shm for whole weights")

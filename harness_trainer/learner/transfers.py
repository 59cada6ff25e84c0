"""The weight transfer that a config asks for. Owns the choice only; called by the learner process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness_trainer.errors import ConfigError
from harness_trainer.learner.adapter_transfer import AdapterTransfer
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.nccl_transfer import NcclWeightTransfer
from harness_trainer.learner.replicas import Replicas
from harness_trainer.learner.replicated import ReplicatedAdapters, ReplicatedWeights
from harness_trainer.learner.sync_config import LoraSync, NcclSync
from harness_trainer.learner.weight_transfer import ShmWeightTransfer


def make_replicated(
    config: LearnerConfig,
    replicas: Replicas,
    *,
    directory: Path,
    keep_weights: Path | None,
    announce: Callable[[int], None],
    fallback_dir: Path | None = None,
) -> ReplicatedWeights | ReplicatedAdapters:
    """The same for several replicas of the engine. Raises ConfigError."""
    if isinstance(config.weight_sync, NcclSync):
        raise ConfigError("weight_sync nccl reaches one engine only: use shm or lora, or one of engine.replicas")
    if isinstance(config.weight_sync, LoraSync):
        if keep_weights is not None:
            raise ConfigError("keep_weights keeps what weight_sync shm writes; with weight_sync lora leave it out")
        folder = directory / "adapters"
        return ReplicatedAdapters(
            replicas,
            lambda replica, url: AdapterTransfer(url, directory=folder / f"replica-{replica}"),
            directory=folder / "written",
            announce=announce,
        )
    return ReplicatedWeights(
        replicas,
        lambda replica, url: ShmWeightTransfer(
            url, directory=directory, keep_dir=keep_weights, fallback_dir=fallback_dir, verify=config.verify_sync
        ),
        announce=announce,
    )


def make_transfer(
    config: LearnerConfig,
    engine_url: str,
    *,
    directory: Path,
    keep_weights: Path | None,
    announce: Callable[[int], None],
    fallback_dir: Path | None = None,
) -> ShmWeightTransfer | NcclWeightTransfer | AdapterTransfer:
    """`directory`, and `fallback_dir` where that is too small, are seen by trainer and engine; `keep_weights` is as in
    the run's config. Raises ConfigError.
    """
    kind = config.weight_sync
    if keep_weights is not None and kind.type != "shm":
        raise ConfigError(f"keep_weights keeps what weight_sync shm writes; with weight_sync {kind.type} leave it out")
    if isinstance(kind, NcclSync):
        from harness_trainer.learner.trl_compat import nccl_client

        return NcclWeightTransfer(
            engine_url,
            nccl_client,
            verify=config.verify_sync,
            announce=announce,
            transfer_timeout_s=kind.transfer_timeout_s,
        )
    if isinstance(kind, LoraSync):
        return AdapterTransfer(engine_url, directory=directory / "adapters", announce=announce)
    return ShmWeightTransfer(
        engine_url,
        directory=directory,
        keep_dir=keep_weights,
        fallback_dir=fallback_dir,
        verify=config.verify_sync,
        announce=announce,
    )

"""LoRA adapters to the engine, each version under a name of its own: nothing is overwritten, so nothing is paused.

Owns loading a version, making sure that it is served, and unloading old ones once no call uses them. The files are
written by `trl_compat`, which calls `publish`. A call names its adapter for its whole length (the gateway asks for the
newest), so no token is ever of two policies; version n is the model name `v<n>`.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.engine_calls import EngineCalls, version_name

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_NAME = re.compile(r"v(\d+)")
# vLLM's gauge of which adapters its running and waiting requests use.
_GAUGE = "vllm:lora_requests_info{"
_LABEL = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')
_KEPT = 2  # the newest, and the one before: a call may have chosen it a moment ago
_ADVICE = "is it started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1?"


class AdapterTransfer:
    """TRL's `WeightTransferProtocol`, plus `publish`. Errors are TrainingFailed with the engine's own text.

    `directory` must be seen by the engine under the same path; whoever made it removes it.
    """

    def __init__(
        self,
        base_url: str,
        *,
        directory: Path,
        announce: Callable[[int], None] = lambda version: None,
        control_timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        cleanup_timeout_s: float = 10.0,
    ) -> None:
        self.last_timings: dict[str, float] = {}  # seconds: load of the latest sync
        self._directory = directory.absolute()
        self._announce = announce
        self._load_s = load_timeout_s
        self._engine = EngineCalls(base_url, control_timeout_s=control_timeout_s, cleanup_timeout_s=cleanup_timeout_s)
        self._unloaded: list[str] = []  # their files go one sync later: the engine reads them when it first needs them

    def next_version(self, version: int) -> None:
        self._announce(version)

    def compare_next(self) -> None:
        """Nothing to compare."""
        logger.info("adapters are not compared: the engine reads the very files, each version under a name of its own")

    def folder_of(self, version: int) -> Path:
        """Where the adapter of `version` is to be written before `publish`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory / version_name(version)

    def init_weight_transfer(self) -> None:
        """Free an engine that an earlier trainer left paused."""
        self._engine.post("resume")

    def publish(self, version: int) -> None:
        """Serve the adapter in `folder_of(version)`, and take back older ones that no call uses."""
        name, folder = version_name(version), self.folder_of(version)
        began = time.monotonic()
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": False}
        try:
            self._engine.post_text("v1/load_lora_adapter", body, self._load_s)
        except TrainingFailed as error:
            advice = f"; {_ADVICE}" if "with 404" in str(error) and "Loading lora" not in str(error) else ""
            raise TrainingFailed(f"loading adapter {name} failed: {error}{advice}") from error
        served = self._served()
        if served.get(name) != str(folder):
            raise TrainingFailed(f"the engine does not serve adapter {name} from {folder} after loading it")
        self.last_timings = {"load": time.monotonic() - began}
        self._take_back(version, served)

    def _served(self) -> dict[str, str]:
        """Path by name of the adapters that the engine serves."""
        models: list[dict[str, Any]] = self._engine.get("v1/models").get("data") or []
        return {str(m["id"]): str(m.get("root")) for m in models if m.get("parent") and _NAME.fullmatch(str(m["id"]))}

    def _take_back(self, newest: int, served: Iterable[str]) -> None:
        """Never a reason to end a run: what cannot be unloaded now is tried again at the next version."""
        for name in self._unloaded:
            shutil.rmtree(self._directory / name, ignore_errors=True)
        self._unloaded = []
        try:
            in_use = self._in_use()
            for name in served:
                if int(name[1:]) <= newest - _KEPT and name not in in_use:
                    self._engine.post_text("v1/unload_lora_adapter", {"lora_name": name})
                    self._unloaded.append(name)
        except TrainingFailed as error:
            logger.warning("old adapters stay loaded for now: %s", error)

    def _in_use(self) -> set[str]:
        """Names in the gauge's newest line: vLLM adds a line for each combination that it has seen, valued by time."""
        text = self._engine.get_text("metrics")
        lines = [line for line in text.splitlines() if line.startswith(_GAUGE)]
        if not lines:
            return set()
        newest = max(lines, key=lambda line: float(line.rpartition(" ")[2]))
        return {name for found in _LABEL.findall(newest) for name in found.split(",") if name}

    def pause(self) -> None:
        """Nothing to pause: calls in flight keep their adapter."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise TrainingFailed("weight_sync lora sends adapters only: use weight_sync shm or nccl for whole weights")

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """Close the connection; idempotent."""
        self._engine.close()

"""Weight transfer by NCCL, through TRL's own client: trainer and engine on different GPUs.

Owns what TRL's client leaves out: the version's name, a limit on the join of a collective that has none, closing a
half-open update and resuming the engine on every path, and errors of ours. The transfer itself is TRL's and vLLM's
(`trl_compat.nccl_client` builds the client). TRL's trainer calls it through its `WeightTransferProtocol`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from harness_trainer.errors import HarnessTrainerError, TrainingFailed
from harness_trainer.learner.engine_calls import EngineCalls, version_name, within
from harness_trainer.learner.sync_config import VerifySync
from harness_trainer.learner.weight_check import WeightCheck

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# names, dtype_names and shapes of everything that `send_weights` will be given, in the same order.
Manifest = dict[str, list[Any]]


class NcclClient(Protocol):
    """The part of TRL's `WeightTransferClient` that is used; it pauses and resumes nothing by itself."""

    def init_weight_transfer(self) -> None: ...

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def destroy(self) -> None: ...


class NcclWeightTransfer:
    """TRL's `WeightTransferProtocol` over TRL's NCCL client. `describe` must be called once before anything else.

    A failed handshake or transfer leaves a thread of the client in NCCL, which cannot be interrupted: the run ends with
    the error, and the thread with the process.
    """

    def __init__(
        self,
        base_url: str,
        make_client: Callable[[str, Manifest, float], NcclClient],
        *,
        verify: VerifySync = "never",
        announce: Callable[[int], None] = lambda version: None,
        transfer_timeout_s: float = 1800.0,
        control_timeout_s: float = 60.0,
        cleanup_timeout_s: float = 10.0,
    ) -> None:
        self.last_timings: dict[str, float] = {}  # seconds: pause, transfer, verify, resume of the latest sync
        self._make_client = make_client
        self._announce = announce
        self._transfer_s = transfer_timeout_s
        self._engine = EngineCalls(base_url, control_timeout_s=control_timeout_s, cleanup_timeout_s=cleanup_timeout_s)
        self.check = WeightCheck(self._engine, verify)
        self._client: NcclClient | None = None
        self._version: int | None = None

    def describe(self, manifest: Manifest) -> None:
        """What will be sent; the engine sizes its buffers by it."""
        self._client = self._make_client(self._engine.base_url, manifest, self._transfer_s)

    def next_version(self, version: int) -> None:
        self._announce(version)
        self._version = version

    def compare_next(self) -> None:
        """Have the next update compared with the engine's weights, whatever `verify` says."""
        self.check.due = True

    def init_weight_transfer(self) -> None:
        """Free an engine that an earlier trainer left paused or half updated, then join it in a group.

        A paused one may hold weights of two policies: until the first update nothing it samples is trained on.
        """
        if self._engine.get("is_paused").get("is_paused"):
            left = self._engine.recover("unfinished")
            if left:
                raise TrainingFailed(f"an earlier learner left the engine in the middle of an update{left}")
        self._bounded("the engine did not join the NCCL group", self._ready().init_weight_transfer)

    def pause(self) -> None:
        """Before the weights are gathered: sending and receiving are one step."""
        began = time.monotonic()
        try:
            self._engine.pause()
        except Exception as error:
            raise TrainingFailed(f"pausing the engine failed: {error}{self._engine.recover()}") from error
        self.last_timings = {"pause": time.monotonic() - began}

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights as the version given to `next_version`. Raises TrainingFailed; the engine runs again."""
        if self._version is None:
            raise TrainingFailed("next_version() must name the policy version before its weights are sent")
        version, self._version = version_name(self._version), None
        sample = self.check.watch(iterator)
        began = time.monotonic()
        try:
            self._bounded("the weights were not sent", lambda: self._ready().send_weights(sample))
            # TRL's client ends the update without a name. Nothing is sampled meanwhile: the engine is paused.
            self._engine.post("update_weight_version", {"new_version": version})
            self._engine.confirm(version)
            sent = time.monotonic()
            if self.check.due:
                self.check.run()
            self.last_timings |= {"transfer": sent - began, "verify": time.monotonic() - sent}
        except Exception as error:
            left = self._engine.recover(version)
            raise TrainingFailed(f"sending weights {version} failed: {error}{left}") from error
        except BaseException:
            self._engine.recover(version)
            raise

    def resume(self) -> None:
        began = time.monotonic()
        self._engine.resume()
        self.last_timings["resume"] = time.monotonic() - began

    def destroy(self) -> None:
        """Leave the group and close the connection; idempotent."""
        if self._client is not None:
            self._client.destroy()
        self._engine.close()

    def _ready(self) -> NcclClient:
        if self._client is None:
            raise TrainingFailed("describe() must say what is sent before the engine is joined")
        return self._client

    def _bounded(self, what: str, work: Callable[[], None]) -> None:
        try:
            within(self._transfer_s, what, work)
        except HarnessTrainerError:
            raise
        except Exception as error:
            # TRL wraps the engine's answer in advice of its own; both are wanted, in one line.
            reasons = [str(error), *([str(error.__cause__)] if error.__cause__ else [])]
            raise TrainingFailed(" ".join(": ".join(reasons).split())) from error

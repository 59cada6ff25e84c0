"""What the trainer may ask every worker of the engine directly, beside vLLM's own calls.

Owns one method, which vLLM mixes into its worker class (`--worker-extension-cls`) and offers as `/collective_rpc`.
Called by `learner.weight_check`. It runs inside vLLM's workers, like `shm_engine`.
"""

from __future__ import annotations

import json
from typing import Any

from harness_trainer.engine.digests import LOADED, RECEIVED, UNSEEN, digest, loaded_part


class DigestExtension:
    """Reads what this worker's model holds. Nothing in here changes a weight."""

    def harness_digests(self, shapes: str) -> dict[str, dict[str, str]]:
        """The digest of each tensor and what it proves; a tensor that is neither held whole nor was received is left
        out, or said to be unseen where the transfer keeps nothing of what it receives.

        `shapes` is JSON, because the endpoint passes strings only: names and shapes as in the checkpoint.
        Example: '{"model.norm.weight": [128]}' gives
        {"model.norm.weight": {"digest": "9f86d0...", "of": "loaded", "dtype": "float32"}}.
        """
        worker: Any = self
        received: Any = getattr(worker.weight_transfer_engine, "received", None)
        model, dtype = worker.model_runner.get_model(), worker.model_config.dtype
        whole = worker.parallel_config.world_size == 1
        found = {}
        for name, shape in json.loads(shapes).items():
            part, of = (loaded_part(model, name, tuple(shape)) if whole else None), LOADED
            if part is None and received is None:
                found[name] = {"of": UNSEEN}
            elif part is None and name in received:
                part, of = received[name].part, RECEIVED
            if part is not None:
                found[name] = {"digest": digest(part, dtype), "of": of, "dtype": str(dtype).removeprefix("torch.")}
        return found

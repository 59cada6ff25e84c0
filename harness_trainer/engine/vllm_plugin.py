"""What vLLM imports at start-up, in the engine's own environment: registers our weight transfer, nothing else.

Owns the name of the transfer. Must import nothing heavy and nothing of the project's other packages: only the standard
library, vLLM, torch and safetensors exist where it runs. Called through the entry point `vllm.general_plugins`, once in
each of vLLM's processes.
"""

from __future__ import annotations

BACKEND = "shm"
PLUGIN = "harness_trainer_shm"  # of this module in pyproject.toml, as VLLM_PLUGINS knows it


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "shm"}'` known. vLLM may call it more than once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "harness_trainer.engine.shm_engine", "ShmWeightTransferEngine"
        )

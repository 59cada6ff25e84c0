"""The engines that sample. Import the module you need: `vllm` (real), `scripted` (deterministic, ships for tests)."""

"""Turns a GGUF file into a Transformers folder: `python -m harness_trainer.engine.convert FILE FOLDER`.

Owns the conversion only. A program of its own, started by `prepare`: it needs torch and a gigabyte of memory for twenty
seconds, and whoever supervises a run should hold neither for hours.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, target: Path) -> None:
    """Write the dequantised float32 weights and the tokenizer of `gguf` to the new folder `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 by now, yet the library refuses to save what is still marked as quantised.
    for holder, names in (
        (model, ("hf_quantizer", "quantization_method", "is_quantized")),
        (model.config, ("quantization_config", "_is_quantized")),
    ):
        for name in names:
            if name in vars(holder):
                delattr(holder, name)
    model.config._name_or_path = gguf.stem
    model.save_pretrained(target)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.chat_template = None
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

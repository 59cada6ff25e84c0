"""A tiny random model with a real byte-level tokenizer, made in a second without any download."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from harness_trainer.engine.prepare import ModelInfo, describe_model

TEMPLATE = Path(__file__).parents[2] / "harness_trainer" / "engine" / "smollm2_chat_template.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = [
    "You are a coding agent. To call a tool, answer with a tool call and its arguments.",
    '<tool_call>\n{"name": "write", "arguments": {"path": "poem.txt", "content": "a quiet pond"}}\n</tool_call>',
    '<tools>\n{"name": "bash", "description": "Run it", "parameters": {"command": {"type": "string"}}}\n</tools>',
    "<tool_response>\nwrote 12 bytes\n</tool_response> the quick brown fox jumps over the lazy dog 0123456789",
]


def make_tokenizer(path: Path) -> None:
    """Train a 512-token byte-level BPE and save it with ChatML's special tokens and our chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    fast.save_pretrained(path)
    shutil.copyfile(TEMPLATE, path / "chat_template.jinja")


def make_tiny_model(path: Path, *, family: Literal["llama", "qwen3"] = "llama", tied: bool = True) -> ModelInfo:
    """Two layers, random float32 weights wide enough that the distribution is far from uniform (0.5M parameters)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    make_tokenizer(path)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**sizes))
    model.to(torch.float32).save_pretrained(path)
    return describe_model(path, f"tiny-{family}")

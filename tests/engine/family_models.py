"""Tiny random models with the real tokenizers of four families, for a real vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from harness_trainer.engine.prepare import ModelInfo, describe_model

WINDOW = 16384


def make_family_model(name: str, tokenizer: Path, path: Path) -> ModelInfo:
    """Two layers, random float32 weights. `name` "gpt_oss" and "qwen3" get their own architecture, others Llama's."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    path.mkdir(parents=True)
    shutil.copyfile(tokenizer / "tokenizer.json", path / "tokenizer.json")
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    if config.get("tokenizer_class") == "LlamaTokenizerFast":
        # DeepSeek's copy on npm says so; the engine's transformers then takes its byte-level vocabulary for Llama 2's.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = AutoTokenizer.from_pretrained(path)
    sizes = {
        "vocab_size": (len(loaded) + 63) // 64 * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": WINDOW,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": loaded.bos_token_id,
        "eos_token_id": loaded.eos_token_id,
        "pad_token_id": loaded.pad_token_id,
        "dtype": "float32",
    }
    torch.manual_seed(0)
    if name == "qwen3":
        model: torch.nn.Module = Qwen3ForCausalLM(Qwen3Config(**sizes))
    elif name == "gpt_oss":
        from transformers import GptOssConfig, GptOssForCausalLM

        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1, "eos_token_id": [200002, 200012]}
        sizes |= {"layer_types": ["full_attention", "full_attention"], "rope_parameters": None}
        model = GptOssForCausalLM(GptOssConfig(**{k: v for k, v in sizes.items() if v is not None}))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.to(torch.float32).save_pretrained(path)
    return describe_model(path, f"tiny-{name}")

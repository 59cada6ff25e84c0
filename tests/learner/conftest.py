"""A tiny real language model on disk, built once: two layers, a hundred words, random weights."""

from pathlib import Path

import pytest

VOCAB = 100


@pytest.fixture(scope="session")
def few_threads():
    """Tiny tensors: starting threads costs more than it saves."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _build_model(folder: Path, *, family="llama", tie=True, seed=0, **changes):
    """Save a random model and a word-level tokenizer to `folder`."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    }[family]
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
        # Large enough that distributions are far from uniform and an error is seen.
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    model_class(config_class(**(fields | changes))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def build_model(few_threads):
    """The builder itself, for tests that need another family or another head."""
    return _build_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, build_model):
    return build_model(tmp_path_factory.mktemp("tiny"))

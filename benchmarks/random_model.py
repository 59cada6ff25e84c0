"""A Llama of a given size with random weights and a byte-level tokenizer, on disk: for what must not depend on a model.

Owns building it. Its 512 ids hold the scripted engines' (a byte each, role markers above). Used by `asynchrony`,
`step_overhead` and `weight_sync`.
"""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512


def build(folder: Path, *, hidden: int, layers: int) -> int:
    """Save model and tokenizer to `folder`; the number of parameters. Imports torch and transformers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*alphabet, "<|pad|>", "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=words["<|end|>"],
        eos_token_id=words["<|end|>"],
        pad_token_id=words["<|pad|>"],
    )
    torch.manual_seed(0)
    logging.disable_progress_bar()
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    return int(model.num_parameters())

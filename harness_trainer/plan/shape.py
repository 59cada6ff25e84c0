"""What a model's config says of its size: parameters, layers, heads. No weights are read and nothing is computed.

Owns the counting. `config.json` is read by transformers and the model is built without memory (on the "meta" device),
so that the counts are those of the very classes that train it; of an architecture that transformers does not know, only
what the file itself says is known, and the rest is None. Called by `plan`; imports transformers on use (5 s).
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness_trainer.engine.prepare import checkpoint_shapes, model_config
from harness_trainer.errors import ConfigError, SetupError

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Counts in elements, not bytes; None = not known. Example: SmolLM2-135M has parameters=134_515_008."""

    name: str
    parameters: int | None = None  # a tied head counted once
    active: int | None = None  # of a mixture of experts, those one token goes through; else all
    embedding: int | None = None  # input embedding: looked up, not multiplied (unless it is the head too)
    head: int | None = None  # vocabulary x hidden, tied or not
    tied: bool = False
    largest_layer: int | None = None  # parameters of the largest decoder layer
    factored: int | None = None  # rows + columns of every matrix: what Adafactor keeps
    num_layers: int | None = None
    hidden: int | None = None
    vocabulary: int | None = None
    query: int | None = None  # heads x head size
    key_value: int | None = None  # key (or value) heads x head size
    intermediate: int | None = None  # width of one token's MLP: of its experts together in a mixture
    normed_heads: bool = False  # query and key pass a norm of their own, as in Qwen3
    window: int | None = None  # tokens the model was made for
    full_layers: int | None = None  # layers that keep keys and values of all tokens
    sliding_layers: int = 0  # layers that keep `sliding_window` tokens
    sliding_window: int | None = None
    cached: int | None = None  # elements a full layer keeps of one token
    linear: dict[str, tuple[int, int]] = field(default_factory=dict)  # (in + out, layers) by name, for an adapter
    unknown: tuple[str, ...] = ()  # what is not known, in words

    @property
    def matmul(self) -> int | None:
        """Parameters that a token is multiplied with in a forward pass."""
        if self.active is None or self.embedding is None:
            return None
        return self.active if self.tied else self.active - self.embedding

    def adapter(self, rank: int, targets: list[str] | str) -> int | None:
        """Parameters of a low-rank adapter: rank x (in + out) of each layer that gets one."""
        if not self.linear:
            return None
        names = self.linear if targets == "all-linear" else [n for n in self.linear if n in targets]
        return rank * sum(self.linear[name][0] for name in names) or None


def read_shape(model: str) -> ModelShape:
    """`model`: a folder with config.json (weights or not), or a Hugging Face id, of which config.json is fetched.

    Raises ConfigError for what is no model, SetupError where the Hub cannot be asked.
    """
    from transformers import AutoConfig

    folder = Path(model).expanduser()
    raw = _raw(folder) if folder.is_dir() else {}
    try:
        config = AutoConfig.from_pretrained(str(folder) if raw else model)
    except (ValueError, KeyError) as error:
        if raw:
            return _from_file(model, folder, raw)
        raise ConfigError(f"model {model!r}: {_line(error)}; give a folder with its config.json") from None
    except OSError as error:
        raise SetupError(
            f"the config of model {model!r} cannot be had ({_line(error)}): give a folder with its config.json"
        ) from None
    return _counted(model, config)


def _raw(folder: Path) -> dict[str, Any]:
    data = model_config(folder)
    if not data:
        raise ConfigError(f"{folder / 'config.json'} has no settings in it; give a model folder")
    return data


def _from_file(name: str, folder: Path, raw: dict[str, Any]) -> ModelShape:
    """Of an architecture that transformers does not know: the usual names in the file, and the weights' own shapes."""
    text = raw.get("text_config") or raw
    shapes = checkpoint_shapes(folder)
    parameters = sum(_product(shape) for shape in shapes.values()) or None
    about = f"the architecture ({raw.get('model_type', 'no model_type')}) is none that this transformers knows"
    missing = [about, "what a token keeps for the backward pass, and what an adapter adds"]
    if parameters is None:
        missing.append("the number of parameters (there are no *.safetensors beside config.json)")
    vocabulary, hidden = text.get("vocab_size"), text.get("hidden_size")
    head = vocabulary * hidden if vocabulary and hidden else None
    return ModelShape(
        name=name,
        parameters=parameters,
        head=head,
        num_layers=text.get("num_hidden_layers"),
        hidden=hidden,
        vocabulary=vocabulary,
        window=text.get("max_position_embeddings"),
        unknown=tuple(missing),
    )


def _counted(name: str, config: Any) -> ModelShape:
    text = config.get_text_config()
    model = _on_meta(config)
    tied = bool(getattr(text, "tie_word_embeddings", False))
    unknown: list[str] = []
    counts: dict[str, Any] = {}
    if model is None:
        unknown.append(f"the number of parameters (transformers has no causal model of {config.model_type})")
    else:
        counts = _parameters(model, tied, text)
    kept = _caches(text)
    if kept["full_layers"] is None or kept["cached"] is None:
        unknown.append("what the engine keeps of a token (layers that are neither full nor sliding attention)")
    query, key_value = _heads(text)
    return ModelShape(
        name=name,
        tied=tied,
        num_layers=getattr(text, "num_hidden_layers", None),
        hidden=getattr(text, "hidden_size", None),
        vocabulary=getattr(text, "vocab_size", None),
        query=query,
        key_value=key_value,
        intermediate=_intermediate(text),
        window=getattr(text, "max_position_embeddings", None),
        unknown=tuple(unknown),
        **counts,
        **kept,
    )


def _on_meta(config: Any) -> Any:
    """The model without memory; None = transformers has no class for it."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
    except ValueError:
        return None
    return model


def _parameters(model: Any, tied: bool, text: Any) -> dict[str, Any]:
    embedding = int(model.get_input_embeddings().weight.numel())
    output = model.get_output_embeddings()
    head = None if output is None else int(output.weight.numel())
    total = experts = factored = 0
    layers: dict[str, int] = defaultdict(int)
    normed = False
    # Without memory a tied head is a tensor of its own, which is left out here.
    skipped = {id(output.weight)} if tied and output is not None else set()
    for path, parameter in model.named_parameters():
        if id(parameter) in skipped:
            continue
        size = int(parameter.numel())
        total += size
        experts += size if ".experts." in path else 0
        factored += _factored(list(parameter.shape))
        normed = normed or "q_norm" in path
        if found := _LAYER.search(path):
            layers[found.group(1)] += size
    return {
        "parameters": total,
        "active": total - experts + round(experts * _share_of_experts(text)),
        "embedding": embedding,
        "head": head,
        "largest_layer": max(layers.values(), default=None),
        "factored": factored,
        "normed_heads": normed,
        "linear": _linear(model, output),
    }


def _linear(model: Any, output: Any) -> dict[str, tuple[int, int]]:
    """As PEFT finds them for `all-linear`: every plain linear layer but the head."""
    found: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        if type(module).__name__ == "Linear" and module is not output:
            name = path.rsplit(".", 1)[-1]
            size, number = found.get(name, (0, 0))
            found[name] = (size + int(module.in_features) + int(module.out_features), number + 1)
    return found


def _share_of_experts(text: Any) -> float:
    number, used = _num_experts(text)
    return used / number if number and used else 1.0


def _num_experts(text: Any) -> tuple[int | None, int | None]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    number = next((n for n in (getattr(text, name, None) for name in names) if n), None)
    return number, getattr(text, "num_experts_per_tok", None)


def _intermediate(text: Any) -> int | None:
    dense: int | None = getattr(text, "intermediate_size", None)
    number, used = _num_experts(text)
    if not number or not used:
        return dense
    of_one = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    shared += (getattr(text, "n_shared_experts", None) or 0) * (of_one or 0)
    return None if of_one is None else int(used * of_one + shared)


def _heads(text: Any) -> tuple[int | None, int | None]:
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    if not heads or not hidden:
        return None, None
    size = getattr(text, "head_dim", None) or hidden // heads
    return heads * size, (getattr(text, "num_key_value_heads", None) or heads) * size


def _caches(text: Any) -> dict[str, Any]:
    """Layers by what they keep of a token, and how much that is."""
    layers = getattr(text, "num_hidden_layers", None)
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        sliding = layers if window and getattr(text, "use_sliding_window", True) else 0
        full: int | None = None if layers is None else layers - (sliding or 0)
    else:
        sliding = kinds.count(_SLIDING)
        full = kinds.count(_FULL) if set(kinds) <= {_FULL, _SLIDING} else None
    latent = getattr(text, "kv_lora_rank", None)
    if latent:  # multi-head latent attention keeps one compressed vector, and the rotated part of the key
        cached: int | None = latent + (getattr(text, "qk_rope_head_dim", None) or 0)
    else:
        key_value = _heads(text)[1]
        cached = None if key_value is None else 2 * key_value
    return {"full_layers": full, "sliding_layers": sliding or 0, "sliding_window": window, "cached": cached}


def _factored(shape: list[int]) -> int:
    if len(shape) < 2:
        return _product(shape)
    return _product(shape[:-2]) * (shape[-1] + shape[-2])


def _product(shape: list[int]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

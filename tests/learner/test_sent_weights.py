"""What is sent of a model is what its checkpoint holds, tensor for tensor: real small models of each family.

What Transformers writes (`save_pretrained`) is the measure; a checkpoint is read back by the same rule.
"""

import logging
import math

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from harness_trainer.engine.prepare import checkpoint_shapes
from harness_trainer.errors import SetupError
from harness_trainer.learner.flops import nan_where_unknown
from harness_trainer.learner.merge import merge
from harness_trainer.learner.sent_weights import SentWeights
from harness_trainer.learner.sync_config import LoraConfig
from harness_trainer.learner.train import last_checkpoint
from harness_trainer.learner.trl_compat import peft_config, trl_module, trl_utils
from tests.learner.test_train import Run

TEXT = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 1, "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
VISION = {"hidden_size": 32, "intermediate_size": 64}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}

FAMILIES = {
    "Llama": TEXT,
    "Qwen3Moe": {**TEXT, **EXPERTS, "num_experts": 4},
    "Mixtral": {**TEXT, "num_local_experts": 4},
    "Glm4Moe": {**TEXT, **EXPERTS, **GROUPS},
    "DeepseekV3": {**TEXT, **EXPERTS, **GROUPS, **MLA},
    "MiniMaxM2": {**TEXT, "num_experts_per_tok": 2, "num_local_experts": 4},
    "HrmText": TEXT,  # in memory it has three matrices where the checkpoint has one
    "Gemma3": {
        "text_config": TEXT,
        "vision_config": {
            **VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "Qwen2_5_VL": {
        "text_config": {**TEXT, **MROPE},
        "vision_config": {**VISION, "out_hidden_size": 32, "depth": 1, "num_heads": 2},
        "tie_word_embeddings": True,
    },
    # Tied by the whole's config, not by the text's.
    "Qwen3_5": {
        "text_config": {**TEXT, **MROPE},
        "vision_config": {**VISION, "out_hidden_size": 32, "depth": 1, "num_heads": 2},
        "tie_word_embeddings": True,
    },
    "Mistral3": {
        "text_config": TEXT,
        "vision_config": {
            **VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
    },
}  # fmt: skip
UNTRAINABLE = {"GptOss": {**TEXT, "num_local_experts": 2, "num_experts_per_tok": 1}}
NOT_SENT = {"HrmText": {"model.z_L_init"}}  # frozen


def build(family, folder, **changes):
    """A random model of the family on the disk."""
    fields = {**FAMILIES, **UNTRAINABLE}[family]
    config = getattr(transformers, f"{family}Config")(**{**fields, **changes})
    kind = "ForConditionalGeneration" if "text_config" in fields else "ForCausalLM"
    torch.manual_seed(0)
    getattr(transformers, f"{family}{kind}")(config).save_pretrained(folder)


def parameters(model):
    return ((name, tensor.detach()) for name, tensor in trl_module._iter_vllm_named_params(model))


def changed_a_little(model):
    """So that what is sent is seen to be the model's and not the disk's."""
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n in model.state_dict())):
            tensor.add_(torch.rand_like(tensor))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sent_is_what_a_checkpoint_would_hold(family, tmp_path, few_threads):
    build(family, tmp_path / "base")
    model = trl_utils.create_model_from_path(str(tmp_path / "base"), device_map=None, dtype="float32")
    changed_a_little(model)
    sent = SentWeights(model, parameters(model), checkpoint_shapes(tmp_path / "base"))
    stream = dict(sent.stream(model, parameters(model)))
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(checkpoint_shapes(tmp_path / "base"))
    head = stream.keys() - saved.keys()
    assert head <= {"lm_head.weight"}
    assert bool(head) == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert saved.keys() - stream.keys() == NOT_SENT.get(family, set())
    assert all(torch.equal(stream[name], saved[name]) for name in stream.keys() - head)
    assert not head or torch.equal(stream["lm_head.weight"], model.get_input_embeddings().weight)
    assert sent.manifest(model) == {
        "names": list(stream),
        "dtype_names": ["float32"] * len(stream),
        "shapes": [list(tensor.shape) for tensor in stream.values()],
    }


def test_of_a_dense_model_nothing_is_copied(tiny_model):
    model = trl_utils.create_model_from_path(str(tiny_model), device_map=None, dtype="float32")
    sent = SentWeights(model, parameters(model), checkpoint_shapes(tiny_model))
    own = {tensor.data_ptr() for tensor in model.parameters()}
    assert {tensor.data_ptr() for _, tensor in sent.stream(model, parameters(model))} == own


def test_a_buffer_that_the_checkpoint_lacks_is_not_sent(tmp_path, few_threads):
    build("Glm4Moe", tmp_path)
    model = trl_utils.create_model_from_path(str(tmp_path), device_map=None, dtype="float32")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    on_disk = checkpoint_shapes(tmp_path)
    assert bias in dict(SentWeights(model, parameters(model), on_disk).stream(model, parameters(model)))
    del on_disk[bias]
    assert bias not in dict(SentWeights(model, parameters(model), on_disk).stream(model, parameters(model)))


@pytest.mark.parametrize("family", ["Mixtral", "Glm4Moe", "Gemma3"])
def test_with_an_adapter_merged_the_names_are_the_same(family, tmp_path, few_threads):
    build(family, tmp_path / "base")
    base = trl_utils.create_model_from_path(str(tmp_path / "base"), device_map=None, dtype="float32")
    model = peft.get_peft_model(base, peft_config(LoraConfig(rank=2, targets=["q_proj", "o_proj"])))
    changed_a_little(model)
    sent = SentWeights(model, parameters(model), checkpoint_shapes(tmp_path / "base"))
    model.merge_adapter()
    stream = {name: tensor.clone() for name, tensor in sent.stream(model, parameters(model))}
    model.unmerge_adapter()
    manifest = sent.manifest(model)
    model.merge_and_unload().save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert stream.keys() - saved.keys() <= {"lm_head.weight"} and not saved.keys() - stream.keys()
    for name in saved:
        torch.testing.assert_close(stream[name], saved[name], atol=1e-5, rtol=0)
    assert manifest["names"] == list(stream)


@pytest.mark.parametrize("family", ["Mixtral", "Gemma3", "Qwen2_5_VL", "Mistral3"])
def test_the_final_model_of_an_adapter_has_the_base_models_names(family, tmp_path, few_threads):
    """`AutoModelForCausalLM`, asked before, knows neither Qwen2.5-VL nor Mistral 3."""
    build(family, tmp_path / "base")
    base = trl_utils.create_model_from_path(str(tmp_path / "base"), device_map=None, dtype="float32")
    model = peft.get_peft_model(base, peft_config(LoraConfig(rank=2, targets=["q_proj", "o_proj"])))
    adapter_only = [tensor for name, tensor in model.named_parameters() if "lora_" in name]
    with torch.no_grad():
        for tensor in adapter_only:
            tensor.add_(torch.rand_like(tensor))
    model.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert saved.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], saved[name])}
    assert changed and all(("q_proj" in name or "o_proj" in name) for name in changed)
    model.merge_and_unload().save_pretrained(tmp_path / "by_hand")
    by_hand = load_file(tmp_path / "by_hand" / "model.safetensors")
    assert all(torch.equal(saved[name], by_hand[name]) for name in saved)


def with_tokenizer(build_model, family, folder, **changes):
    build_model(folder)
    (folder / "model.safetensors").unlink()
    build(family, folder, tie_word_embeddings=False, **changes)
    return folder


class Sends(Run):
    """Keeps all that is sent, by version; its rollouts are sampled by the base model."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sent = {}
        self.source.policy_changed = self._keep

    def _keep(self, version):
        self.sent[version] = self.transfer.weights
        self.source.versions.append(version)


def test_a_mixture_trains_is_saved_and_goes_on_where_it_was(build_model, tmp_path):
    base = with_tokenizer(build_model, "Qwen3Moe", tmp_path / "base")
    run = Sends(base, tmp_path / "out")
    run.go(max_steps=1, save_steps=1)
    names = set(checkpoint_shapes(base))
    assert set(checkpoint_shapes(last_checkpoint(tmp_path / "out"))) == set(run.transfer.weights) == names
    assert [report.step for report in run.reports] == [1]
    again = Sends(base, tmp_path / "out")
    again.go(max_steps=2, resume_from=last_checkpoint(tmp_path / "out"))
    first, saved = again.sent[3], run.sent[2]
    assert any("experts" in name and not torch.equal(saved[name], run.sent[1][name]) for name in saved)
    assert all(torch.equal(first[name], saved[name]) for name in saved)


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3"])
def test_a_model_that_trl_cannot_estimate_takes_its_step(family, build_model, tmp_path):
    """DeepSeek-V3 also has values of another head size than its queries."""
    run = Sends(with_tokenizer(build_model, family, tmp_path / "base"), tmp_path / "out")
    run.go(max_steps=1, learning_rate=0.0)
    assert run.reports[0].ratio_mean == pytest.approx(1.0, abs=1e-4)


def test_an_adapter_for_modules_that_are_not_there_is_a_setting(tiny_model, tmp_path):
    with pytest.raises(SetupError, match="q_prj"):
        Run(tiny_model, tmp_path).go(lora={"rank": 2, "targets": ["q_prj"]})


def test_an_estimate_that_cannot_be_made_is_unknown_and_said_once(caplog):
    def estimate(config, seq_len):
        return config.num_local_experts * seq_len

    guarded = nan_where_unknown(estimate)
    with caplog.at_level(logging.INFO):
        assert math.isnan(guarded(transformers.LlamaConfig(), 3)) and math.isnan(guarded(transformers.LlamaConfig(), 4))
    assert len(caplog.records) == 1 and "num_local_experts" in caplog.text
    assert guarded(transformers.MixtralConfig(num_local_experts=4), 3) == 12


def test_a_model_that_cannot_be_packed_is_a_setting(build_model, tmp_path):
    with pytest.raises(SetupError, match="cannot be trained here.*sinks"):
        Run(with_tokenizer(build_model, "GptOss", tmp_path / "base"), tmp_path / "out").go()

"""An adapter that is folded into its base model for a weight update leaves no trace in it."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness_trainer.learner.base_weights import base_weights_kept
from tests.learner.test_train import Run


def with_adapter(base, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def base_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_and_unmerging_drifts_and_is_undone(tiny_model, dtype):
    model = with_adapter(tiny_model, dtype)
    before = base_of(model)
    with base_weights_kept(model):
        model.merge_adapter()
        merged = base_of(model)
        model.unmerge_adapter()
        drifted = base_of(model)
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert changed and all(name.endswith(".base_layer.weight") for name in changed)
    assert any(not torch.equal(before[name], drifted[name]) for name in changed)  # else there is nothing to undo
    after = base_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_error_in_the_middle_leaves_the_base_too(tiny_model):
    model = with_adapter(tiny_model, torch.bfloat16)
    before = base_of(model)
    with pytest.raises(ZeroDivisionError), base_weights_kept(model):
        model.merge_adapter()
        raise ZeroDivisionError
    after = base_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_the_engine_gets_in_the_end_is_the_start_plus_the_adapter(tiny_model, tmp_path):
    """Six updates in bfloat16: the last one is bit for bit what the base model and the last adapter make."""
    run = Run(tiny_model, tmp_path / "out")
    run.go(max_steps=5, save_steps=5, dtype="bfloat16", lora={"rank": 4})
    sent = run.transfer.weights
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "checkpoint-5").merge_and_unload()
    merged = model.state_dict()
    assert set(sent) == set(merged)
    assert all(torch.equal(sent[name], merged[name]) for name in sent)

"""A learner that computes another policy than the engine's does not train on in silence."""

import json
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config

from harness_trainer.errors import SetupError
from harness_trainer.learner.same_policy import look, without_dropout
from tests.learner.test_train import Run

GPT2 = GPT2Config(vocab_size=100, n_embd=32, n_head=4, n_layer=2, n_positions=64, initializer_range=0.3)
BLOOM = BloomConfig(vocab_size=100, hidden_size=32, n_head=4, n_layer=2, initializer_range=0.3)


@pytest.fixture
def model_of(build_model, tmp_path):
    def build(config):
        folder = build_model(tmp_path / "model")
        config.update({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1})
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return build


def test_a_model_of_its_own_dropout_trains_without(model_of, tmp_path):
    run = Run(model_of(GPT2), tmp_path / "checkpoints").go(max_steps=1)
    assert run.reports[0].ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert run.reports[0].kl == pytest.approx(0.0, abs=1e-6)
    saved = json.loads((tmp_path / "checkpoints" / "checkpoint-1" / "config.json").read_text())
    assert saved["resid_pdrop"] == 0.1


@pytest.mark.parametrize("config", [GPT2, BLOOM], ids=["modules", "functions"])
def test_nothing_is_random_in_training(config):
    config = type(config)(**{**config.to_dict(), "hidden_dropout": 0.5, "attention_dropout": 0.5})
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(3, 20)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    without_dropout(model)
    assert torch.equal(model(ids).logits, model.eval()(ids).logits)


def test_a_model_that_the_learner_computes_otherwise_ends_the_run_before_its_first_step(model_of, tmp_path):
    """BLOOM's attention is biased by distance, which attention over a tree knows nothing of."""
    run = Run(model_of(BLOOM), tmp_path / "checkpoints")
    with pytest.raises(SetupError, match=r"does not compute .*model as the engine does.*ALiBi"):
        run.go(groups_per_step=45, token_budget=4096)
    assert run.source.versions == [1] and run.reports == []


def seen(difference, *, tokens=1000, staleness=(0, 0), step=1, ends=True):
    """`look` at a step whose tokens all have that difference of log-probabilities."""
    ratio = torch.tensor(difference).exp().item()
    half = tokens / 2  # of two micro-batches
    metrics = {"ratio": [(half * ratio, half)] * 2, "kl": [(half * (ratio - 1 - difference), half)] * 2}
    look(metrics, SimpleNamespace(staleness=list(staleness)), model="m", step=step, ends=ends)


@pytest.mark.parametrize("difference", [-0.7, 0.7])
def test_a_large_difference_ends_at_the_first_step_and_warns_later(difference, caplog):
    with pytest.raises(SetupError, match=re.escape(f"differ by {difference:+.2f} on average")):
        seen(difference)
    seen(difference, step=2)
    assert f"differ by {difference:+.3f} on average" in caplog.text


@pytest.mark.parametrize(
    "step",
    [{"staleness": (0, 1)}, {"staleness": ()}, {"tokens": 20}],
    ids=["off_policy", "no_rows", "too_few_tokens"],
)
def test_a_step_that_proves_nothing_is_left_alone(step, caplog):
    seen(-2.0, **step)
    assert not caplog.records


def test_a_small_difference_only_warns_and_rounding_does_not(caplog):
    seen(-0.02)  # a mixture of experts in bfloat16
    assert not caplog.records
    seen(-0.1)
    seen(-2.0, tokens=100)  # much, of few
    seen(-2.0, ends=False)  # verify_sync never
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3

"""A learner that computes another policy than the engine's does not train on in silence."""

import json
import logging
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config

from harness_trainer.config import RunConfig, may_change
from harness_trainer.errors import SetupError
from harness_trainer.learner.__main__ import _OTHER_POLICY, TellsFirst
from harness_trainer.learner.objective import Terms, objective
from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.learner.same_policy import look, without_dropout
from harness_trainer.rollouts.store import RolloutStore
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


def seen(differences, *, staleness=(0, 0), step=1, ends=True, shaped=False):
    """`look` at a step of two micro-batches whose trained tokens have these differences of log-probabilities."""
    metrics = defaultdict(list)
    for part in torch.as_tensor(differences).chunk(2):
        zeros = torch.zeros(len(part))
        terms = Terms(part, zeros, zeros, zeros, zeros.long(), torch.tensor([float(len(part))]))
        for name, rate in objective(terms, ObjectiveConfig()).rates.items():
            metrics[name].append(tuple(number.item() for number in rate))
    batch = SimpleNamespace(staleness=list(staleness), is_shaped=shaped)
    look(metrics, batch, model="m", step=step, ends=ends)


def each(difference, tokens=1000):
    return [difference] * tokens


@pytest.mark.parametrize("difference", [-0.7, 0.7])
def test_a_large_difference_ends_at_the_first_step_and_warns_later(difference, caplog):
    with pytest.raises(SetupError, match=re.escape(f"differ by {difference:+.2f} on average")):
        seen(each(difference))
    seen(each(difference), step=2)
    assert f"differ by {difference:+.3f} on average" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "step"),
    [(1000, {"staleness": (0, 1)}), (1000, {"staleness": ()}), (20, {})],
    ids=["off_policy", "no_rows", "too_few_tokens"],
)
def test_a_step_that_proves_nothing_is_left_alone(tokens, step, caplog):
    seen(each(-2.0, tokens), **step)
    assert not caplog.records


def test_a_single_extreme_token_hides_nothing_and_is_not_told_as_more_than_it_is(caplog):
    """The ratio of such a token is beyond what a float32 can hold together with the others'."""
    seen([0.0] * 299 + [18.0])  # 0.06 on average
    assert "differ by +0.060 on average" in caplog.text
    with pytest.raises(SetupError, match="differ by -0"):
        seen([-0.7] * 299 + [18.0])


def test_a_person_is_told_of_the_first_warning_once(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    told, logger = TellsFirst(store), logging.getLogger(_OTHER_POLICY)
    logger.addHandler(told)
    try:
        for step in (2, 3):
            seen(each(-0.1), step=step)
    finally:
        logger.removeHandler(told)
    (note,) = store.notes(after=0)
    assert note.kind == "other_policy" and note.detail["line"].startswith("step 2: with the same weights")
    store.close()


def test_a_step_that_was_sampled_under_constraints_warns_only(caplog):
    """What a grammar leaves of the softmax is likely to the engine, and is not to the learner."""
    seen(each(-1.2), shaped=True)
    assert "forced tool_choice" in caplog.text
    with pytest.raises(SetupError, match="or set learner.verify_sync to never$"):
        seen(each(-1.2))
    assert "learner.verify_sync" in may_change(RunConfig())


def test_a_small_difference_only_warns_and_rounding_does_not(caplog):
    seen(each(-0.02))  # a mixture of experts in bfloat16
    assert not caplog.records
    seen(each(-0.1))
    seen(each(-2.0, 100))  # much, of few
    seen(each(-2.0), ends=False)  # verify_sync never
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3

"""Real optimizer steps under every objective: the step taken is the dense gradient, and its report is true."""

import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness_trainer.learner.exactness import recompute_logprobs
from harness_trainer.learner.train import last_checkpoint
from tests.learner.dense_objective import dense_loss
from tests.learner.objectives import OBJECTIVES, config_of
from tests.learner.test_objective_packed import SPLIT, Step
from tests.learner.test_train import PolicySource, Run


class Given(PolicySource):
    """Delivers the groups of one prepared step, again and again."""

    def next_group(self, timeout_s):
        group = self.step.groups[self.next_id % len(self.step.groups)]
        self.next_id += 1
        return group


@pytest.fixture(scope="module")
def start(tiny_model):
    """The weights that training starts from, in double precision."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)


def run_of(tiny_model, folder, start, name, **config):
    run = Run(tiny_model, folder)
    run.source.__class__ = Given
    run.source.step = Step(start, split=SPLIT)
    defaults = {"optimizer": "sgd", "learning_rate": 1.0, "max_grad_norm": 0, "max_staleness": 99}
    return run.go(**({"objective": OBJECTIVES.get(name)} | defaults | config))


@pytest.mark.parametrize(
    ("name", "token_budget"), [*((name, 22) for name in OBJECTIVES), ("default", 256), ("everything", 256)]
)
def test_the_step_taken_is_the_dense_gradient(tiny_model, tmp_path, start, name, token_budget):
    run = run_of(tiny_model, tmp_path, start, name, max_steps=1, token_budget=token_budget)
    start.zero_grad()
    expected = dense_loss(run.source.step.dense(start, start), config_of(name))
    expected.backward()
    (report,) = run.reports
    assert report.loss == pytest.approx(expected.item(), abs=1e-5)
    assert (report.num_micro_batches > 3) == (token_budget < 100)
    gradients = {name: -p.grad for name, p in start.named_parameters()}
    deltas = {n: run.transfer.weights[n] - start.state_dict()[n] for n in gradients}
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    difference = math.sqrt(sum(float((deltas[n] - g).square().sum()) for n, g in gradients.items()))
    # The trainer computes in float32.
    assert norm > 0.05 and difference / norm < 1e-5
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)


def test_the_report_tells_clipping_corrections_and_divergence(tiny_model, tmp_path, start):
    plain = run_of(tiny_model, tmp_path / "a", start, "default", max_steps=1).reports[0]
    assert plain.clip_fraction == pytest.approx(plain.clip_low_fraction + plain.clip_high_fraction)
    assert 0 < plain.clip_fraction < 1 and plain.ratio_max > 1.2
    assert plain.kl_reference is None and plain.importance_mean is None and plain.importance_bounded_fraction is None
    masked = run_of(tiny_model, tmp_path / "b", start, "icepop", max_steps=1).reports[0]
    assert 0 < masked.importance_bounded_fraction < 1 and masked.importance_mean > 0
    assert masked.clip_fraction == 0 and masked.ratio_mean == pytest.approx(plain.ratio_mean, abs=1e-5)
    weights = run_of(tiny_model, tmp_path / "c", start, "cispo", max_steps=1).reports[0]
    assert 0 < weights.clip_fraction < 1 and weights.clip_low_fraction is None
    dapo = run_of(tiny_model, tmp_path / "d", start, "dapo", max_steps=1).reports[0]
    assert dapo.num_masked == 2 and dapo.trained_tokens < plain.trained_tokens and plain.num_masked == 0


def test_metrics_do_not_depend_on_how_the_step_is_split(tiny_model, tmp_path, start):
    for name in ("tis", "gspo"):
        one = run_of(tiny_model, tmp_path / f"{name}1", start, name, max_steps=1).reports[0]
        many = run_of(tiny_model, tmp_path / f"{name}2", start, name, max_steps=1, token_budget=22).reports[0]
        for field in ("ratio_mean", "ratio_max", "kl", "entropy", "clip_fraction", "clip_high_fraction"):
            assert getattr(one, field) == pytest.approx(getattr(many, field), abs=1e-5), field
    assert one.importance_mean is None


def test_the_reference_is_the_start_of_the_run_also_after_a_restart(tiny_model, tmp_path, start):
    settings = {"learning_rate": 0.1, "save_steps": 1, "save_total_limit": None}
    run = run_of(tiny_model, tmp_path / "a", start, "kl", max_steps=3, **settings)
    divergence = [report.kl_reference for report in run.reports]
    assert divergence[0] == pytest.approx(0, abs=1e-6) and 1e-4 < divergence[1] < divergence[2]
    shutil.copytree(tmp_path / "a" / "checkpoint-2", tmp_path / "b" / "checkpoint-2")
    resume_from = last_checkpoint(tmp_path / "b")
    again = run_of(tiny_model, tmp_path / "b", start, "kl", max_steps=3, resume_from=resume_from, **settings)
    assert again.reports[0].kl_reference == pytest.approx(divergence[2], rel=1e-3)


def test_a_pull_to_the_reference_keeps_the_policy_nearer(tiny_model, tmp_path, start):
    def distance(name, coefficient):
        settings = {"max_steps": 6, "learning_rate": 0.01, "objective": {"kl_coef": coefficient}}
        return run_of(tiny_model, tmp_path / name, start, name, **settings).reports[-1].kl_reference

    assert distance("strong", 0.5) < 0.7 * distance("weak", 1e-6)


def test_a_ratio_that_overflows_does_not_end_the_run(tiny_model, tmp_path):
    run = Run(tiny_model, tmp_path)
    row = run.source.row

    def impossible_row(completion):
        made = row(completion)
        made.logprobs_N[-1] = -1000.0
        return made

    run.source.row = impossible_row
    run.go(max_steps=2)
    assert [math.isfinite(report.loss) and math.isfinite(report.grad_norm) for report in run.reports] == [True, True]
    assert run.reports[0].ratio_max > 1e8


class Tempered(PolicySource):
    """Samples at a temperature, and reports the log-probabilities of `reported_at`."""

    reported_at = 0.5

    def row(self, completion):
        made = super().row(completion)
        logprobs = recompute_logprobs(self.model, made.ids_N, self.reported_at)
        made.logprobs_N[-len(completion) :] = logprobs[-len(completion) :]
        return made


@pytest.mark.parametrize(("reported_at", "is_exact"), [(0.5, True), (1.0, False)])
def test_the_ratio_is_one_when_log_probabilities_are_those_of_the_temperature(
    tiny_model, tmp_path, reported_at, is_exact
):
    """Case B18: processed log-probabilities at T=0.5 are exact, raw ones are far off."""
    run = Run(tiny_model, tmp_path)
    run.source.__class__ = Tempered
    run.source.reported_at = reported_at
    run.go(max_steps=1, temperature=0.5, objective={"kl_coef": 0.1})
    (report,) = run.reports
    assert (abs(report.ratio_mean - 1) < 1e-3) == is_exact
    assert (report.kl < 1e-5) == is_exact
    assert report.kl_reference == pytest.approx(0, abs=1e-5), "the reference is scored at the same temperature"

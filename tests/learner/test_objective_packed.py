"""From rewards and rows to the gradient of a real model: packed trees against each row alone, in double precision."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.objective import objective
from harness_trainer.learner.packed_loss import (
    Reference,
    label_micro_batches,
    score,
    sum_spread_rollouts,
    terms_of,
)
from harness_trainer.learner.rows import Row
from harness_trainer.learner.step_batch import build_step
from harness_trainer.learner.tree_attention import sdpa_tree_attention
from harness_trainer.learner.trl_compat import DataCollatorForRollout, pack_micro_batches
from harness_trainer.rollouts.types import Outcome, RolloutResult
from tests.learner.dense_objective import Rollout, Token, dense_loss
from tests.learner.objectives import OBJECTIVES, config_of


class DoubleHead:
    """What TRL's fused head answers, computed from whole logits in double precision (TRL's own is float32)."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *, shift_labels, fused_lm_head, **inputs):
        assert fused_lm_head
        log_probs = self.model(use_cache=False, **inputs).logits.log_softmax(-1)
        labels = shift_labels.clamp(min=0)
        picked = log_probs.gather(-1, labels[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return SimpleNamespace(log_probs=picked, entropy=entropy, aux_loss=None)

    def eval(self):
        return self

    def requires_grad_(self, _):
        return self


@pytest.fixture(scope="module")
def models(tmp_path_factory, build_model):
    """One policy with tree attention, the same with ordinary attention, and another as the reference (both ways)."""
    AttentionInterface.register("tree_under_test", sdpa_tree_attention)
    AttentionMaskInterface.register("tree_under_test", lambda **kwargs: None)
    folders = [build_model(tmp_path_factory.mktemp(f"model{seed}"), seed=seed) for seed in (0, 1)]
    return SimpleNamespace(
        **{
            f"{who}_{attention.partition('_')[0]}": AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation=attention, dtype=torch.float64
            )
            for who, folder in zip(("policy", "reference"), folders, strict=True)
            for attention in ("tree_under_test", "sdpa")
        }
    )


def make_row(ids, spans, behaviour):
    """A row whose turns t0, t1, ... were sampled at `spans`; `behaviour` is a log-probability for each id."""
    row = Row([*ids], [0] * len(ids), [0.0] * len(ids), [-1] * len(ids), [], [])
    for name, (start, end) in spans.items():
        row.mask_N[start:end] = [1] * (end - start)
        row.logprobs_N[start:end] = behaviour[start:end]
        row.versions_N[start:end] = [1] * (end - start)
        row.turn_ids.append(name)
        row.turn_spans.append((start, end))
    return row


class Step:
    """Two groups of rollouts of two or three turns, off-policy by some tenths of a nat, in one row or one per turn."""

    def __init__(self, model, seed=0, split=()):
        numbers = np.random.default_rng(seed)
        self.groups = []
        for g in range(2):
            prompt = numbers.integers(3, 100, 4).tolist()
            results, rows = [], []
            for i in range(4):
                ids, spans = [*prompt], {}
                for turn in range(int(numbers.integers(2, 4))):
                    sampled = numbers.integers(3, 100, int(numbers.integers(1, 4))).tolist()
                    spans[f"t{turn}"] = (len(ids), len(ids) + len(sampled))
                    ids += sampled + numbers.integers(3, 100, 2).tolist()
                ids = ids[:-2]
                with torch.no_grad():
                    logps = dense_logps(model, ids)[0].tolist()
                behaviour = [0.0] + [
                    float(np.float32(lp + drift))
                    for lp, drift in zip(logps, numbers.normal(0, 0.25, len(logps)), strict=True)
                ]
                outcome = Outcome.TRUNCATED if i == 1 else Outcome.OK
                reward = [None, 1.0, 0.0, 0.5][i] if g else float(numbers.integers(0, 5)) / 4 + i / 10
                result = RolloutResult(f"r{g}{i}", g, "task", "h", 0, outcome, reward)
                result.turn_rewards = {name: float(numbers.integers(0, 3)) for name in spans}
                results.append(result)
                rows.append(
                    [make_row(ids[:end], {name: (start, end)}, behaviour) for name, (start, end) in spans.items()]
                    if (g, i) in split
                    else [make_row(ids, spans, behaviour)]
                )
            self.groups.append(TrainGroup(g, "task", results, rows))

    def dense(self, policy, reference):
        """The same step for the dense loops; each row is forwarded alone."""
        groups = []
        for group in self.groups:
            rollouts = []
            for result, rows in zip(group.results, group.rows, strict=True):
                tokens = []
                for row in rows:
                    logps, entropy = dense_logps(policy, row.ids_N)
                    with torch.no_grad():
                        of_reference = dense_logps(reference, row.ids_N)[0]
                    turn_at = {
                        p: t for t, (a, b) in zip(row.turn_ids, row.turn_spans, strict=True) for p in range(a, b)
                    }
                    tokens += [
                        Token(logps[p - 1], row.logprobs_N[p], entropy[p - 1], of_reference[p - 1].item(), turn_at[p])
                        for p in range(1, len(row.ids_N))
                        if row.mask_N[p]
                    ]
                truncated = result.outcome is Outcome.TRUNCATED
                rollouts.append(Rollout(result.reward, tokens, truncated, result.turn_rewards))
            groups.append(rollouts)
        return groups


def dense_logps(model, ids):
    """Log-probability of each id but the first, and the entropy that it was drawn from."""
    logps = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, torch.tensor(ids)[1:, None])[:, 0], -(logps.exp() * logps).sum(-1)


def packed_loss(step, config, models, token_budget):
    """The loss of the step by our own path, and the number of micro-batches and of passes before them."""
    batch = build_step(step.groups, lambda version: 0, config)
    trees = pack_micro_batches(batch.samples, token_budget)
    micro_batches = [DataCollatorForRollout(pad_token_id=0).torch_call([[tree]]) for tree in trees]
    label_micro_batches(micro_batches, [tree.samples for tree in trees], config)
    head = DoubleHead(models.policy_tree)
    passes = 0
    if config.needs_whole_rollouts:
        passes = sum_spread_rollouts(micro_batches, lambda batch: score(head, batch).log_probs_M)
    reference = Reference(models.policy_tree, lambda: DoubleHead(models.reference_tree))
    total = 0.0
    for micro_batch in micro_batches:
        total = (
            total
            + objective(terms_of(micro_batch, score(head, micro_batch), reference.log_probs(micro_batch)), config).loss
        )
    return total, len(micro_batches), passes


def gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(got, expected):
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert largest > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(
            got[name], gradient, atol=1e-6 * max(1.0, float(largest)), rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


SPLIT = {(0, 0), (0, 1), (1, 3)}  # rollouts that became a row per turn


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("token_budget", "split"), [(1000, ()), (1000, SPLIT), (22, SPLIT)])
def test_loss_and_gradient_of_packed_trees_equal_those_of_dense_rows(models, name, token_budget, split):
    config = config_of(name)
    step = Step(models.policy_sdpa, split=split)
    loss, num_micro_batches, passes = packed_loss(step, config, models, token_budget)
    assert (num_micro_batches > 3) if token_budget < 100 else (num_micro_batches == 1)
    # A rollout's ratio takes another pass only where the rollout is in several micro-batches.
    assert (passes > 0) == (config.needs_whole_rollouts and num_micro_batches > 1)
    expected = dense_loss(step.dense(models.policy_sdpa, models.reference_sdpa), config)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert_same(gradients(loss, models.policy_tree), gradients(expected, models.policy_sdpa))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_splitting_a_rollout_into_rows_changes_nothing(models, name):
    config = config_of(name)
    whole, _, _ = packed_loss(Step(models.policy_sdpa), config, models, 1000)
    one_row_each = gradients(whole, models.policy_tree)
    split, _, _ = packed_loss(Step(models.policy_sdpa, split=SPLIT), config, models, 1000)
    assert split.item() == pytest.approx(whole.item(), abs=1e-6)
    assert_same(gradients(split, models.policy_tree), one_row_each)


def test_a_rollout_of_forty_rows_weighs_as_much_as_its_sibling_of_one():
    """Case B25: the weight that the loss gives to a rollout, summed over its tokens."""
    config = config_of("grpo")
    ids = list(range(3, 50))
    rows = [make_row(ids[: 6 + i], {f"t{i}": (5 + i, 6 + i)}, [-1.0] * 50) for i in range(40)]
    results = [RolloutResult(f"r{i}", 0, "task", "h", 0, Outcome.OK, reward) for i, reward in enumerate([1.0, 0.0])]
    group = TrainGroup(0, "task", results, [rows, [make_row(ids[:8], {"t0": (4, 8)}, [-1.0] * 8)]])
    batch = build_step([group], lambda version: 0, config)
    assert [sample["advantage"] for sample in batch.samples] == pytest.approx([1.0] * 40 + [-1.0])
    trees = pack_micro_batches(batch.samples, 60)
    micro_batches = [DataCollatorForRollout(pad_token_id=0).torch_call([[tree]]) for tree in trees]
    label_micro_batches(micro_batches, [tree.samples for tree in trees], config)
    weight = {1.0: 0.0, -1.0: 0.0}
    for micro_batch in micro_batches:
        for advantage, token_weight in zip(micro_batch["advantages"][0], micro_batch["weights"][0], strict=True):
            weight[round(advantage.item())] += token_weight.item()
    assert weight == pytest.approx({1.0: 0.5, -1.0: 0.5})


class Adapted(torch.nn.Module):
    """As much of PEFT's model as the reference needs: an adapter that can be off for a while."""

    def __init__(self, base):
        super().__init__()
        self.base, self.on = base, True

    def forward(self, **inputs):
        outputs = self.base(**inputs)
        return SimpleNamespace(
            log_probs=outputs.log_probs - 1.0 * self.on, entropy=outputs.entropy, aux_loss=outputs.aux_loss
        )

    def disable_adapter(self):
        from contextlib import contextmanager

        @contextmanager
        def off():
            self.on = False
            try:
                yield
            finally:
                self.on = True

        return off()


def test_with_an_adapter_the_reference_is_the_model_without_it_and_no_copy_is_made(models):
    config = config_of("kl")
    batch = build_step(Step(models.policy_sdpa).groups, lambda version: 0, config)
    trees = pack_micro_batches(batch.samples, 1000)
    micro_batch = DataCollatorForRollout(pad_token_id=0).torch_call([[trees[0]]])
    adapted = Adapted(DoubleHead(models.policy_tree))
    reference = Reference(adapted, lambda: pytest.fail("a copy was made"))
    without = reference.log_probs(micro_batch)
    assert adapted.on and not without.requires_grad
    torch.testing.assert_close(without, score(adapted, micro_batch).log_probs_M + 1.0)

"""The objective as a function: value and gradient against dense loops, cases worked by hand, extreme numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_trainer.learner.objective import Terms, loss_weights, objective
from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.learner.step_batch import build_step
from tests.learner.dense_objective import Rollout, Token, dense_loss
from tests.learner.objectives import OBJECTIVES, config_of

VOCAB = 5


def terms(log_probs, behaviour, advantages, rollouts=None, **more):
    """Terms that are the whole step, each token weighing the same."""
    log_probs = torch.as_tensor(log_probs, dtype=torch.double)
    rollouts = torch.zeros(len(log_probs), dtype=torch.long) if rollouts is None else torch.tensor(rollouts)
    return Terms(
        log_probs_M=log_probs,
        behaviour_M=torch.tensor(behaviour, dtype=torch.double),
        advantages_M=torch.tensor(advantages, dtype=torch.double),
        weights_M=torch.full((len(log_probs),), 1 / len(log_probs), dtype=torch.double),
        rollout_M=rollouts,
        tokens_R=torch.bincount(rollouts).double(),
        **more,
    )


def value_and_gradient(log_probs, behaviour, advantages, config=None, **more):
    leaf = torch.tensor(log_probs, dtype=torch.double, requires_grad=True)
    result = objective(terms(leaf, behaviour, advantages, **more), config or ObjectiveConfig())
    result.loss.backward()
    return result.loss.item(), leaf.grad.tolist(), result


@st.composite
def steps(draw):
    """Groups of rollouts with rewards (some unknown), limits, turns, and tokens that are off-policy by up to a nat."""
    number = st.floats(-1, 1)
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        rollouts = []
        for _ in range(draw(st.integers(2, 4))):
            turns = [f"t{i}" for i in range(draw(st.integers(1, 3)))]
            rollouts.append(
                {
                    "reward": draw(st.sampled_from([None, 0.0, 0.25, 0.5, 1.0, 1.0])),
                    "truncated": draw(st.booleans()),
                    "turn_rewards": {turn: draw(st.sampled_from([None, 0.0, 0.5, 1.0])) for turn in turns},
                    "tokens": [
                        (turn, draw(st.integers(0, VOCAB - 1)), draw(number), draw(number))
                        for turn in turns
                        for _ in range(draw(st.integers(0, 3)))
                    ],
                }
            )
        groups.append(rollouts)
    return groups, draw(st.integers(0, 2**16))


def tokens_of(groups, seed):
    """The same step for the dense loops; log-probabilities are functions of one table of logits."""
    count = sum(len(rollout["tokens"]) for group in groups for rollout in group)
    logits = torch.randn(count + 1, VOCAB, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    logits.requires_grad_()
    rows = iter(logits)
    dense = []
    for group in groups:
        rollouts = []
        for rollout in group:
            tokens = []
            for turn, token, drift, distance in rollout["tokens"]:
                logps = next(rows).log_softmax(-1)
                entropy = -(logps.exp() * logps).sum()
                now = logps[token].item()
                tokens.append(Token(logps[token], now - drift, entropy, now + distance, turn))
            rollouts.append(Rollout(rollout["reward"], tokens, rollout["truncated"], rollout["turn_rewards"]))
        dense.append(rollouts)
    return dense, logits


def flat_terms(dense, config, splits=1):
    """The step's terms as our own code makes them of groups, in `splits` parts."""
    batch, tokens = sampled(dense, config)
    counts = {}
    for sample in batch.samples:
        counts[sample["rollout"]] = counts.get(sample["rollout"], 0) + len(tokens[sample["key"]])
    weights = loss_weights([counts[r] for r in sorted(counts)], config.aggregation, config.constant_tokens)
    flat = []
    for sample in batch.samples:
        for i, token in enumerate(tokens[sample["key"]]):
            flat.append((token, sample["advantages"][i + 1], sample["rollout"], weights[sample["rollout"]]))
    tokens_R = torch.tensor([float(counts[r]) for r in sorted(counts)], dtype=torch.double)
    whole = terms_from(flat, tokens_R)
    if splits == 1:
        return [whole]
    sums_R = whole.log_ratio_sums()
    parts = [flat[i::splits] for i in range(splits)]
    return [terms_from(part, tokens_R, rollout_sums_R=sums_R) for part in parts if part]


def terms_from(flat, tokens_R, **more):
    def column(values):
        return torch.tensor(values, dtype=torch.double)

    return Terms(
        log_probs_M=torch.stack([token.logp for token, *_ in flat]),
        behaviour_M=column([token.behaviour for token, *_ in flat]),
        advantages_M=column([advantage for _, advantage, _, _ in flat]),
        weights_M=column([weight for *_, weight in flat]),
        rollout_M=torch.tensor([rollout for _, _, rollout, _ in flat]),
        tokens_R=tokens_R,
        entropy_M=torch.stack([token.entropy for token, *_ in flat]),
        reference_M=column([token.reference for token, *_ in flat]),
        **more,
    )


def sampled(dense, config):
    """The step through `build_step`: one row per rollout, the first position a prompt."""
    from harness_trainer.learner.group_source import TrainGroup
    from harness_trainer.learner.rows import Row
    from harness_trainer.rollouts.types import Outcome, RolloutResult

    groups, tokens = [], {}
    for g, rollouts in enumerate(dense):
        results, rows = [], []
        for i, rollout in enumerate(rollouts):
            outcome = Outcome.TRUNCATED if rollout.truncated else Outcome.OK
            result = RolloutResult(f"r{g}-{i}", g, "task", "h", 0, outcome, rollout.reward)
            result.turn_rewards = rollout.turn_rewards
            names = [token.turn for token in rollout.tokens]
            row = Row(
                ids_N=[g * 10 + i] + [0] * len(names),
                mask_N=[0] + [1] * len(names),
                logprobs_N=[0.0] + [token.behaviour for token in rollout.tokens],
                versions_N=[-1] + [1] * len(names),
                turn_ids=list(dict.fromkeys(names)),
                turn_spans=[
                    (1 + names.index(name), 1 + names.index(name) + names.count(name)) for name in dict.fromkeys(names)
                ],
            )
            tokens[g * 10 + i] = rollout.tokens
            results.append(result)
            rows.append([row])
        groups.append(TrainGroup(g, "task", results, rows))
    usable = [group for group in groups if sum(r.reward is not None for r in group.results) >= 2]
    batch = build_step(usable, lambda version: 0, config)
    for sample in batch.samples:
        sample["key"] = int(sample["input_ids"][0])
    return batch, tokens


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=25, deadline=None)
@given(steps(), st.integers(1, 3))
def test_value_and_gradient_equal_those_of_dense_loops(name, step, splits):
    config = config_of(name)
    dense, logits = tokens_of(*step)
    expected = dense_loss(dense, config)
    if not expected.requires_grad:
        assert sampled(dense, config)[0].samples == []
        return
    (expected_gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    loss = sum(objective(part, config).loss for part in flat_terms(dense, config, splits))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-9, rtol=1e-9)


# Worked by hand.


def test_on_policy_the_gradient_is_the_weighted_advantage_whatever_the_loss():
    for settings_ in ({}, {"loss": "cispo"}, {"importance_correction": "token_truncate"}):
        _, gradient, _ = value_and_gradient([-1.0, -2.0], [-1.0, -2.0], [0.5, -0.5], ObjectiveConfig(**settings_))
        assert gradient == pytest.approx([-0.25, 0.25])


def test_the_two_clips_stop_only_what_would_go_further():
    config = ObjectiveConfig(epsilon=0.2, epsilon_high=0.28)
    log_ratios = [math.log(1.3), math.log(1.3), math.log(0.7), math.log(0.7), math.log(1.25)]
    loss, gradient, result = value_and_gradient(log_ratios, [0.0] * 5, [1.0, -1.0, 1.0, -1.0, 1.0], config)
    assert gradient == pytest.approx([0, 1.3 / 5, -0.7 / 5, 0, -1.25 / 5])
    assert loss == pytest.approx(-(1.28 - 1.3 + 0.7 - 0.8 + 1.25) / 5)
    rates = {name: float(a / b) for name, (a, b) in result.rates.items()}
    assert rates["clip_ratio/high_mean"] == pytest.approx(0.2) and rates["clip_ratio/low_mean"] == pytest.approx(0.2)
    assert rates["clip_ratio/region_mean"] == pytest.approx(0.4)
    assert rates["ratio"] == pytest.approx((1.3 + 1.3 + 0.7 + 0.7 + 1.25) / 5)
    assert float(result.extremes["ratio_max"]) == pytest.approx(1.3)


def test_dual_clip_bounds_a_large_ratio_with_a_negative_advantage():
    loss, gradient, result = value_and_gradient(
        [math.log(10.0), math.log(2.0)], [0.0, 0.0], [-1.0, -1.0], ObjectiveConfig(dual_clip=3.0)
    )
    assert loss == pytest.approx((3.0 + 2.0) / 2)
    assert gradient == pytest.approx([0.0, 1.0])
    assert float(result.rates["clip_ratio/dual_mean"][0]) == 1


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    _, gradient, result = value_and_gradient(
        [math.log(5.0), math.log(0.1)], [0.0, 0.0], [1.0, 1.0], ObjectiveConfig(loss="cispo", epsilon_high=1.0)
    )
    assert gradient == pytest.approx([-2.0 / 2, -0.1 / 2])
    assert float(result.rates["cispo_clip_ratio"][0]) == 1


def test_gspo_clips_a_rollout_as_one():
    config = ObjectiveConfig(loss="gspo", aggregation="rollout_mean", epsilon=0.1)
    # Token ratios of 2 and 1/2: each far outside of the clip, their geometric mean is 1.
    _, gradient, result = value_and_gradient([math.log(2.0), math.log(0.5)], [0.0, 0.0], [1.0, 1.0], config)
    assert gradient == pytest.approx([-0.5, -0.5])
    assert float(result.rates["clip_ratio/region_mean"][0]) == 0
    _, gradient, _ = value_and_gradient([math.log(2.0), math.log(1.0)], [0.0, 0.0], [1.0, 1.0], config)
    assert gradient == [0.0, 0.0]


def test_the_weights_of_every_correction():
    def weights(kind, **bounds):
        config = ObjectiveConfig(importance_correction=kind, **bounds)
        ratios = [4.0, 0.25, 2.0, 2.0]
        _, gradient, result = value_and_gradient(
            [math.log(r) for r in ratios], [0.0] * 4, [1.0] * 4, config, rollouts=[0, 0, 1, 1]
        )
        return [-4 * g for g in gradient], float(result.rates["sampling/importance_sampling_ratio/bounded_frac"][0])

    bounds = {"importance_max": 3.0, "importance_min": 0.5}
    assert weights("token_truncate", importance_max=3.0) == (pytest.approx([3, 0.25, 2, 2]), 1)
    assert weights("token_truncate", **bounds) == (pytest.approx([3, 0.5, 2, 2]), 2)
    assert weights("token_mask", **bounds) == (pytest.approx([0, 0, 2, 2]), 2)
    assert weights("sequence_truncate", **bounds) == (pytest.approx([1, 1, 3, 3]), 2)
    assert weights("sequence_mask", **bounds) == (pytest.approx([1, 1, 0, 0]), 2)
    assert weights("geometric_mask", importance_max=1.9) == (pytest.approx([1, 1, 0, 0]), 2)
    assert weights("geometric_mask", importance_max=3.0) == (pytest.approx([1, 1, 1, 1]), 0)


def test_kl_is_zero_at_the_reference_and_pulls_towards_it():
    config = ObjectiveConfig(kl_coef=1.0)
    loss, gradient, result = value_and_gradient(
        [-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], config, reference_M=torch.tensor([-1.0, -2.0], dtype=torch.double)
    )
    k3 = math.exp(-1) - (-1) - 1
    assert loss == pytest.approx(k3 / 2)
    assert gradient == pytest.approx([0, (1 - math.exp(-1)) / 2])
    assert float(result.rates["kl_ref"][0]) == pytest.approx(k3)


def test_a_rollout_weighs_by_its_tokens_equally_or_by_a_constant():
    assert loss_weights([3, 1], "token_mean") == [0.25, 0.25]
    assert loss_weights([3, 1], "rollout_mean") == pytest.approx([1 / 6, 1 / 2])
    assert loss_weights([3, 1], "constant", 10) == pytest.approx([1 / 20, 1 / 20])


def test_a_rollout_without_trained_tokens_is_in_no_mean():
    assert loss_weights([4, 0], "rollout_mean") == [0.25, 0.0]
    assert loss_weights([0, 0], "token_mean") == [0.0, 0.0]
    assert loss_weights([4, 0], "constant", 2) == [0.5, 0.0]


def test_equal_rewards_give_a_finite_loss_without_a_gradient():
    loss, gradient, _ = value_and_gradient([-1.0, -2.0], [-3.0, -0.5], [0.0, 0.0])
    assert loss == 0 and gradient == [0.0, 0.0]


# Numbers that should not be, and are.

EXTREME = [-math.inf, -1e30, -9999.0, -1000.0, -100.0, -1e-30, 0.0]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_probabilities_leave_value_and_gradient_finite(name, advantage):
    config = config_of(name)
    pairs = [(new, old) for new in EXTREME for old in EXTREME]
    for i, (new, old) in enumerate(pairs):
        leaf = torch.tensor([new, -1.0], dtype=torch.float32, requires_grad=True)
        step = Terms(
            log_probs_M=leaf,
            behaviour_M=torch.tensor([old, -1.0]),
            advantages_M=torch.tensor([advantage, 1.0]),
            weights_M=torch.tensor([0.5, 0.5]),
            rollout_M=torch.tensor([0, 1]),
            tokens_R=torch.tensor([1.0, 1.0]),
            entropy_M=torch.ones(2),
            reference_M=torch.tensor([old, -1.0]),
        )
        result = objective(step, config)
        result.loss.backward()
        assert math.isfinite(result.loss.item()), (i, new, old)
        assert all(math.isfinite(g) for g in leaf.grad.tolist()), (i, new, old, leaf.grad)
        # Whatever became of the odd one, the other token is trained as if it were alone.
        assert leaf.grad[1].item() == pytest.approx(-0.5), (new, old)
        numbers = [*result.extremes.values(), *(number for rate in result.rates.values() for number in rate)]
        assert all(math.isfinite(float(number)) for number in numbers)


@pytest.mark.parametrize("name", ["default", "gspo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_overflows_has_no_gradient_in_either_direction(name, advantage):
    _, gradient, _ = value_and_gradient([-1.0], [-900.0], [advantage], config_of(name))
    assert gradient == [0.0]


def test_a_model_that_gives_nan_is_not_hidden():
    loss, _, _ = value_and_gradient([math.nan, -1.0], [-1.0, -1.0], [1.0, 1.0])
    assert math.isnan(loss)


def test_no_term_at_all_is_a_zero_that_can_be_differentiated():
    leaf = torch.zeros(3, requires_grad=True)
    empty = torch.zeros(0)
    step = Terms(leaf[:0], empty, empty, empty, torch.zeros(0, dtype=torch.long), torch.zeros(0), empty, empty)
    for name in OBJECTIVES:
        result = objective(step, config_of(name))
        result.loss.backward()
        assert result.loss.item() == 0


# What a person may not combine.


@pytest.mark.parametrize(
    ("settings_", "advice"),
    [
        ({"loss": "gspo"}, "set aggregation to rollout_mean"),
        ({"aggregation": "constant"}, "constant_tokens"),
        ({"constant_tokens": 5}, "set aggregation to constant"),
        ({"loss": "cispo", "importance_correction": "token_mask"}, "set importance_correction to none"),
        ({"dual_clip": 3.0, "importance_correction": "token_mask"}, "leave dual_clip out"),
        ({"dual_clip": 3.0, "loss": "cispo"}, "leave dual_clip out"),
        ({"dual_clip": 1.1}, "raise it"),
        ({"importance_min": 0.5}, "choose an importance_correction"),
        ({"truncated": "penalize"}, "truncation_penalty"),
        ({"truncation_penalty": 1.0}, "set truncated to penalize"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_with_what_to_do(settings_, advice):
    with pytest.raises(ValueError, match=advice):
        ObjectiveConfig(**settings_)


@pytest.mark.parametrize(
    "settings_",
    [{"epsilon": 0.0}, {"epsilon": 1.0}, {"kl_coef": -1.0}, {"loss": "ppo"}, {"importance_max": 1.0}, {"beta": 0.1}],
)
def test_values_out_of_range_and_unknown_names_are_refused(settings_):
    with pytest.raises(ValueError):
        ObjectiveConfig(**settings_)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resolved_config_can_be_read_again(name):
    config = config_of(name)
    assert ObjectiveConfig.model_validate(config.model_dump(mode="json")) == config

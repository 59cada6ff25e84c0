"""The loss of a step as a pure function of its trained tokens, with what a person should see of it.

Owns the formulas, in the direction of descent, and their metrics under TRL's names. Knows no model, no packing and no
step: `packed_loss` brings log-probabilities, `feeder` advantages, `loss_weights` the weights. `objective_config` says
what may be chosen, `advantages` and `corrections` hold the other formulas.

For trained token t of rollout y, with advantage A_t, r_t = pi(t) / pi_behaviour(t) and a weight W_t that sums to the
aggregation's mean over the step, the loss is

    L = - sum_t W_t [ w_t S_t - kl_coef k3_t + entropy_coef H_t ]

w is the importance weight (1 without a correction), S one of the surrogates below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from harness_trainer.learner.corrections import MAX_LOG_RATIO, Importance, exp, importance
from harness_trainer.learner.objective_config import Aggregation, ObjectiveConfig

# In place of -inf, which an underflow in the learner may give: finite, and beyond every ratio that `exp` lets through.
_LOWEST_LOGPROB = -1e4
LOGPROB_DIFFERENCE = "sampling/logprob_difference_mean"
_SAMPLING = "sampling/importance_sampling_ratio"


@dataclass(frozen=True, slots=True)
class Terms:
    """The M trained tokens of one forward pass; R is the number of rollouts that they are of.

    Example of two rollouts: rollout_M=[0, 0, 1], tokens_R=[2, 7] (the second has five more tokens elsewhere).
    """

    log_probs_M: torch.Tensor  # nats, under the policy that is updated; carries the gradient
    behaviour_M: torch.Tensor  # nats, under the policy that sampled
    advantages_M: torch.Tensor
    weights_M: torch.Tensor  # W; of the whole step, so that the loss of its micro-batches adds up
    rollout_M: torch.Tensor  # which rollout, from 0
    tokens_R: torch.Tensor  # trained tokens of each rollout in the whole step
    entropy_M: torch.Tensor | None = None  # nats; needed with an entropy_coef
    reference_M: torch.Tensor | None = None  # nats, under the frozen reference; needed with a kl_coef
    # Sum of log pi - log pi_behaviour over all trained tokens of each rollout; None = all of them are here.
    rollout_sums_R: torch.Tensor | None = None

    def log_ratio_sums(self) -> torch.Tensor:
        """For each rollout the sum of log pi - log pi_behaviour over the terms that are here, without gradient."""
        return _sum_by_rollout(_log_ratio(self.log_probs_M, self.behaviour_M), self)


@dataclass(slots=True)
class ObjectiveLoss:
    """`rates` are numerator and denominator, so that micro-batches add up to the step's mean."""

    loss: torch.Tensor
    rates: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    extremes: dict[str, torch.Tensor] = field(default_factory=dict)  # the name says max or min


def loss_weights(tokens_R: Sequence[int], aggregation: Aggregation, constant_tokens: int | None = None) -> list[float]:
    """W of one token of each rollout, from the number of trained tokens of every rollout of the step.

    token_mean    1 / sum of tokens            DAPO, arXiv 2503.14476
    rollout_mean  1 / (R x the rollout's own)  GRPO, arXiv 2402.03300: every rollout weighs 1 / R
    constant      1 / (R x constant_tokens)    Dr. GRPO, arXiv 2503.20783: no preference by length

    R counts rollouts with at least one trained token. How many rows a rollout became is in none of them.
    """
    num_rollouts = sum(count > 0 for count in tokens_R)
    if aggregation == "token_mean":
        total = sum(tokens_R)
        return [1 / total if count else 0.0 for count in tokens_R]
    if aggregation == "rollout_mean":
        return [1 / (num_rollouts * count) if count else 0.0 for count in tokens_R]
    assert constant_tokens is not None
    return [1 / (num_rollouts * constant_tokens) if count else 0.0 for count in tokens_R]


def objective(terms: Terms, config: ObjectiveConfig) -> ObjectiveLoss:
    """The loss of these terms and its metrics. NaN in gives NaN out; infinite and extreme ratios stay finite."""
    log_probs = terms.log_probs_M.clamp(min=_LOWEST_LOGPROB)
    log_ratio = _log_ratio(log_probs, terms.behaviour_M)
    sums_R = _sum_by_rollout(log_ratio, terms) if terms.rollout_sums_R is None else terms.rollout_sums_R
    result = ObjectiveLoss(terms.weights_M.new_zeros(()))
    if config.importance_correction != "none":
        surrogate = clip(log_probs - log_probs.detach(), terms, config, result)
        weights = importance(log_ratio.detach(), terms.rollout_M, sums_R, terms.tokens_R, config)
        surrogate = surrogate * weights.weights_M
        _report_importance(weights, result)
    elif config.loss == "gspo":
        surrogate = gspo(log_probs, sums_R / terms.tokens_R, terms, config, result)
    elif config.loss == "cispo":
        surrogate = cispo(log_probs, log_ratio, terms, config, result)
    else:
        surrogate = clip(log_ratio, terms, config, result)
    result.loss = -(terms.weights_M * (surrogate + _regularizers(log_probs, terms, config, result))).sum()
    _report_policy(log_ratio.detach(), terms, result)
    return result


def clip(log_ratio: torch.Tensor, terms: Terms, config: ObjectiveConfig, result: ObjectiveLoss) -> torch.Tensor:
    """S = min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A): PPO, arXiv 1707.06347; two bounds: DAPO, 2503.14476.

    With dual_clip c, where A < 0: S = max(that, c A), arXiv 1912.09729. With an importance correction r is the ratio
    to the policy before the step, which at the step's only update is 1: S has the value A and the gradient of log pi.
    """
    return _clipped(exp(log_ratio), terms, config, result)


def cispo(
    log_probs: torch.Tensor, log_ratio: torch.Tensor, terms: Terms, config: ObjectiveConfig, result: ObjectiveLoss
) -> torch.Tensor:
    """S = sg[min(r, 1 + epsilon_high)] A log pi: MiniMax-M1, arXiv 2506.13585, without a lower bound as there."""
    ratio = exp(log_ratio.detach())
    high = 1 + config.clip_high
    result.rates["cispo_clip_ratio"] = _mean((ratio > high) & (terms.advantages_M > 0))
    return ratio.clamp(max=high) * terms.advantages_M * log_probs


def gspo(
    log_probs: torch.Tensor,
    mean_log_ratio_R: torch.Tensor,
    terms: Terms,
    config: ObjectiveConfig,
    result: ObjectiveLoss,
) -> torch.Tensor:
    """S = min(s_t A_t, clip(s_t) A_t) with s_t = sg[s_y] pi / sg[pi], s_y = (pi(y) / pi_behaviour(y))^(1/n_y).

    GSPO-token, arXiv 2507.18071 section 4.3: with one advantage per rollout and rollout_mean it has GSPO's value and
    gradient, and as s_y needs no gradient of its own, a rollout may be spread over several forward passes.
    """
    mean_log_ratio = mean_log_ratio_R.detach()[terms.rollout_M]
    # A ratio that `exp` holds has no gradient, here as elsewhere.
    moving = (log_probs - log_probs.detach()).masked_fill(mean_log_ratio.abs() > MAX_LOG_RATIO, 0.0)
    return _clipped(exp(mean_log_ratio) * moving.exp(), terms, config, result)


def k3(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KL(pi || pi_ref) by one sample: exp(d) - d - 1 with d = log pi_ref - log pi (joschu.net/blog/kl-approx.html)."""
    difference = (reference - log_probs).clamp(max=MAX_LOG_RATIO)
    return difference.exp() - difference - 1


def _regularizers(
    log_probs: torch.Tensor, terms: Terms, config: ObjectiveConfig, result: ObjectiveLoss
) -> torch.Tensor:
    total = torch.zeros_like(log_probs)
    if config.kl_coef:
        assert terms.reference_M is not None
        divergence = k3(log_probs, terms.reference_M.clamp(min=_LOWEST_LOGPROB))
        result.rates["kl_ref"] = _mean(divergence)
        total = total - config.kl_coef * divergence
    if config.entropy_coef:
        assert terms.entropy_M is not None
        total = total + config.entropy_coef * terms.entropy_M
    return total


def _clipped(ratio: torch.Tensor, terms: Terms, config: ObjectiveConfig, result: ObjectiveLoss) -> torch.Tensor:
    advantages = terms.advantages_M
    low, high = 1 - config.epsilon, 1 + config.clip_high
    surrogate = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    is_low, is_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    if config.dual_clip is not None:
        bound = config.dual_clip * advantages
        is_dual = (advantages < 0) & (surrogate < bound)
        surrogate = torch.where(is_dual, bound, surrogate)
        result.rates["clip_ratio/dual_mean"] = _mean(is_dual)
    result.rates["clip_ratio/low_mean"] = _mean(is_low)
    result.rates["clip_ratio/high_mean"] = _mean(is_high)
    result.rates["clip_ratio/region_mean"] = _mean(is_low | is_high)
    if len(advantages):
        counts = _sum_by_rollout(torch.ones_like(ratio), terms)
        # A rollout without a term here is in neither extreme.
        per_rollout = [_sum_by_rollout(clipped.to(ratio.dtype), terms) / counts for clipped in (is_low, is_high)]
        result.extremes["clip_ratio/low_min"] = per_rollout[0][counts > 0].min()
        result.extremes["clip_ratio/high_max"] = per_rollout[1][counts > 0].max()
    return surrogate


def _report_importance(weights: Importance, result: ObjectiveLoss) -> None:
    result.rates[f"{_SAMPLING}/mean"] = _mean(weights.weights_M)
    result.rates[f"{_SAMPLING}/bounded_frac"] = _mean(weights.bounded_M)
    if len(weights.weights_M):
        result.extremes[f"{_SAMPLING}/max"] = weights.weights_M.max()
        result.extremes[f"{_SAMPLING}/min"] = weights.weights_M.min()


def _report_policy(log_ratio: torch.Tensor, terms: Terms, result: ObjectiveLoss) -> None:
    """How far the policy is from the one that sampled, token by token, whatever the loss's own ratio is."""
    ratio = exp(log_ratio)
    result.rates["ratio"] = _mean(ratio)
    result.rates["kl"] = _mean(ratio - 1 - log_ratio)
    # Not to be had from the two above: in float32 an extreme ratio swallows all else of their difference.
    result.rates[LOGPROB_DIFFERENCE] = _mean(log_ratio)
    if terms.entropy_M is not None:
        result.rates["entropy"] = _mean(terms.entropy_M)
    if len(ratio):
        result.extremes["ratio_max"] = ratio.max()


def _log_ratio(log_probs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    return log_probs.clamp(min=_LOWEST_LOGPROB) - behaviour.clamp(min=_LOWEST_LOGPROB)


def _sum_by_rollout(values_M: torch.Tensor, terms: Terms) -> torch.Tensor:
    sums_R = values_M.new_zeros(len(terms.tokens_R))
    return sums_R.index_add(0, terms.rollout_M, values_M.detach())


def _mean(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = values.detach()
    values = values.to(torch.float32) if values.dtype == torch.bool else values
    return values.sum(), values.new_tensor(float(values.numel()))

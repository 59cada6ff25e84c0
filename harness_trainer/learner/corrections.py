"""Importance weights that correct for tokens having been sampled by another policy than the one that is updated.

Engine and learner never compute quite the same probabilities, and in an asynchronous run the engine's weights are
older. Pure functions on tensors, without gradient. Called by `objective`; `objective_config` says what may be chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness_trainer.learner.objective_config import ObjectiveConfig

# |log ratio| in nats beyond which a ratio is held: e^20 is 5e8, far outside of every clip, and finite in float32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Importance:
    """One weight per trained token, and where a bound has changed it (set to 0 by a mask, cut by a truncation)."""

    weights_M: torch.Tensor
    bounded_M: torch.Tensor  # bool


def importance(
    log_ratios_M: torch.Tensor,
    rollout_M: torch.Tensor,
    rollout_sums_R: torch.Tensor,
    tokens_R: torch.Tensor,
    config: ObjectiveConfig,
) -> Importance:
    """Weights w of M trained tokens of R rollouts, from log_ratio = log pi - log pi_behaviour before the update.

    With rho_t the ratio of token t, rho_y that of its whole rollout (the product over all its trained tokens) and
    n_y their number:

    token_truncate     w = min(rho_t, max)                      TIS, fengyao.notion.site/off-policy-rl (2025)
    token_mask         w = rho_t if min <= rho_t <= max else 0  IcePop, arXiv 2510.18855
    sequence_truncate  w = min(rho_y, max)                      the same on sequences (verl's and TRL's "sequence")
    sequence_mask      w = rho_y if min <= rho_y <= max else 0  masked importance sampling, as TRL has it
    geometric_mask     w = 1 if min <= rho_y^(1/n_y) <= max else 0
                                                                drift per token, whatever the length (verl: "geometric")

    `importance_min` None is no lower bound; a truncation raises what lies below to it. `rollout_sums_R` is the sum of
    log ratios of each rollout over *all* its trained tokens, also those in other micro-batches; `tokens_R` counts them.
    """
    kind = config.importance_correction
    if kind.startswith("token"):
        values = log_ratios_M
    elif kind.startswith("sequence"):
        values = rollout_sums_R[rollout_M]
    else:
        values = (rollout_sums_R / tokens_R)[rollout_M]
    ratios = exp(values)
    low, high = config.importance_min or 0.0, config.importance_max
    outside = (ratios < low) | (ratios > high)
    if kind.endswith("truncate"):
        return Importance(ratios.clamp(min=low, max=high), outside)
    kept = torch.ones_like(ratios) if kind.startswith("geometric") else ratios
    return Importance(kept.masked_fill(outside, 0.0), outside)


def exp(log_ratios: torch.Tensor) -> torch.Tensor:
    """exp that stays finite and positive: beyond +-MAX_LOG_RATIO the ratio is held and has no gradient. NaN stays."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

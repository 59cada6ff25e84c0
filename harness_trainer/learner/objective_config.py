"""What a person may decide about the objective: advantages, loss, weights, corrections. Imports nothing heavy.

Owns the choices and which of them exclude each other; `advantages`, `objective` and `corrections` hold the formulas.
The defaults are plain GRPO with DAPO's token mean.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness_trainer.learner.advantages import Estimator

Loss = Literal["clip", "cispo", "gspo"]
Aggregation = Literal["token_mean", "rollout_mean", "constant"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"]


class ObjectiveConfig(BaseModel):
    """Example: `ObjectiveConfig(loss="gspo", aggregation="rollout_mean", epsilon=3e-4, epsilon_high=4e-4)`."""

    model_config = ConfigDict(extra="forbid")

    advantage: Estimator = Field(
        "group_std",
        description="what a rollout's reward is compared with: group_std (GRPO), group_mean (Dr. GRPO), leave_one_out"
        " (RLOO), global_std (group's mean, step's spread), global (step's mean and spread)",
    )
    loss: Loss = Field(
        "clip",
        description="clip (PPO's and GRPO's clipped ratio), cispo (clipped weight, every token keeps its gradient),"
        " gspo (one clipped ratio per rollout; epsilons near 3e-4)",
    )
    aggregation: Aggregation = Field(
        "token_mean",
        description="token_mean (DAPO: every trained token of the step weighs the same), rollout_mean (every rollout"
        " does), constant (Dr. GRPO: sum over tokens / (rollouts x constant_tokens))",
    )
    constant_tokens: int | None = Field(
        None, ge=1, description="divisor per rollout of aggregation constant, in tokens"
    )
    epsilon: float = Field(0.2, gt=0, lt=1, description="lower clip of the probability ratio at 1 - epsilon")
    epsilon_high: float | None = Field(
        None, gt=0, description="upper clip of the probability ratio at 1 + epsilon_high; None = epsilon"
    )
    dual_clip: float | None = Field(
        None, gt=1, description="a ratio above this has no gradient where the advantage is negative; None = off"
    )
    importance_correction: Correction = Field(
        "none",
        description="how the mismatch with the policy that sampled is corrected: none (the clipped ratio is that"
        " against it), or a weight instead: token_truncate (TIS), token_mask (IcePop), sequence_truncate,"
        " sequence_mask, geometric_mask (per-token mean of a rollout)",
    )
    importance_max: float = Field(3.0, gt=1, description="weights above are cut (truncate) or dropped (mask)")
    importance_min: float | None = Field(
        None, gt=0, lt=1, description="weights below are raised (truncate) or dropped (mask); None = no bound"
    )
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL divergence to the model that the run started from; > 0 keeps a copy"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    truncated: Literal["train", "mask", "penalize"] = Field(
        "train",
        description="rollouts cut by a limit: trained like others, left out of the loss (their reward stays in the"
        " baseline), or trained with truncation_penalty taken off their reward",
    )
    truncation_penalty: float = Field(0.0, ge=0, description="taken off a truncated rollout's reward")
    turn_reward_weight: float = Field(
        0.0, ge=0, description="weight of turn-level advantages beside the outcome's, where a rollout has turn rewards"
    )

    @property
    def clip_high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_whole_rollouts(self) -> bool:
        """Whether a token's term depends on all trained tokens of its rollout."""
        return self.loss == "gspo" or self.importance_correction.startswith(("sequence", "geometric"))

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        for wrong, advice in self._exclusions():
            if wrong:
                raise ValueError(advice)
        return self

    def _exclusions(self) -> list[tuple[bool, str]]:
        corrected = self.importance_correction != "none"
        return [
            (
                self.loss == "gspo" and self.aggregation != "rollout_mean",
                "gspo's ratio is a rollout's, so each rollout must weigh the same: set aggregation to rollout_mean",
            ),
            (
                self.aggregation == "constant" and self.constant_tokens is None,
                "aggregation constant needs constant_tokens: set it to about the most tokens a rollout may sample",
            ),
            (
                self.aggregation != "constant" and self.constant_tokens is not None,
                "constant_tokens has no effect here: set aggregation to constant, or leave it out",
            ),
            (
                corrected and self.loss != "clip",
                f"with one optimizer step per batch a corrected ratio is 1, so {self.loss} would clip nothing:"
                " set importance_correction to none, or loss to clip",
            ),
            (
                corrected and self.dual_clip is not None,
                "dual_clip would never act on a corrected ratio, which is 1: set importance_correction to none, or"
                " leave dual_clip out (importance_max bounds the weight)",
            ),
            (
                not corrected and self.importance_min is not None,
                "importance_min has no effect here: choose an importance_correction, or leave it out",
            ),
            (
                self.dual_clip is not None and self.loss == "cispo",
                "cispo already bounds every weight at 1 + epsilon_high: leave dual_clip out",
            ),
            (
                self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high,
                f"dual_clip must lie above the upper clip, {1 + self.clip_high:g}: raise it (3 is usual)",
            ),
            (
                self.truncated == "penalize" and self.truncation_penalty == 0,
                "truncated penalize needs truncation_penalty: set it to a part of the reward's range",
            ),
            (
                self.truncated != "penalize" and self.truncation_penalty > 0,
                "truncation_penalty has no effect here: set truncated to penalize, or leave it out",
            ),
        ]

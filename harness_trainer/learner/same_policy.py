"""The learner is to score tokens as the engine that sampled them does: nothing random in the model, and a look at it.

Owns both. A model that the learner computes otherwise (an attention it does not know, another temperature) trains
without an error, away from the policy that samples. `trl_compat` calls this for the model, and before the optimizer's
step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from harness_trainer.errors import SetupError
from harness_trainer.learner.objective import LOGPROB_DIFFERENCE
from harness_trainer.learner.step_batch import StepBatch

logger = logging.getLogger(__name__)

# Nats by which the log-probabilities of one policy differ on average between engine and learner. The mean of the ratio
# would not do: under the policy that sampled, its expectation is 1 whatever the learner computes. Rounding has no
# direction: float32 beside bfloat16 is within 0.001, and a mixture of experts that routes some tokens otherwise, or an
# engine in 8 bits, within some hundredths. At 0.5 the average token is 1.6 times as likely to one as to the other.
WARN, END = 0.05, 0.5
# Below so many tokens a few odd ones decide the mean: not enough to end a run on, nor to warn.
ENOUGH_TO_WARN, ENOUGH_TO_END = 64, 256
_NOISE = ("jitter_noise", "input_jitter_noise")  # of a router's input, in training only

_CAUSES = (
    "the model has parts that it computes otherwise (ALiBi attention, say), the engine's weights are quantized, or its"
    " log-probabilities are of another temperature or of what top_p, top_k, a response_format or a forced tool_choice"
    " left"
)


def without_dropout(model: torch.nn.Module) -> None:
    """Switch off what a model does at random in training: no engine does. Its config is saved, and stays as it is."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():  # those that call the function with a number of their own
            if isinstance(value, float) and ("drop" in name or name in _NOISE):
                setattr(module, name, 0.0)


def look(metrics: Mapping[str, Sequence[Any]], batch: StepBatch, *, model: str, step: int, ends: bool) -> None:
    """At an on-policy step, before its update. `metrics` has (sum, tokens) of the difference; `step` counts from 1.

    Raises SetupError at the run's first step, if it `ends` by that, when the learner computes another policy than the
    engine's; warns else and later, and where the engine sampled from less than the whole softmax: what a grammar or
    top_p leaves out makes that difference, too.
    """
    noted = metrics.get(LOGPROB_DIFFERENCE)
    if max(batch.staleness, default=1) > 0 or not noted:
        return
    total, tokens = (sum(part) for part in zip(*noted, strict=True))
    if tokens < ENOUGH_TO_WARN:
        return
    difference = total / tokens
    if ends and not batch.is_shaped and step == 1 and abs(difference) > END and tokens >= ENOUGH_TO_END:
        raise SetupError(
            f"the learner does not compute {model} as the engine does: with the same weights log-probabilities of"
            f" {tokens:.0f} sampled tokens differ by {difference:+.2f} on average. Take another model, or other"
            f" sampling settings ({_CAUSES}), or set learner.verify_sync to never"
        )
    if abs(difference) > WARN:
        logger.warning(
            "step %d: with the same weights log-probabilities of the learner differ by %+.3f on average from the"
            " engine's, over %.0f tokens, so the run may learn the wrong thing: %s",
            step, difference, tokens, _CAUSES,
        )  # fmt: skip

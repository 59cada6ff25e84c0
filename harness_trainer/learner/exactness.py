"""How exact a captured row is: its log-probabilities against a plain Transformers forward pass.

Owns the comparison only; whoever calls it (tests, a benchmark) loads the weights of each policy version. Nothing of the
learner's own packing, attention or fused head takes part, so that it can judge them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from harness_trainer.learner.rows import Row


@dataclass(slots=True)
class Exactness:
    """Largest |captured - recomputed| log-probability in nats, over two kinds of tokens; None = no such token.

    `same_*`: tokens of a reply up to its first weight update; everything they attend to was computed by the policy
    that sampled them (the engine drops its prefix cache on an update), so this should be rounding error.
    `mixed_*`: tokens of a reply after an update in its middle. An engine that keeps the keys and values of the policy
    before cannot be reproduced by any single set of weights there; vLLM computes them anew (measured: as exact as the
    rest). Kept apart, so that a change of that is seen and not mistaken for a fault of capture.
    """

    same_max_diff: float | None = None
    num_same: int = 0
    mixed_max_diff: float | None = None
    num_mixed: int = 0

    def add(self, diff: float, *, mixed: bool) -> None:
        if mixed:
            self.mixed_max_diff = max(diff, self.mixed_max_diff or 0.0)
            self.num_mixed += 1
        else:
            self.same_max_diff = max(diff, self.same_max_diff or 0.0)
            self.num_same += 1

    def merge(self, other: Exactness) -> None:
        """Take in what was found for another row."""
        for diff, num, mixed in (
            (other.same_max_diff, other.num_same, False),
            (other.mixed_max_diff, other.num_mixed, True),
        ):
            if diff is not None:
                self.add(diff, mixed=mixed)
                if mixed:
                    self.num_mixed += num - 1
                else:
                    self.num_same += num - 1


def recompute_logprobs(model: Any, ids_N: list[int], temperature: float = 1.0) -> list[float | None]:
    """Log-probability (nats) of each id given those before it, by one forward pass; None for the first.

    `model` is a Transformers causal language model with its ordinary attention. `temperature` divides the logits, as
    in sampling.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids = torch.tensor([ids_N], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
            picked = torch.gather(torch.log_softmax(logits, dim=-1), 1, ids[0, 1:, None])
    finally:
        model.train(was_training)
    return [None, *picked[:, 0].tolist()]


def check_row(row: Row, model_of: Callable[[int], Any], temperature: float = 1.0) -> Exactness:
    """Compare every trained token of the row with the weights of the version that sampled it.

    `model_of(version)` returns that policy's model; it is asked once per version, oldest first. A run of trained tokens
    without a gap is taken for one reply: two replies that touch are judged as if an update between them had come in
    mid-reply, which errs on the side of reporting.
    """
    mixed_N = _after_an_update(row)
    found = Exactness()
    for version in sorted({v for v, trained in zip(row.versions_N, row.mask_N, strict=True) if trained}):
        recomputed = recompute_logprobs(model_of(version), row.ids_N, temperature)
        for position, expected in enumerate(recomputed):
            if row.mask_N[position] and row.versions_N[position] == version and expected is not None:
                found.add(abs(row.logprobs_N[position] - expected), mixed=mixed_N[position])
    return found


def _after_an_update(row: Row) -> list[bool]:
    """For each position: sampled after the first change of version within its run of trained tokens."""
    mixed_N: list[bool] = []
    first: int | None = None  # version that began the current run
    mixed = False
    for trained, version in zip(row.mask_N, row.versions_N, strict=True):
        if not trained:
            first, mixed = None, False
        elif first is None:
            first = version
        else:
            mixed = mixed or version != first
        mixed_N.append(bool(trained) and mixed)
    return mixed_N

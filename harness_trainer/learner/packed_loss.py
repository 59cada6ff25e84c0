"""From a packed micro-batch to its loss: one forward pass, the terms of its trained tokens, the objective.

Owns what stands between a step's rows and `objective`: which rollout, weight and advantage each trained token has, the
ratio of a rollout that is spread over several micro-batches, and the frozen reference. `trl_compat` packs the rows,
owns the trainer and calls this; the model is one that TRL gave its fused head.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness_trainer.learner.objective import Terms, loss_weights
from harness_trainer.learner.objective_config import ObjectiveConfig

_TREE = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


@dataclass(frozen=True, slots=True)
class Scored:
    """What one forward pass says of its M trained tokens, in nats."""

    log_probs_M: torch.Tensor
    entropy_M: torch.Tensor | None  # None = the model's head was not given one
    aux_loss: torch.Tensor | None = None  # of a mixture of experts, when asked for


def label_micro_batches(
    micro_batches: Sequence[dict[str, Any]],
    samples: Sequence[Sequence[dict[str, Any]]],
    config: ObjectiveConfig,
) -> None:
    """Add to each micro-batch what its trained tokens weigh, in the order in which TRL packed them.

    `samples[i]` are those of micro-batch i, in the order of its `segment_id`. Sets `advantages` and `weights` (1, M),
    `rollout` (1, M; from 0 within the micro-batch), `rollouts` (the step's numbers of them), `rollout_tokens` (R), and
    `is_spread`: whether one of them has tokens in another micro-batch too.
    """
    tokens: Counter[int] = Counter()
    for of_batch in samples:
        for sample in of_batch:
            tokens[sample["rollout"]] += int(sample["completion_mask"][1:].sum())
    order = sorted(tokens)
    weight_of = dict(
        zip(order, loss_weights([tokens[r] for r in order], config.aggregation, config.constant_tokens), strict=True)
    )
    for batch, of_batch in zip(micro_batches, samples, strict=True):
        rollouts = sorted({sample["rollout"] for sample in of_batch})
        place = {rollout: i for i, rollout in enumerate(rollouts)}
        counts = [int(sample["completion_mask"][1:].sum()) for sample in of_batch]
        advantages = [s["advantages"][1:][s["completion_mask"][1:] == 1] for s in of_batch]
        batch["advantages"] = torch.from_numpy(np.concatenate(advantages)).to(torch.float32)[None]
        batch["weights"] = _spread([weight_of[s["rollout"]] for s in of_batch], counts, torch.float32)
        batch["rollout"] = _spread([place[s["rollout"]] for s in of_batch], counts, torch.long)
        batch["rollouts"] = rollouts
        batch["rollout_tokens"] = torch.tensor([float(tokens[rollout]) for rollout in rollouts])
    homes = Counter(rollout for batch in micro_batches for rollout in batch["rollouts"])
    for batch in micro_batches:
        batch["is_spread"] = any(homes[rollout] > 1 for rollout in batch["rollouts"])


def nothing_to_train() -> dict[str, Any]:
    """A sample for a pass that is to change nothing: one token and its successor, with no advantage."""
    zeros = np.zeros(2)
    return {
        "input_ids": np.zeros(2, dtype=np.int64),
        "completion_mask": np.array([0, 1]),
        "old_log_probs": zeros.astype(np.float32),
        "advantage": 0.0,
        "group_id": -1,
        "metrics": {},
    }


def _spread(values: Sequence[float], counts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(counts))[None]


def score(model: Any, batch: dict[str, Any], *, aux_loss: bool = False) -> Scored:
    """One forward pass over the micro-batch's distinct tokens."""
    real = batch["attention_mask"].bool()
    longest_q, longest_k = batch["tree_max_seqlens"][0].tolist()
    outputs = model(
        input_ids=batch["input_ids"][real][None],
        position_ids=batch["position_ids"][real][None],
        shift_labels=batch["shift_labels"][real][None],
        fused_lm_head=True,
        tree_max_seqlen_q=longest_q,
        tree_max_seqlen_k=longest_k,
        **{name: batch[name][batch[name] >= 0] for name in _TREE},
        **({"output_router_logits": True} if aux_loss else {}),
    )
    index = batch["token_index"][batch["token_index"] >= 0]
    entropy = None if outputs.entropy is None else outputs.entropy.flatten()[index]
    return Scored(outputs.log_probs.flatten()[index], entropy, outputs.aux_loss if aux_loss else None)


def terms_of(batch: dict[str, Any], scored: Scored, reference_M: torch.Tensor | None = None) -> Terms:
    """The loss terms of a labelled micro-batch."""
    chosen = batch["token_index"] >= 0
    return Terms(
        log_probs_M=scored.log_probs_M,
        behaviour_M=batch["old_log_probs"][chosen],
        advantages_M=batch["advantages"][chosen],
        weights_M=batch["weights"][chosen],
        rollout_M=batch["rollout"][chosen],
        tokens_R=batch["rollout_tokens"],
        entropy_M=scored.entropy_M,
        reference_M=reference_M,
        rollout_sums_R=batch.get("rollout_sums"),
    )


def sum_spread_rollouts(
    micro_batches: Sequence[dict[str, Any]],
    log_probs_of: Callable[[dict[str, Any]], Any],
    *,
    num_passes: int = 0,
    everywhere: Callable[[Mapping[int, float]], Iterable[Mapping[int, float]]] = lambda sums: [sums],
) -> int:
    """Set `rollout_sums` where a micro-batch holds a part of a rollout only, by a forward pass without gradient.

    `log_probs_of(batch)` gives the log-probabilities of its trained tokens. Returns the number of passes it took, which
    is at least `num_passes`. `everywhere` gives the sums of all processes that have micro-batches of the step.
    """
    spread = [batch for batch in micro_batches if batch["is_spread"]]
    sums: dict[int, float] = defaultdict(float)
    like = torch.zeros(())
    with torch.no_grad():
        for batch in spread:
            like = terms_of(batch, Scored(log_probs_of(batch), None)).log_ratio_sums()
            for rollout, part in zip(batch["rollouts"], like.tolist(), strict=True):
                sums[rollout] += part
        for _ in range(len(spread), num_passes):
            log_probs_of(micro_batches[0])
    whole: dict[int, float] = defaultdict(float)
    for parts in everywhere(dict(sums)):
        for rollout, part in parts.items():
            whole[rollout] += part
    for batch in spread:
        batch["rollout_sums"] = like.new_tensor([whole[rollout] for rollout in batch["rollouts"]])
    return max(len(spread), num_passes)


class Reference:
    """The policy that the run started from, frozen: a copy of it, or the trained model without its adapter."""

    def __init__(self, model: Any, make_copy: Callable[[], Any]) -> None:
        """`model` is the trained one, unwrapped; `make_copy` is called where it has no adapter to switch off."""
        self._model = model
        self._copy = None if hasattr(model, "disable_adapter") else make_copy().eval().requires_grad_(False)

    def log_probs(self, batch: dict[str, Any]) -> torch.Tensor:
        """Of the micro-batch's trained tokens, in nats, without gradient."""
        with torch.no_grad(), self._frozen() as model:
            return score(model, batch).log_probs_M

    @contextmanager
    def _frozen(self) -> Iterator[Any]:
        if self._copy is not None:
            yield self._copy
            return
        with self._model.disable_adapter():
            yield self._model

"""How many tokens go through the model for each trained one, beside the same turns trained as separate rows.

    python -m benchmarks.packing [--turns 20] [--group-size 8] [--groups 2] [--token-budget 16384]

The rollouts are tool conversations that went through the real gateway (a scripted engine, one byte per token). Ours:
the rows that the learner makes of their captures, packed as it packs a step. Beside it, of the same turns:

- separate rows: each call a row of its own, prompt and reply, nothing shared; what the goal is about;
- TRL's packing of those: TRL's own batcher folds the same separate rows into prefix trees, so that only what does not
  fit into one tree beside its prefix is forwarded again;
- TRL's rows: TRL joins the calls of a conversation itself (and forks or rewrites where they do not continue each
  other), then its batcher packs them.

Two shapes: a history that is only ever added to, and one from which the agent drops each reply's reasoning, so that
every turn begins another row. "rewritten" counts sampled tokens that a way trains not at all: TRL makes context of a
reply's tail that the next prompt does not repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scripted_groups import Recorded, Shape, record

GOAL = 0.5  # of the separate rows' forwarded tokens per trained token
OURS, SEPARATE, SEPARATE_PACKED, TRL_ROWS = "ours", "separate rows", "TRL's packing of those", "TRL's rows"


@dataclass(frozen=True, slots=True)
class Way:
    """What one way of training the step comes to."""

    rows: int
    passes: int  # forward passes; each at most the token budget, but for separate rows, which are packed by length
    forwarded: int  # tokens
    trained: int  # tokens

    @property
    def per_trained(self) -> float:
        return self.forwarded / self.trained


def measure(groups: Sequence[Sequence[Recorded]], token_budget: int) -> dict[str, Way]:
    separate = [row for group in groups for recorded in group for row in _rows_per_turn(recorded)]
    return {
        OURS: _ours(groups, token_budget),
        SEPARATE: Way(
            len(separate),
            -(-sum(len(row["input_ids"]) for row in separate) // token_budget),
            sum(len(row["input_ids"]) for row in separate),
            _num_trained(separate),
        ),
        SEPARATE_PACKED: _packed_by_trl(separate, token_budget),
        TRL_ROWS: _packed_by_trl([row for g in groups for r in g for row in _rows_of_trl(r)], token_budget),
    }


def _ours(groups: Sequence[Sequence[Recorded]], token_budget: int) -> Way:
    from harness_trainer.learner.group_source import TrainGroup
    from harness_trainer.learner.objective_config import ObjectiveConfig
    from harness_trainer.learner.rows import rows_from_trace
    from harness_trainer.learner.step_batch import build_step
    from harness_trainer.learner.trl_compat import pack_micro_batches

    whole = []
    for group in groups:
        results = [recorded.result for recorded in group]
        rows = [rows_from_trace(result.trace or {}).rows for result in results]
        whole.append(TrainGroup(results[0].group_id, results[0].task, results, rows))
    samples = build_step(whole, lambda version: 0, ObjectiveConfig()).samples
    trees = pack_micro_batches(samples, token_budget)
    return Way(len(samples), len(trees), sum(len(tree.tokens) for tree in trees), _num_trained(samples))


def _sample(ids: Sequence[int], mask: Sequence[int], group_id: int) -> dict[str, Any]:
    """A row as TRL's batchers take it; what the packing does not look at is left out."""
    return {"input_ids": np.array(ids), "completion_mask": np.array(mask), "group_id": group_id}


def _rows_per_turn(recorded: Recorded) -> list[dict[str, Any]]:
    return [
        _sample(
            [*turn.prompt_ids_P, *turn.completion_ids_T],
            [0] * len(turn.prompt_ids_P) + [1] * len(turn.completion_ids_T),
            recorded.result.group_id,
        )
        for turn in recorded.turns
    ]


def _rows_of_trl(recorded: Recorded) -> list[dict[str, Any]]:
    from trl.experimental.async_grpo import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

    turns = [
        TurnRecord(list(turn.prompt_ids_P), turn.completion_ids_T, [lp or 0.0 for lp in turn.logprobs_T])
        for turn in recorded.turns
    ]
    rows, _ = _chain_to_sequences(turns, recorded.result.rollout_id, AsyncGRPOConfig.fork_threshold_tokens)
    return [_sample(row.input_ids, row.completion_mask, recorded.result.group_id) for row in rows]


def _packed_by_trl(samples: Sequence[dict[str, Any]], token_budget: int) -> Way:
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

    def fed() -> Any:
        yield from samples
        # The batcher hands a tree over when the next row does not fit; this one fits nowhere.
        yield {**_sample(range(1000, 1000 + token_budget), [0] * token_budget, -1)}

    trees = [tree for (tree,) in TokenBudgetBatcher(fed(), 1, token_budget, defaultdict(list))]
    assert sum(len(tree.samples) for tree in trees) == len(samples)
    return Way(len(samples), len(trees), sum(len(tree.tokens) for tree in trees), _num_trained(samples))


def _num_trained(samples: Sequence[dict[str, Any]]) -> int:
    return sum(int(sample["completion_mask"][1:].sum()) for sample in samples)


def show(title: str, found: dict[str, Way]) -> bool:
    """Print the ways of one shape; whether the goal is met."""
    sampled, base = found[SEPARATE].trained, found[SEPARATE].per_trained
    print(f"\n{title}, {sampled:,} sampled tokens\n")
    columns = ("rows", "passes", "forwarded", "trained", "rewritten", "per trained", "of separate", "goal")
    print(f"{'':<24}" + "".join(f"{name:>12}" for name in columns) + "   met")
    for name, way in found.items():
        numbers = f"{way.rows:>12,}{way.passes:>12,}{way.forwarded:>12,}{way.trained:>12,}{sampled - way.trained:>12,}"
        goal = f"{GOAL:>12.2f}   {'yes' if way.per_trained <= GOAL * base else 'NO'}" if name == OURS else ""
        print(f"{name:<24}{numbers}{way.per_trained:>12.2f}{way.per_trained / base:>12.3f}{goal}")
    return found[OURS].per_trained <= GOAL * base


async def run(shape: Shape, num_groups: int, token_budget: int) -> bool:
    met = True
    for title, keeps in (("history that is only added to", True), ("reasoning dropped from the history", False)):
        with tempfile.TemporaryDirectory(prefix="bench-packing-") as folder:
            groups = await record(Path(folder), num_groups, replace(shape, keeps_reasoning=keeps))
        met &= show(title, await asyncio.to_thread(measure, groups, token_budget))
    return met


def main() -> int:
    default = Shape()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=default.num_turns)
    parser.add_argument("--group-size", type=int, default=default.group_size)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--token-budget", type=int, default=16384, help="distinct tokens of one forward pass")
    parser.add_argument("--quick", action="store_true", help="the smallest run that goes through everything")
    options = parser.parse_args()
    shape = Shape(group_size=options.group_size, num_turns=options.turns)
    if options.quick:
        shape, options.groups = Shape(group_size=2, num_turns=3), 1
    rows = f"groups of {shape.group_size}, {shape.num_turns} turns, token budget {options.token_budget:,}"
    print(f"forwarded tokens per trained token: {options.groups} {rows}")
    met = asyncio.run(run(shape, options.groups, options.token_budget))
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())

"""Groups as the runner hands them over, for learners that run on a store alone."""

from __future__ import annotations

from typing import Any

from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult


def finish_group(store: RolloutStore, group_id: int, *, version: int = 1) -> None:
    """Two rollouts of one turn each, sampled by `version`, with the rewards 0 and 1: ready to be trained on."""
    store.open_group(group_id, "task", "h")
    for slot in range(2):
        result = RolloutResult(
            f"g{group_id}-{slot}", group_id, "task", "h", 0, Outcome.OK, float(slot), stages_s={"agent": 2.0},
            trace={"schema_version": 1, "turns": [_turn(group_id, slot, version)]}, num_turns=1,
            tool_calls={"bash": slot},
        )  # fmt: skip
        store.start_rollout(result.rollout_id, group_id, slot, 0)
        store.finish_rollout(result, final=True)
    store.group_ready(group_id)


def _turn(group_id: int, slot: int, version: int) -> dict[str, Any]:
    return {
        "node_id": "t",
        "prompt_token_ids": [5, 6, 7],
        "completion_token_ids": [10 + group_id, 30 + slot],
        "per_token_logps": [-4.6, -4.6],
        "loss_mask": [0, 0, 0, 1, 1],
        "request": {},
        "response": {},
        "metadata": {"policy_versions": [{"version": f"v{version}", "start": 0, "end": 2}]},
    }

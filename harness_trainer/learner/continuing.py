"""Where a run goes on: the checkpoint, the store that outlived it, and the version numbers that are used up.

Owns what a start of the learner must set right before anything is trained, because a run may be killed between any two
of its writes. They are, in order: the store marks a step's groups trained; the next version is announced; the engine
gets it; the store says it is published; `metrics.jsonl` gets the step's line; the checkpoint is written, its mark of
completeness last; older checkpoints are removed. The store is thus never behind a checkpoint. The learner process calls
this.
"""

from __future__ import annotations

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.checkpoints import HarnessState
from harness_trainer.rollouts.lineage import BASE
from harness_trainer.rollouts.store import RolloutStore


def announce(store: RolloutStore, version: int) -> None:
    """Before `version` is sent: from here on no other weights may be called by that name, whatever happens."""
    store.announce(version)


def used_up(store: RolloutStore) -> int:
    """The highest version that any engine of this run may have reported; 0 = none."""
    return store.used_up()


def settle(store: RolloutStore, state: HarnessState | None) -> None:
    """Make the store's trained groups those of the checkpoint (None = the run starts from its base model).

    Groups of later steps wait to be trained again, and the next version that is announced descends from the
    checkpoint's, at no step from it. Raises TrainingFailed when the store is older than the checkpoint:
    its groups would be sampled and trained a second time.
    """
    store.rewind(0 if state is None else state.step)
    if state is None:
        store.continue_from(BASE, 0)
        return
    if store.next_group_id() < state.next_group:
        raise TrainingFailed(
            f"the checkpoint of step {state.step} is from a run of {state.next_group} groups, store.sqlite knows "
            f"{store.next_group_id()}: put the run's own store back, or give another --run-dir"
        )
    for step, group_ids in state.trained_groups.items():
        waiting = [group_id for group_id in group_ids if store.fate(group_id)[0] != "trained"]
        if waiting:
            store.mark_trained(waiting, step)
    store.continue_from(state.policy_version, state.step)

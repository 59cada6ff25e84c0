"""What a start of the learner sets right: groups, version numbers, and lines of steps that will be taken again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.__main__ import _forget_steps_after
from harness_trainer.learner.checkpoints import HarnessState
from harness_trainer.learner.continuing import announce, settle, used_up
from harness_trainer.rollouts.store import RolloutStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    """Eight finished groups; of each of the first three steps one is trained."""
    store = RolloutStore(tmp_path / "store.sqlite")
    for group_id in range(8):
        store.open_group(group_id, "task", "h")
        store.group_ready(group_id)
    for step, group_id in enumerate((0, 2, 4), 1):
        store.mark_trained([group_id], step)
    store.mark_dropped(1, "no_spread")
    yield store
    store.close()


def states(store: RolloutStore) -> dict[int, str]:
    return {group_id: store.fate(group_id)[0] for group_id in range(8)}


def test_groups_of_later_steps_wait_again_and_dropped_ones_stay_dropped(store: RolloutStore) -> None:
    settle(store, HarnessState(1, 2, {1: [0]}, next_group=6))
    assert states(store) == {0: "trained", 1: "dropped"} | dict.fromkeys(range(2, 8), "ready")


def test_without_a_checkpoint_everything_is_trained_again(store: RolloutStore) -> None:
    settle(store, None)
    assert [group_id for group_id, state in states(store).items() if state == "ready"] == [0, 2, 3, 4, 5, 6, 7]


def test_what_the_checkpoint_was_trained_on_is_marked_where_the_store_lost_it(store: RolloutStore) -> None:
    settle(store, HarnessState(3, 4, {1: [0], 2: [2, 3], 3: [4]}, next_group=8))
    assert [group_id for group_id, state in states(store).items() if state == "trained"] == [0, 2, 3, 4]


def test_a_store_of_fewer_groups_is_refused(store: RolloutStore) -> None:
    with pytest.raises(TrainingFailed, match=r"run of 9 groups, store\.sqlite knows 8"):
        settle(store, HarnessState(3, 4, {1: [0]}, next_group=9))


def test_a_checkpoint_of_an_older_release_says_nothing_of_its_position(store: RolloutStore) -> None:
    settle(store, HarnessState(1, 2, {1: [0]}))
    assert states(store)[2] == "ready"


def test_a_version_is_used_up_once_it_is_announced(store: RolloutStore) -> None:
    assert used_up(store) == 0
    announce(store, 5)
    assert used_up(store) == 5
    store.set_state("policy_version", "7")
    assert used_up(store) == 7


def test_lines_of_steps_that_come_again_go_and_so_does_a_line_that_was_cut_off(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "lo')
    _forget_steps_after(metrics, 2)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2]


def test_what_is_announced_after_a_resume_descends_from_the_checkpoint_at_no_step(store: RolloutStore) -> None:
    settle(store, None)
    for step, version in ((0, 1), (1, 2), (2, 3), (3, 4)):
        if step:
            store.mark_trained([step], step)
        announce(store, version)
        store.publish(version)
    settle(store, HarnessState(1, 2, {1: [1]}))
    announce(store, 5)
    lineage = store.lineage()
    assert [lineage.distance(version, 5) for version in (1, 2, 3, 4)] == [1, 0, 1, 2]
    settle(store, None)
    announce(store, 6)
    assert [store.lineage().distance(version, 6) for version in (1, 2, 4, 5)] == [0, 1, 3, 1]


def test_killed_between_a_step_and_its_name_or_between_the_name_and_the_engine(store: RolloutStore) -> None:
    settle(store, None)
    announce(store, 1)
    store.publish(1)
    store.mark_trained([3], 1)
    settle(store, None)  # killed before the step's weights had a name: the step is taken back
    announce(store, 2)
    assert store.lineage().distance(1, 2) == 0
    store.mark_trained([3], 1)
    announce(store, 3)
    settle(store, None)  # killed before the engine had them, or after it: nobody knows
    announce(store, 4)
    assert [store.lineage().distance(version, 4) for version in (1, 2, 3)] == [0, 0, 1]


def test_a_run_of_an_older_release_goes_on_by_numbers_before_its_checkpoint(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "old.sqlite")
    for key, value in (("policy_version", "7"), ("announced_version", "8"), ("rollout_schema", "3")):
        store.set_state(key, value)
    with store._write() as db:
        db.execute("DROP TABLE policy_versions")
    store.close()
    store = RolloutStore(tmp_path / "old.sqlite")
    settle(store, HarnessState(5, 6))
    assert used_up(store) == 8
    announce(store, 9)
    assert [store.lineage().distance(version, 9) for version in (5, 6, 7, 8)] == [4, 0, 2, 1]
    store.close()

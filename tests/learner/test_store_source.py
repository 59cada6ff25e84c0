"""Groups reach the learner once, as traces turned to rows; a runner that is dead or stuck ends the wait."""

import pytest

from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.store_source import StoreGroupSource
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult

TRACE = {
    "schema_version": 1,
    "turns": [
        {
            "node_id": "t",
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3],
            "per_token_logps": [-0.5],
            "loss_mask": [0, 0, 1],
            "request": {},
            "response": {},
            "metadata": {"policy_versions": [{"version": "v1", "start": 0, "end": 1}]},
        }
    ],
}


@pytest.fixture
def store(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    yield store
    store.close()


def finish_group(store, group_id, traces):
    store.open_group(group_id, "task", "h")
    for slot, trace in enumerate(traces):
        rollout_id = f"g{group_id}-{slot}"
        store.start_rollout(rollout_id, group_id, slot, 0)
        result = RolloutResult(rollout_id, group_id, "task", "h", 0, Outcome.OK, 1.0, trace=trace)
        store.finish_rollout(result, final=True)
    store.group_ready(group_id)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def source(tmp_path, store, clock):
    source = StoreGroupSource(tmp_path / "store.sqlite", alive=lambda: None, starved_after_s=100, clock=clock)
    yield source
    source.stop()


def test_a_group_comes_once_with_the_rows_of_its_traces(store, source):
    finish_group(store, 0, [TRACE, None])
    group = source.next_group(0)
    assert [[row.mask_N for row in rows] for rows in group.rows] == [[[0, 0, 1]], []]
    assert source.next_group(0) is None
    source.on_trained([0], step=1)
    assert store.group_counts() == {"trained": 1}


def test_a_published_version_is_what_the_runner_sees(store, source):
    source.policy_changed(7)
    assert store.policy_version() == 7


def test_waiting_while_nothing_happens_ends_with_where_to_look(source, clock):
    source.check_health()
    clock.now = 99
    source.check_health()
    clock.now = 101
    with pytest.raises(TrainingFailed, match="runner.log"):
        source.check_health()


def test_a_rollout_that_starts_or_ends_is_progress(store, source, clock):
    source.check_health()
    clock.now = 90
    store.open_group(0, "task", "h")
    store.start_rollout("a", 0, 0, 0)
    source.check_health()
    clock.now = 189
    source.check_health()
    clock.now = 191
    with pytest.raises(TrainingFailed, match="101 s"):  # counted from the rollout's start, not from the run's
        source.check_health()


def test_a_step_longer_than_the_bound_is_not_taken_for_a_stuck_runner(store, source, clock):
    """The runner rightly idles while the learner is busy and enough groups wait."""
    finish_group(store, 0, [TRACE])
    finish_group(store, 1, [TRACE])
    source.check_health()
    assert source.next_group(0).group_id == 0
    clock.now = 5000
    source.on_trained([0], step=1)
    source.check_health()
    assert source.next_group(0).group_id == 1


def test_a_dead_runner_ends_the_wait_with_its_own_words(tmp_path, store):
    source = StoreGroupSource(tmp_path / "store.sqlite", alive=lambda: "disk full", starved_after_s=100)
    with pytest.raises(TrainingFailed, match="disk full"):
        source.check_health()
    source.stop()

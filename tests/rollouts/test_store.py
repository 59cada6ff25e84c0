"""The store hands every group over once, keeps unknown apart from zero, and survives restarts."""

import dataclasses
import json
import sqlite3

import pytest

from harness_trainer.errors import RunDirError
from harness_trainer.loops.base import ToolUse
from harness_trainer.rollouts.at_work import AtWork, Facts, Unfinished
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult


def result(rollout_id, group_id, reward=0.5, outcome=Outcome.OK):
    return RolloutResult(rollout_id, group_id, "t", "h", 0, outcome, reward, trace={"schema_version": 1, "turns": []})


def fill(store, group_id, rewards):
    store.open_group(group_id, "t", "h")
    for slot, reward in enumerate(rewards):
        store.start_rollout(f"g{group_id}-{slot}", group_id, slot, 0)
        store.finish_rollout(result(f"g{group_id}-{slot}", group_id, reward), final=True)
    store.group_ready(group_id)


@pytest.fixture
def store(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    yield store
    store.close()


def test_a_missing_reward_comes_back_as_none_and_not_as_zero(store):
    fill(store, 0, [None, 0.0])
    assert [r.reward for r in store.take_ready(set()).results] == [None, 0.0]


def test_what_a_loop_of_ours_saw_of_its_calls_comes_back(store):
    use = ToolUse(num_rounds=2, num_unknown=1, exhausted=True, seconds={"guess": 0.5}, num_ran={"guess": 3})
    store.open_group(0, "task", "Wordle")
    store.start_rollout("r0", 0, 0, 0)
    store.finish_rollout(dataclasses.replace(result("r0", 0), tool_use=use), final=True)
    store.group_ready(0)
    assert store.results(0)[0].tool_use == use


def test_half_a_surrogate_pair_is_kept_escaped_wherever_it_stands(store):
    """An agent printed it, or the tests named a reward so; every other field comes back as it was."""
    half, kept = "bad \ud83d", "bad \\ud83d"
    use = ToolUse(num_rounds=2, seconds={half: 0.5}, num_ran={half: 3})
    trace = {"turns": [{half: [half, None, 2.5, True]}], "seed": 2**64, "edge": 2**64 - 1, "low": -(2**63) - 1}
    told = dataclasses.replace(
        result("r0", 0), detail=half, findings=["fine", half], rewards={half: 0.5}, tool_use=use, trace=trace
    )
    store.open_group(0, "task", "h")
    store.start_rollout("r0", 0, 0, 0)
    store.finish_rollout(told, final=True)
    assert store.results(0) == [
        dataclasses.replace(
            told,
            detail=kept,
            findings=["fine", kept],
            rewards={kept: 0.5},
            tool_use=ToolUse(num_rounds=2, seconds={kept: 0.5}, num_ran={kept: 3}),
            # JSON has no such numbers: to keep them as floats would be to change them.
            trace={
                "turns": [{kept: [kept, None, 2.5, True]}],
                "seed": str(2**64),
                "edge": 2**64 - 1,
                "low": str(-(2**63) - 1),
            },
        )
    ]


def test_half_a_surrogate_pair_in_a_reason_is_kept_escaped_and_can_be_shown(store):
    half, kept = "no image \ud83d", "no image \\ud83d"
    store.set_state("why", half)
    assert store.state("why") == kept
    assert store.setup_failed("t", half, quarantine_after=1)
    assert store.quarantined() == {"t": kept}
    store.tell("odd", half, name=half)
    (quarantined, odd) = store.notes(after=0)
    assert kept in quarantined.detail["line"] and quarantined.detail["reason"] == kept
    assert odd.detail == {"line": kept, "name": kept}


def test_groups_come_oldest_first_and_each_once(store):
    for group_id in (0, 1, 2):
        fill(store, group_id, [1.0])
    taken = set()
    while (group := store.take_ready(taken)) is not None:
        taken.add(group.group_id)
    assert taken == {0, 1, 2}
    store.mark_trained([0, 1], step=1)
    store.mark_dropped(2, "no spread")
    assert store.take_ready(set()) is None
    assert store.group_counts() == {"trained": 2, "dropped": 1}


def test_a_group_tells_the_step_that_trained_it(store):
    fill(store, 3, [0.0, 1.0])
    assert store.trained_step(3) is None and store.trained_step(4) is None
    store.mark_trained([3], 2)
    assert store.trained_step(3) == 2


def test_rewind_gives_back_what_was_trained_after_the_checkpoint_only(store):
    for group_id in range(3):
        fill(store, group_id, [1.0])
        store.mark_trained([group_id], step=group_id + 1)
    assert store.rewind(1) == 2
    assert store.take_ready(set()).group_id == 1
    assert store.take_ready({1}).group_id == 2
    assert store.take_ready({1, 2}) is None


def test_a_restart_knows_which_slots_are_missing(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.open_group(7, "haiku", "h")
    store.start_rollout("a", 7, 0, 0)
    store.finish_rollout(result("a", 7), final=True)
    store.start_rollout("b", 7, 1, 0)
    store.finish_rollout(result("b", 7, None, Outcome.INFRA_FAILED), final=False)
    store.start_rollout("c", 7, 2, 0)  # was running when the runner died
    store.close()
    again = RolloutStore(tmp_path / "store.sqlite")
    assert again.unfinished_groups() == [(7, "haiku", [0])]
    assert again.next_group_id() == 8
    again.close()


def test_a_retried_attempt_is_kept_but_does_not_stand_for_its_slot(store):
    store.open_group(0, "t", "h")
    store.start_rollout("a", 0, 0, 0)
    store.finish_rollout(result("a", 0, None, Outcome.INFRA_FAILED), final=False)
    store.start_rollout("b", 0, 0, 1)
    store.finish_rollout(result("b", 0, 1.0), final=True)
    store.group_ready(0)
    assert [r.rollout_id for r in store.take_ready(set()).results] == ["b"]
    assert store.outcome_counts() == {"infra_failed": 1, "ok": 1}


def test_a_store_of_a_newer_version_is_refused(tmp_path):
    path = tmp_path / "store.sqlite"
    store = RolloutStore(path)
    store.set_state("rollout_schema", "99")
    store.close()
    with pytest.raises(RunDirError, match="schema 99"):
        RolloutStore(path)


def test_a_file_that_is_no_database_is_one_line(tmp_path):
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"not a database, certainly not" * 100)
    with pytest.raises(RunDirError, match="store.sqlite"):
        RolloutStore(path)


def test_a_failed_write_changes_nothing(store):
    store.open_group(0, "t", "h")
    store.start_rollout("a", 0, 0, 0)
    with pytest.raises(RunDirError):
        store.start_rollout("a", 0, 1, 0)  # the id is taken
    assert isinstance(store._read("SELECT COUNT(*) FROM rollouts")[0][0], int)
    assert store.outcome_counts() == {"running": 1}


def test_two_processes_may_use_the_file_at_once(tmp_path, store):
    other = sqlite3.connect(tmp_path / "store.sqlite")
    fill(store, 0, [1.0])
    assert other.execute("SELECT COUNT(*) FROM rollouts").fetchone() == (1,)
    other.close()


def test_traces_come_back_with_their_rollouts_and_stay_out_of_lists(store):
    trace = {"schema_version": 1, "turns": [{"node_id": "a", "loss_mask": [0] * 50_000}]}
    store.open_group(0, "t", "h")
    store.start_rollout("a", 0, 0, 0)
    store.finish_rollout(RolloutResult("a", 0, "t", "h", 0, Outcome.OK, None, trace=trace, findings=["x"]), final=True)
    assert store.results(0)[0].trace == store.rollout("a").trace == store.find_rollout("a")[0].trace == trace
    assert [(r.trace, r.findings, r.reward) for r in store.rollouts()] == [(None, ["x"], None)]
    assert store._read("SELECT LENGTH(trace) FROM rollout_traces")[0][0] < 1000, "they are compressed"
    with pytest.raises(KeyError):
        store.rollout("b")


def test_a_store_of_schema_1_is_read_and_goes_on(tmp_path):
    path = tmp_path / "store.sqlite"
    store = RolloutStore(path)
    fill(store, 0, [0.5])
    store.set_state("rollout_schema", "1")
    old = {**dataclasses.asdict(store.rollout("g0-0")), "outcome": "ok"}
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE rollouts SET result = ?", (json.dumps(old).encode(),))
        db.execute("DROP TABLE rollout_traces")
    again = RolloutStore(path)
    assert again.results(0)[0].trace == {"schema_version": 1, "turns": []}
    fill(again, 1, [1.0])
    assert [r.reward for r in again.rollouts()] == [0.5, 1.0]
    again.close()


def test_a_store_of_schema_2_is_migrated_and_goes_on(tmp_path):
    path = tmp_path / "store.sqlite"
    store = RolloutStore(path)
    fill(store, 0, [0.5])
    store.set_state("rollout_schema", "2")
    store.close()
    with sqlite3.connect(path) as db:
        for table in ("task_records", "evaluations", "run_notes"):
            db.execute(f"DROP TABLE {table}")
        db.execute("ALTER TABLE rollout_groups DROP COLUMN evaluation")
    again, beside = RolloutStore(path), RolloutStore(path)
    again.publish(1)
    again.start_evaluation(0, [("x", "h")])
    assert beside.evaluation_groups(0) == [(-1, "x", "h", False)]
    assert again.group_counts() == {"ready": 1} and again.next_group_id() == 1
    assert again.state("rollout_schema") == "4"
    again.close()
    beside.close()


def test_a_store_of_schema_3_is_migrated_and_its_running_attempts_are_lost_as_they_were(tmp_path):
    path = tmp_path / "store.sqlite"
    store = RolloutStore(path)
    store.open_group(0, "t", "h")
    store.start_rollout("r0", 0, 0, 0)
    store.set_state("rollout_schema", "3")
    store.close()
    with sqlite3.connect(path) as db:
        for table in ("agents_at_work", "policy_versions"):
            db.execute(f"DROP TABLE {table}")
    again = RolloutStore(path)
    (lost,) = again.unfinished_rollouts()
    assert (lost.rollout_id, lost.at_work, lost.group_runs) == ("r0", None, True)
    assert again.close_lost() == 1 and again.unfinished_rollouts() == []
    assert again.state("rollout_schema") == "4"
    again.close()


FACTS = Facts(1.76e9, 600.0, 1290.5, 3, True, {"queue": 0.5, "create": 1.2})


def test_where_an_agent_works_is_known_until_its_attempt_is_over(store):
    store.open_group(4, "t", "h")
    store.start_rollout("r0", 4, 2, 1)
    store.start_rollout("r1", 4, 3, 0)
    store.note_agent("r0", "docker", "box-1", FACTS)
    first, second = store.unfinished_rollouts()
    assert first == Unfinished("r0", 4, 2, 1, "t", "h", True, AtWork("docker", "box-1", None, False, FACTS))
    assert second.at_work is None
    store.note_job("r0", "job-7")
    store.note_tests("r0")
    assert store.unfinished_rollouts()[0].at_work == AtWork("docker", "box-1", "job-7", True, FACTS)
    store.mark_dropped(4, "stale")
    assert [one.group_runs for one in store.unfinished_rollouts()] == [False, False]
    store.finish_rollout(result("r0", 4), final=True)
    assert [one.rollout_id for one in store.unfinished_rollouts()] == ["r1"]
    assert store._read("SELECT COUNT(*) FROM agents_at_work") == [(0,)]


def test_attempts_that_go_on_are_not_closed(store):
    store.open_group(0, "t", "h")
    for name in ("r0", "r1"):
        store.start_rollout(name, 0, 0, 0)
        store.note_agent(name, "local", f"box of {name}", FACTS)
    assert store.close_lost({"r1"}) == 1
    (kept,) = store.unfinished_rollouts()
    assert kept.rollout_id == "r1" and kept.at_work is not None
    assert store.outcome_counts() == {"cancelled": 1, "running": 1}
    assert store._read("SELECT rollout_id FROM agents_at_work") == [("r1",)]


def test_a_group_that_was_dropped_never_becomes_ready(store):
    store.open_group(0, "t", "h")
    store.mark_dropped(0, "stale")
    store.group_ready(0)
    assert store.fate(0) == ("dropped", "stale") and store.take_ready(set()) is None


def test_notes_are_kept_in_order_and_read_from_where_one_left_off(store):
    store.setup_failed("a", "no image", 1)
    store.start_evaluation(2, [("x", "h")])
    store.finish_evaluation(2, {"pass_at_1": None}, "two")
    first, second = store.notes(after=0)
    assert (first.kind, first.detail["task"]) == ("quarantined", "a")
    assert (second.kind, second.detail["line"], second.detail["pass_at_1"]) == ("evaluation", "two", None)
    assert store.notes(after=first.seq) == [second]


def test_each_replica_of_the_engine_has_policies_of_its_own(store):
    store.forget_engines(2)
    assert (store.engine_number(0), store.engine_number(1)) == (1, 1) and store.serving(2) == set()
    store.publish(1, engine={0: 1, 1: 1})
    assert store.serving(2) == {0, 1} and store.versions().engine == 1
    store.forget_engine(1)
    store.publish(2, engine={0: 1, 1: 1})  # what the second was sent died with it
    assert store.serving(2) == {0} and store.versions().engine == 2
    store.publish(2, engine={1: 2})
    store.forget_engine(0)
    assert store.serving(2) == {1} and store.versions().engine == 2, "as long as any has it"
    store.forget_engines(1)
    assert store.serving(2) == set() and store.versions().engine == 0, "a run that goes on with one has no second"
    store.publish(3, engine=store.engine_number())
    assert store.serving(1) == {0} and store.versions().engine == 3

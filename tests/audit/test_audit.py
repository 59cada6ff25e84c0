"""The audit of a run folder: a whole one is accounted for, and whatever is spoilt in it is named by its rule."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from made_run import MadeRun

from capture_proxy.types import Capture, Session, SessionPolicy, Turn, TurnStatus, VersionSpan
from harness_trainer.audit import RULES, audit
from harness_trainer.cli import main
from harness_trainer.errors import RunDirError
from harness_trainer.learner.checkpoints import HarnessState

LOST = "INSERT INTO rollouts (rollout_id, group_id, slot, attempt, started_at, finished_at, outcome) VALUES"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return MadeRun(tmp_path_factory.mktemp("audit") / "run").make()


@pytest.fixture
def made(whole: MadeRun, tmp_path: Path) -> MadeRun:
    return whole.copy(tmp_path / "run")


def found(made: MadeRun) -> dict[str, list[str]]:
    """What broke each rule."""
    violations = audit(made.run.path).violations
    return {
        rule: [f"{v.what}: {v.detail}" for v in violations if v.rule == rule] for rule in {v.rule for v in violations}
    }


def test_a_whole_run_is_accounted_for(made: MadeRun) -> None:
    result = audit(made.run.path)
    assert result.violations == [] == result.observations
    assert result.state == "finished"
    assert result.attempts == {"ok": 8, "infra_failed": 4, "truncated": 1, "agent_failed": 1, "lost": 1, "cancelled": 1}
    assert result.groups == {"trained": 2, "dropped": 2, "ready": 1, "running": 1}
    assert result.dropped == {"no_spread": 1, "setup_failed": 1}
    assert [(step.step, step.groups) for step in result.steps] == [(1, [0]), (2, [2])]
    assert result.restarts == {"engine": 0, "learner": 1}
    assert (result.evaluations, result.quarantined, result.open_sessions) == (1, ["poisoned"], 1)
    assert (result.num_turns, result.num_trained_tokens) == (3 * 14, 16)


def change_turn(number: int, **changes: object) -> Callable[[Capture], None]:
    def spoil(capture: Capture) -> None:
        for name, value in changes.items():
            setattr(capture.turns[number], name, value)

    return spoil


def late_turn(capture: Capture) -> None:
    last = capture.turns[-1]
    values = {name: getattr(last, name) for name in Turn.__slots__}
    values |= {"turn_id": f"{last.turn_id}-late", "index": 3, "status": TurnStatus.ABORTED, "completion_ids_T": []}
    values |= {"logprobs_T": [], "version_spans": [], "prompt_ids_P": [1, 2, 3, 4, 5, 6, 7, 8, 9]}
    capture.turns.append(Turn(**values))


def unseal(capture: Capture) -> None:
    capture.session.sealed = False


def two_groups_in_a_step(made: MadeRun) -> None:
    made.checkpoint(HarnessState(2, 3, {1: [0], 2: [2, 0]}, 6))


SPOILT: list[tuple[str, set[str], Callable[[MadeRun], None]]] = [
    # name of the case, the rules that it breaks, what is done
    ("an outcome nobody knows", {"one_end"}, lambda m: m.result("g1-0-a", outcome="fine")),
    (
        "an end without a time",
        {"one_end"},
        lambda m: m.sql("UPDATE rollouts SET finished_at = NULL WHERE rollout_id = 'g4-1-a'"),
    ),
    (
        "a reward that was changed afterwards",
        {"one_end"},
        lambda m: m.sql("UPDATE rollouts SET reward = 0.9 WHERE rollout_id = 'g1-0-a'"),
    ),
    (
        "a failure without a result",
        {"one_end"},
        lambda m: m.sql("UPDATE rollouts SET result = NULL WHERE rollout_id = 'g4-1-a'"),
    ),
    (
        "an attempt that nobody ended",
        {"none_left_running"},
        lambda m: m.sql(
            "UPDATE rollouts SET finished_at = NULL, outcome = NULL, result = NULL WHERE rollout_id = 'g5-0-a'"
        ),
    ),
    ("a reward for an infra failure", {"one_reward"}, lambda m: m.result("g4-0-a", reward=0.0)),
    (
        "an attempt of no group",
        {"group_of_attempt"},
        lambda m: m.sql(f"{LOST} ('g99-0-a', 99, 0, 0, 5e9, 5e9, 'cancelled')"),
    ),
    ("an attempt of another task", {"group_of_attempt"}, lambda m: m.result("g3-0-a", task="sun")),
    (
        "a slot that is missing",
        {"one_result_per_slot"},
        lambda m: m.sql("UPDATE rollouts SET slot = 2 WHERE rollout_id = 'g3-1-a'"),
    ),
    (
        "two results for a slot",
        {"one_result_per_slot", "tries_in_order"},
        lambda m: m.sql("UPDATE rollouts SET final = 1 WHERE rollout_id = 'g0-0-a'"),
    ),
    (
        "more refills than allowed",
        {"one_result_per_slot"},
        lambda m: m.settings("rollouts", max_refills=0),
    ),
    (
        "a try after the result",
        {"tries_in_order"},
        lambda m: m.sql(f"{LOST} ('g3-0-z', 3, 0, 0, 5e9, 5e9, 'cancelled')"),
    ),
    (
        "two tries at the same time",
        {"tries_in_order", "none_left_running"},
        lambda m: m.sql(
            "UPDATE rollouts SET finished_at = NULL, outcome = NULL, result = NULL, final = 0"
            " WHERE rollout_id = 'g0-0-a'"
        ),
    ),
    (
        "a try after the result, by a clock that was set back",
        {"tries_in_order"},
        lambda m: m.sql(f"{LOST} ('g3-0-z', 3, 0, 0, 1, 1, 'cancelled')"),
    ),
    (
        "a good rollout that stands for nothing",
        {"tries_in_order"},
        lambda m: m.sql("UPDATE rollouts SET final = 0 WHERE rollout_id = 'g1-0-a'"),
    ),
    ("files of nobody", {"kept_files"}, lambda m: (m.run.artifacts / "g7-0-a").mkdir()),
    (
        "a group that is missing",
        {"group_numbers"},
        lambda m: m.sql(
            "INSERT INTO rollout_groups (group_id, task, harness, state, start_version, created_at)"
            " VALUES (7, 'sun', 'h', 'running', 1, 5e9)"
        ),
    ),
    (
        "a group that is trained and dropped",
        {"one_fate"},
        lambda m: m.sql("UPDATE rollout_groups SET state = 'dropped', reason = 'stale' WHERE group_id = 0"),
    ),
    (
        "a group dropped without a reason",
        {"one_fate"},
        lambda m: m.sql("UPDATE rollout_groups SET state = 'dropped' WHERE group_id = 3"),
    ),
    (
        "a group that was never handed over",
        {"one_fate"},
        lambda m: m.sql("UPDATE rollout_groups SET ready_at = NULL WHERE group_id = 3"),
    ),
    (
        "a state that no group has",
        {"one_fate"},
        lambda m: m.sql("UPDATE rollout_groups SET state = 'waiting' WHERE group_id = 5"),
    ),
    (
        "half a group",
        {"whole_groups"},
        lambda m: m.result("g3-1-a", outcome="infra_failed", reward=None),
    ),
    (
        "a group without what its reward function failed on",
        {"whole_groups"},
        lambda m: m.result("g3-1-a", reward=None, findings=["reward: warning reward_failed: mine.py:reward raised X"]),
    ),
    (
        "a quarantined task that is drawn",
        {"quarantine_holds"},
        lambda m: m.sql("UPDATE task_records SET quarantined_at = quarantined_at - 60"),
    ),
    (
        "an evaluation that counts what it has not",
        {"evaluations_whole"},
        lambda m: m.sql("UPDATE evaluations SET report = ?", json.dumps({"num_scored": 3, "num_unscored": 0})),
    ),
    (
        "an evaluation that was not over",
        {"evaluations_whole"},
        lambda m: m.sql("UPDATE rollout_groups SET state = 'evaluating' WHERE group_id = -1"),
    ),
    (
        "a step told twice",
        {"steps_without_gap", "versions_rise"},
        lambda m: m.lines(lambda lines: [lines[0], *lines]),
    ),
    (
        "a step left out",
        {"steps_without_gap", "steps_of_store"},
        lambda m: m.lines(lambda lines: lines[1:]),
    ),
    (
        "a step too many",
        {"steps_without_gap", "steps_of_store", "tokens_of_step", "versions_rise"},
        lambda m: m.lines(lambda lines: [*lines, {**lines[1], "step": 3, "policy_version": 4}]),
    ),
    ("a step of more groups", {"steps_of_store"}, lambda m: m.line(2, num_groups=2)),
    (
        "a step that no line tells of",
        {"steps_of_store"},
        lambda m: m.sql("UPDATE rollout_groups SET state = 'trained', trained_step = 3 WHERE group_id = 3"),
    ),
    ("a group trained twice", {"checkpoints_of_store"}, two_groups_in_a_step),
    (
        "a checkpoint of other groups",
        {"checkpoints_of_store"},
        lambda m: m.checkpoint(HarnessState(2, 3, {1: [0], 2: [3]}, 6)),
    ),
    (
        "a last checkpoint that was cut off",
        {"finished_has_checkpoint"},
        lambda m: (m.run.checkpoints / "checkpoint-2" / "optimizer.pt").unlink(),
    ),
    (
        "a checkpoint of another policy",
        {"versions_rise"},
        lambda m: m.checkpoint(HarnessState(2, 9, {1: [0], 2: [2]}, 6)),
    ),
    (
        "a policy of another step",
        {"versions_rise"},
        lambda m: m.sql("UPDATE policy_versions SET step = 3 WHERE version = 3"),
    ),
    (
        "a session of nobody",
        {"session_of_attempt"},
        lambda m: m.put(Capture(Session("g7-0-a", "token", SessionPolicy(), {}, sealed=True), [])),
    ),
    (
        "a trace without a session",
        {"session_of_attempt"},
        lambda m: m.sql("DELETE FROM capture_sessions WHERE session_id = 'g1-0-a'"),
    ),
    (
        "a session whose turns cannot be read",
        {"session_of_attempt"},
        lambda m: m.sql("DELETE FROM capture_turns WHERE turn_id = 'g1-0-a-0001'"),
    ),
    (
        "a trace that is gone",
        {"turns_counted"},
        lambda m: m.sql("DELETE FROM rollout_traces WHERE rollout_id = 'g1-0-a'"),
    ),
    ("a session that is open", {"sealed"}, lambda m: m.recapture("g1-0-a", unseal)),
    ("a turn that came late", {"turns_counted"}, lambda m: m.recapture("g1-0-a", late_turn)),
    (
        "a turn that is lost",
        {"turns_counted"},
        lambda m: m.sql("DELETE FROM capture_turns WHERE turn_id = 'g1-0-a-0002'"),
    ),
    (
        "a side call that is trained",
        {"agent_turns_only"},
        lambda m: m.recapture("g1-0-a", change_turn(2, requested_sampling={"max_tokens": 1})),
    ),
    (
        "an aborted turn that is trained",
        {"agent_turns_only"},
        lambda m: m.recapture("g1-0-a", change_turn(2, status=TurnStatus.ABORTED)),
    ),
    (
        "another token",
        {"tokens_as_sampled"},
        lambda m: m.recapture("g1-0-a", change_turn(2, completion_ids_T=[7, 9])),
    ),
    (
        "another prompt",
        {"tokens_as_sampled"},
        lambda m: m.recapture("g1-0-a", change_turn(2, prompt_ids_P=[1, 2, 3, 4, 5, 7])),
    ),
    (
        "another log-probability",
        {"tokens_as_sampled"},
        lambda m: m.recapture("g1-0-a", change_turn(2, logprobs_T=[-0.5, -1.5])),
    ),
    (
        "another policy",
        {"tokens_as_sampled"},
        lambda m: m.recapture("g1-0-a", change_turn(2, version_spans=[VersionSpan("v2", 0, 2)])),
    ),
    ("more tokens told than trained", {"tokens_of_step"}, lambda m: m.line(1, trained_tokens=9)),
    ("more rows told than trained", {"tokens_of_step"}, lambda m: m.line(1, num_rows=3)),
    (
        "tokens of a policy nobody published",
        {"published_versions"},
        lambda m: m.sql("DELETE FROM policy_versions WHERE version = 1"),
    ),
    ("tokens that were too old", {"fresh_enough"}, lambda m: m.settings("learner", max_staleness=0)),
    ("an age that is told wrong", {"fresh_enough"}, lambda m: m.line(2, staleness_max=0)),
]


@pytest.mark.parametrize(("rules", "spoil"), [case[1:] for case in SPOILT], ids=[case[0] for case in SPOILT])
def test_what_is_spoilt_is_found(made: MadeRun, rules: set[str], spoil: Callable[[MadeRun], object]) -> None:
    spoil(made)
    assert set(found(made)) == rules


def test_every_rule_is_broken_by_some_case() -> None:
    of_sources = {"sources_known", "evaluated_by_source"}  # broken below, in a run that has several
    assert {rule for _, rules, _ in SPOILT for rule in rules} | of_sources == set(RULES)
    assert all(RULES.values()), "each says what it asks"


def test_what_is_under_way_is_no_violation_of_a_run_that_was_interrupted(made: MadeRun) -> None:
    made.sql("UPDATE rollouts SET finished_at = NULL, outcome = NULL, result = NULL WHERE rollout_id = 'g5-0-a'")
    made.settings("learner", max_steps=5)
    result = audit(made.run.path)
    assert (result.state, result.violations) == ("interrupted", [])
    assert result.attempts["running"] == 1


def test_a_run_that_only_evaluates_is_accounted_for_without_steps(made: MadeRun) -> None:
    config = yaml.safe_load(made.run.config.read_text())
    del config["learner"]
    made.run.config.write_text(yaml.safe_dump({**config, "samples": 1}))
    made.run.metrics.unlink()
    for table in ("rollouts", "rollout_groups"):
        made.sql(f"DELETE FROM {table} WHERE group_id >= 0")
    made.sql("DELETE FROM capture_sessions WHERE session_id LIKE 'g%'")
    for path in made.run.artifacts.glob("g*"):
        path.rmdir()
    shutil.rmtree(made.run.checkpoints)
    result = audit(made.run.path)
    assert (result.state, result.violations, result.evaluations) == ("finished", [], 1)
    made.sql("UPDATE evaluations SET report = NULL, finished_at = NULL")
    assert audit(made.run.path).state == "interrupted"
    made.run.config.write_text(yaml.safe_dump({**config, "samples": 2}))
    assert set(found(made)) == {"one_result_per_slot"}


def test_a_run_that_is_held_is_live(made: MadeRun) -> None:
    with made.run.opened(yaml.safe_load(made.run.config.read_text())):
        assert audit(made.run.path).state == "live"
    assert audit(made.run.path).state == "finished"


def test_the_store_is_not_changed(made: MadeRun) -> None:
    audit(made.run.path)
    before = made.run.store.read_bytes()
    audit(made.run.path)
    assert made.run.store.read_bytes() == before


def test_the_command_says_it_in_its_exit_code_and_as_json(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(made.run.path)]) == 0
    assert "everything is accounted for" in capsys.readouterr().out
    made.line(1, trained_tokens=9)
    assert main(["audit", str(made.run.path)]) == 1
    out = capsys.readouterr().out
    assert "VIOLATION tokens_of_step: step 1: metrics.jsonl says trained_tokens 9, its groups have 8" in out
    assert main(["audit", str(made.run.path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [violation["rule"] for violation in data["violations"]] == ["tokens_of_step"]
    assert data["groups"]["trained"] == 2


def test_a_folder_without_a_run_is_refused(tmp_path: Path, made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 5
    assert "holds no run" in capsys.readouterr().err
    made.run.config.write_text("rollouts: 1\n")
    with pytest.raises(RunDirError, match="cannot be read"):
        audit(made.run.path)


# -- several sources --------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(made: MadeRun) -> MadeRun:
    """The same as a run of two sources: `sun` is of the one, every other task of the other."""
    for group_id, task in made.tasks().items():
        name = f"{'a' if task == 'sun' else 'b'}/{task}"
        made.sql("UPDATE rollout_groups SET task = ? WHERE group_id = ?", name, group_id)
    for rollout_id, task in made.tasks_of_results().items():
        made.result(rollout_id, task=task, source=task.partition("/")[0])
    made.sql("UPDATE task_records SET task = 'b/' || task")
    config = yaml.safe_load(made.run.config.read_text())
    config["sources"] = [{"name": "a", "tasks": "t"}, {"name": "b", "tasks": "t"}]
    made.run.config.write_text(yaml.safe_dump(config))
    return made


def test_a_run_of_several_sources_is_accounted_for_source_by_source(
    mixed: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    result = audit(mixed.run.path)
    assert result.violations == []
    a, b = result.sources
    assert (a.source, a.groups, b.groups) == (
        "a",
        {"trained": 1, "dropped": 1, "running": 1},
        {"trained": 1, "ready": 1, "dropped": 1},
    )
    assert sum(a.attempts.values()) + sum(b.attempts.values()) == sum(result.attempts.values())
    assert (a.num_trained, a.reward, a.share) == (2, 0.375, 0.5)
    assert (b.num_trained, b.reward, b.share) == (2, 0.5, 0.5)
    assert main(["audit", str(mixed.run.path)]) == 0
    assert "source a: 2 rollouts trained, mean reward 0.375, 50% of the trained groups" in capsys.readouterr().out


def test_a_result_of_another_source_and_a_group_of_none_are_found(mixed: MadeRun) -> None:
    mixed.result("g3-0-a", source="a")
    mixed.sql("UPDATE rollout_groups SET task = 'c/sun' WHERE group_id = 5")
    mixed.result("g5-0-a", task="c/sun")
    said = found(mixed)
    assert set(said) == {"sources_known"}
    assert said["sources_known"] == [
        "attempt g3-0-a: its result says source 'a', its group's task b/moon",
        "group 5: its task c/sun is of none of the run's sources (a, b)",
    ]


def test_an_evaluations_parts_must_add_up(mixed: MadeRun) -> None:
    parts = {"a": {"num_tasks": 1, "num_scored": 1, "num_unscored": 0}}
    report = {"step": 0, "num_tasks": 2, "num_scored": 2, "num_unscored": 0, "sources": parts}
    mixed.sql("UPDATE evaluations SET report = ?", json.dumps(report))
    assert found(mixed) == {
        "evaluated_by_source": [
            "evaluation after step 0: num_tasks is 2 in all, and 1 in its sources together",
            "evaluation after step 0: num_scored is 2 in all, and 1 in its sources together",
        ]
    }

"""The hand-over from runner to learner: a trace with a turn per row trains exactly what its capture holds."""

import math
import random
import time
import tracemalloc
from collections import Counter

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openenv.core.harness.training import TrainingTrace

from benchmarks.traces import session as long_session
from capture_proxy.sampling import shaping_findings
from capture_proxy.trace import (
    assign_roles,
    capture_from_json,
    capture_to_json,
    is_trained,
    to_row_trace,
    to_training_trace,
)
from capture_proxy.types import Capture, Finding, Session, SessionPolicy, Severity, TurnStatus, VersionSpan
from harness_trainer.learner.rows import build_rows, rows_from_trace
from tests.capture.recording import Recording, answer, reply, system, user
from tests.capture.test_graph import session as random_session

OWNER = Session("s", "token", SessionPolicy(), {})


def handed_over(capture):
    """The rows after everything that lies between a gateway and the learner."""
    capture = capture_from_json(orjson.loads(orjson.dumps(capture_to_json(capture))))
    data = orjson.loads(orjson.dumps(to_row_trace(capture).model_dump()))
    TrainingTrace.model_validate(data)
    return rows_from_trace(data).rows


_steps = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(["extend", "extend", "repeat", "cut", "new"]), st.booleans()),
    max_size=18,
)


@settings(max_examples=120, deadline=None)
@given(_steps, st.randoms(use_true_random=False))
def test_any_session_gives_the_rows_of_its_capture_and_trains_each_sample_once(steps, chance):
    turns = random_session(steps)
    for turn in turns:
        doubt = chance.random()
        if turn.completion_ids_T and doubt < 0.15:
            turn.logprobs_T[chance.randrange(len(turn.logprobs_T))] = chance.choice(
                [None, -9999.0, 0.0005, 2.0, math.nan]
            )
        elif doubt < 0.25:
            turn.status = chance.choice([TurnStatus.ABORTED, TurnStatus.FAILED])
        elif doubt < 0.3:
            turn.findings = [Finding(Severity.FATAL, "misaligned", "")]
        elif doubt < 0.5:
            turn.findings = shaping_findings({"top_p": 0.9})
        half = len(turn.completion_ids_T) // 2
        turn.version_spans = [VersionSpan("v1", 0, half), VersionSpan("v2", half, len(turn.completion_ids_T))]
    chance.shuffle(turns)
    capture = Capture(OWNER, turns)
    assign_roles(turns)
    rows = build_rows(capture).rows
    assert handed_over(capture) == rows
    shaped = {turn.turn_id for turn in turns if turn.is_shaped}
    assert [row.is_shaped for row in rows] == [bool(shaped & set(row.turn_ids)) for row in rows]
    assert rows_from_trace(to_training_trace(capture).model_dump()).rows == rows
    by_id = {turn.turn_id: turn for turn in turns}
    placed = Counter()
    for row in rows:
        assert row.ids_N in [t.prompt_ids_P + t.completion_ids_T for t in turns]
        assert len(row.ids_N) == len(row.mask_N) == len(row.logprobs_N) == len(row.versions_N)
        for turn_id in row.turn_ids:
            turn = by_id[turn_id]
            start = len(turn.prompt_ids_P)
            assert row.ids_N[start : start + len(turn.completion_ids_T)] == turn.completion_ids_T
            assert turn.status is TurnStatus.OK and turn.side_reason is None
            placed[turn_id] += len(turn.completion_ids_T)
        assert sum(row.mask_N) == sum(len(by_id[t].completion_ids_T) for t in row.turn_ids)
        assert all(math.isfinite(p) and p <= 0 for p in row.logprobs_N)
    assert placed == {t.turn_id: len(t.completion_ids_T) for t in turns if is_trained(t)}
    assert sum(sum(turn.loss_mask) for turn in to_row_trace(capture).turns) == placed.total()


def compacted():
    session = Recording()
    history = session.work([system(), user("go")], 3)
    session.ask([*history, user("Summarise")], reply("what was done"), offered=None)
    session.work([system(), user("<summary>what was done</summary>")], 2)
    return session


def test_a_row_says_which_turn_sampled_what_and_nothing_else_is_trained():
    session = compacted()
    first, second = to_row_trace(session.capture).turns
    assert [t["turn_id"] for t in first.metadata["turns"]] == ["s-0000", "s-0001", "s-0002"]
    assert [t["turn_id"] for t in second.metadata["turns"]] == ["s-0004", "s-0005"]
    ids = first.prompt_token_ids + first.completion_token_ids
    logps = [0.0] * len(first.prompt_token_ids) + first.per_token_logps
    trained = set()
    for stretch in first.metadata["turns"]:
        turn = next(t for t in session.turns if t.turn_id == stretch["turn_id"])
        where = range(stretch["start"], stretch["end"])
        assert [ids[i] for i in where] == turn.completion_ids_T and [logps[i] for i in where] == turn.logprobs_T
        assert stretch["policy_versions"] == [{"version": "v3", "start": 0, "end": len(where)}]
        trained.update(where)
    assert [i for i, m in enumerate(first.loss_mask) if m] == sorted(trained)
    assert not any(p for i, p in enumerate(logps) if i not in trained)
    assert first.metadata["rollout"]["capture_level"] == "tokens" and "rollout" not in second.metadata
    assert first.response["choices"][0]["message"] == session.turns[2].message


def test_a_fork_trains_what_both_branches_share_in_the_first_row_only():
    session = Recording()
    start = [system(), user("go")]
    got = session.ask(start, reply("shared", ("bash", {})))
    session.ask([*start, got, answer("left")], reply("a"), at=5.0)
    session.ask([*start, got, answer("right")], reply("b"), at=5.1)
    rows = to_row_trace(session.capture).turns
    assert [[t["turn_id"] for t in row.metadata["turns"]] for row in rows] == [["s-0000", "s-0001"], ["s-0002"]]
    assert handed_over(session.capture) == build_rows(session.capture).rows


def test_a_turn_of_an_unknown_policy_leaves_the_others_of_its_row_trained():
    session = Recording()
    session.work([system(), user("go")], 3)
    session.turns[1].version_spans = [VersionSpan("default", 0, len(session.turns[1].completion_ids_T))]
    (row,) = handed_over(session.capture)
    assert row.turn_ids == ["s-0000", "s-0002"] and [row] == build_rows(session.capture).rows


def test_120_thousand_tokens_become_rows_in_under_a_second_and_a_fifth_of_the_memory_allowed():
    def capture_of(num_turns):
        turns = long_session(num_turns, "extending")
        capture = capture_from_json(capture_to_json(Capture(OWNER, turns)))
        to_row_trace(capture)  # what is imported only once
        return capture

    def seconds(capture):
        best = math.inf
        for _ in range(3):
            started = time.process_time()
            rows = rows_from_trace(to_row_trace(capture).model_dump()).rows
            best = min(best, time.process_time() - started)
        assert len(rows) == 1
        return best

    small, large = capture_of(75), capture_of(300)
    assert len(large.turns[-1].prompt_ids_P) > 119_000
    taken = seconds(large)
    assert taken < 1.0
    assert taken < 4 * 1.8 * seconds(small), "four times the turns take four times as long, and some slack"
    tracemalloc.start()
    to_row_trace(large)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 2**20


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_duplicated_turn_is_trained_once(shuffled):
    session = Recording()
    session.work([system(), user("go")], 2)
    turns = session.turns * 2
    if shuffled:
        random.Random(1).shuffle(turns)
    rows = rows_from_trace(to_row_trace(Capture(OWNER, turns)).model_dump()).rows
    assert [row.turn_ids for row in rows] == [["s-0000", "s-0001"]]

"""Rows from captures: exact ids, each sampled id trained once, and nothing doubtful trained."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_proxy.types import (
    Capture,
    Finding,
    Session,
    SessionPolicy,
    Severity,
    Turn,
    TurnRole,
    TurnStatus,
    VersionSpan,
)
from harness_trainer.learner.rows import build_rows, rows_from_trace


def turn(index, prompt, completion, *, logprobs=None, spans=None, role=TurnRole.AGENT, **changes):
    fields = {
        "turn_id": f"t{index}",
        "session_id": "s",
        "index": index,
        "dialect": "openai_chat",
        "request": {},
        "requested_sampling": {},
        "sampling": {},
        "prompt_ids_P": list(prompt),
        "completion_ids_T": list(completion),
        "logprobs_T": [-0.5] * len(completion) if logprobs is None else logprobs,
        "version_spans": [VersionSpan("v1", 0, len(completion))] if spans is None else spans,
        "message": {},
        "finish_reason": "stop",
        "status": TurnStatus.OK,
        "role": role,
        "side_reason": "title" if role is TurnRole.SIDE else None,
    }
    return Turn(**(fields | changes))


def capture(*turns):
    return Capture(Session("s", "token", SessionPolicy(), {}), list(turns))


def spelled(rows):
    """Each row as (ids, mask), short enough to read in an assertion."""
    return [(row.ids_N, row.mask_N) for row in rows]


END, NEWLINE, OBS = 90, 91, 92


def rows_of(captured):
    return build_rows(captured).rows


def test_turns_that_extend_each_other_make_one_row():
    rows = rows_of(
        capture(
            turn(0, [1, 2], [3, END], logprobs=[-0.1, -0.2], spans=[VersionSpan("v3", 0, 2)]),
            turn(1, [1, 2, 3, END, 5], [6], logprobs=[-0.3], spans=[VersionSpan("v4", 0, 1)]),
        )
    )
    (row,) = rows
    assert row.ids_N == [1, 2, 3, END, 5, 6]
    assert row.mask_N == [0, 0, 1, 1, 0, 1]
    assert row.logprobs_N == [0, 0, -0.1, -0.2, 0, -0.3]
    assert row.versions_N == [-1, -1, 3, 3, -1, 4]
    assert row.turn_ids == ["t0", "t1"]


def test_a_newline_that_the_template_adds_after_the_end_token_is_not_trained():
    (row,) = rows_of(capture(turn(0, [1], [2, END]), turn(1, [1, 2, END, NEWLINE, 7], [8])))
    assert row.ids_N == [1, 2, END, NEWLINE, 7, 8]
    assert row.mask_N == [0, 1, 1, 0, 0, 1]


def test_a_role_marker_that_was_sampled_as_stop_token_appears_once_and_is_trained():
    (row,) = rows_of(capture(turn(0, [1], [2, OBS]), turn(1, [1, 2, OBS, 7], [8])))
    assert row.ids_N.count(OBS) == 1
    assert row.mask_N == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_an_end_token_that_only_the_template_wrote_is_not_trained(finish_reason):
    (row,) = rows_of(capture(turn(0, [1], [2, 3], finish_reason=finish_reason), turn(1, [1, 2, 3, END, 7], [8])))
    assert row.ids_N == [1, 2, 3, END, 7, 8]
    assert row.mask_N == [0, 1, 1, 0, 0, 1]
    assert row.logprobs_N[3] == 0.0


def test_reasoning_dropped_from_history_gives_two_rows_and_names_the_position():
    think = 50
    built = build_rows(capture(turn(0, [1], [think, 2, END]), turn(1, [1, 2, END, 7], [8, END])))
    assert spelled(built.rows) == [
        ([1, think, 2, END], [0, 1, 1, 1]),
        ([1, 2, END, 7, 8, END], [0, 0, 0, 0, 1, 1]),
    ]
    (finding,) = built.findings
    assert (finding.severity, finding.code) == (Severity.INFO, "context_rewritten")
    assert "turn t1 has a row of its own: it differs from turn t0 from position 1 on" in finding.detail


def test_a_shared_turn_is_trained_only_in_the_first_of_two_branches():
    rows = rows_of(capture(turn(0, [1], [2]), turn(1, [1, 2, 3], [4]), turn(2, [1, 2, 5], [6])))
    assert spelled(rows) == [([1, 2, 3, 4], [0, 1, 0, 1]), ([1, 2, 5, 6], [0, 0, 0, 1])]
    assert [row.turn_ids for row in rows] == [["t0", "t1"], ["t2"]]


def test_a_completion_that_another_completion_begins_with_is_no_ancestor():
    rows = rows_of(capture(turn(0, [1], [2]), turn(1, [1], [2, 3])))
    assert spelled(rows) == [([1, 2], [0, 1]), ([1, 2, 3], [0, 1, 1])]


def test_equal_samples_are_trained_once_each_and_only_one_branch_continues():
    rows = rows_of(capture(turn(0, [1], [2]), turn(1, [1], [2]), turn(2, [1, 2, 3], [4])))
    assert sorted(spelled(rows)) == [([1, 2], [0, 1]), ([1, 2, 3, 4], [0, 1, 0, 1])]
    assert sorted(t for row in rows for t in row.turn_ids) == ["t0", "t1", "t2"]


def test_a_turn_that_is_recorded_twice_is_trained_once():
    built = build_rows(capture(turn(0, [1], [2]), turn(0, [1], [2])))
    assert spelled(built.rows) == [([1, 2], [0, 1])]
    assert [finding.code for finding in built.findings] == ["recorded_twice"]


def test_side_failed_aborted_and_fatal_turns_are_context_at_most():
    fatal = [Finding(Severity.FATAL, "x", "")]
    rows = rows_of(
        capture(
            turn(0, [9], [8], role=TurnRole.SIDE),
            turn(1, [1], [2]),
            turn(2, [1, 2, 3], [4], findings=fatal),
            turn(3, [1, 2, 3], [5], status=TurnStatus.ABORTED),
            turn(4, [1, 2, 3, 4, 6], [7]),
        )
    )
    assert spelled(rows) == [([1, 2, 3, 4, 6, 7], [0, 1, 0, 0, 0, 1])]


def test_only_side_calls_give_no_row():
    assert rows_of(capture(turn(0, [1], [2], role=TurnRole.SIDE))) == []
    assert rows_of(capture()) == []


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, None, -9999.0, -9000.0, 3.0, True])
def test_a_log_probability_that_cannot_be_true_untrains_its_turn_only(value):
    built = build_rows(
        capture(turn(0, [1], [2, 3], logprobs=[-0.1, value]), turn(1, [1, 2, 3, 4], [5], logprobs=[-0.2]))
    )
    assert spelled(built.rows) == [([1, 2, 3, 4, 5], [0, 0, 0, 0, 1])]
    (finding,) = built.findings
    assert (finding.severity, finding.code) == (Severity.FATAL, "bad_logprob")
    assert "t0" in finding.detail


def test_a_log_probability_above_zero_by_rounding_counts_as_zero():
    (row,) = rows_of(capture(turn(0, [1], [2], logprobs=[0.0002])))
    assert row.logprobs_N == [0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"logprobs": [-0.1]}, "misaligned"),
        ({"logprobs": []}, "misaligned"),
        ({"prompt_ids_P": []}, "no_prompt_ids"),
        ({"prompt_ids_P": [-1]}, "bad_token_id"),
        ({"completion_ids_T": [2, None]}, "bad_token_id"),
        ({"completion_ids_T": [2, 2**40]}, "bad_token_id"),
        ({"spans": []}, "bad_version_spans"),
        ({"spans": [VersionSpan("v1", 0, 1)]}, "bad_version_spans"),
        ({"spans": [VersionSpan("v1", 0, 3)]}, "bad_version_spans"),
        ({"spans": [VersionSpan("v1", 0, 1), VersionSpan("v2", 0, 2)]}, "bad_version_spans"),
        ({"spans": [VersionSpan("default", 0, 2)]}, "unknown_version"),
        ({"spans": [VersionSpan("v1x", 0, 2)]}, "unknown_version"),
    ],
)
def test_partial_capture_is_not_trained_and_says_why(changes, code):
    built = build_rows(capture(turn(0, [1], [2, 3], **changes)))
    assert built.rows == []
    assert [finding.code for finding in built.findings] == [code]
    assert built.findings[0].severity is Severity.FATAL


def test_a_weight_update_in_mid_turn_keeps_both_versions():
    spans = [VersionSpan("v6", 0, 2), VersionSpan("v7", 2, 3)]
    (row,) = rows_of(capture(turn(0, [1], [2, 3, 4], spans=spans)))
    assert row.versions_N == [-1, 6, 6, 7]


def test_late_arrivals_are_placed_by_their_ids_and_not_by_order():
    first, second = turn(1, [1, 2, 3], [4]), turn(0, [1], [2])
    assert spelled(rows_of(capture(first, second))) == [([1, 2, 3, 4], [0, 1, 0, 1])]


def trace_turn(index, prompt, completion, *, mask=1, logprobs=None, version="v1"):
    return {
        "node_id": f"t{index}",
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "per_token_logps": [-0.5] * len(completion) if logprobs is None else logprobs,
        "loss_mask": [0] * len(prompt) + [mask] * len(completion),
        "metadata": {"policy_versions": [{"version": version, "start": 0, "end": len(completion)}]},
    }


def test_a_training_trace_gives_the_same_rows_as_its_capture():
    trace = {"turns": [trace_turn(0, [9], [8], mask=0), trace_turn(1, [1], [2]), trace_turn(2, [1, 2, 3], [4])]}
    turns = [turn(0, [9], [8], role=TurnRole.SIDE), turn(1, [1], [2]), turn(2, [1, 2, 3], [4])]
    assert rows_from_trace(trace).rows == rows_of(capture(*turns))


def test_a_training_trace_is_checked_like_a_capture():
    trace = {"turns": [trace_turn(0, [1], [2], logprobs=[-9999.0]), trace_turn(1, [1], [3], version="v2-partial")]}
    built = rows_from_trace(trace)
    assert built.rows == []
    assert [finding.code for finding in built.findings] == ["bad_logprob", "unknown_version"]


token = st.integers(0, 2)


@st.composite
def captures(draw):
    """Turns that extend, rewrite, repeat or doubt earlier ones, in any order of arrival."""
    turns = []
    for i in range(draw(st.integers(0, 8))):
        prompt = draw(st.lists(token, min_size=1, max_size=4))
        if turns and draw(st.booleans()):
            base = draw(st.sampled_from(turns))
            cut = draw(st.integers(0, 1)) * draw(st.integers(0, 3))
            seen = base.prompt_ids_P + base.completion_ids_T
            prompt = seen[: len(seen) - cut] + prompt
        completion = draw(st.lists(token, min_size=1, max_size=4))
        logprob = st.floats(-20, 0) | st.sampled_from([None, math.nan, -9999.0, 2.0])
        turns.append(
            turn(
                i,
                prompt,
                completion,
                logprobs=[draw(logprob if draw(st.integers(0, 5)) == 0 else st.floats(-20, 0)) for _ in completion],
                role=draw(st.sampled_from([TurnRole.AGENT, TurnRole.AGENT, TurnRole.SIDE])),
            )
        )
    return capture(*draw(st.permutations(turns)))


@settings(max_examples=200)
@given(captures())
def test_invariants_hold_for_any_interleaving(captured):
    built = build_rows(captured)
    turns = {t.turn_id: t for t in captured.turns}
    trained: list[str] = []
    for row in built.rows:
        n = len(row.ids_N)
        assert n == len(row.mask_N) == len(row.logprobs_N) == len(row.versions_N)
        assert row.num_trained > 0
        assert row.ids_N in [t.prompt_ids_P + t.completion_ids_T for t in captured.turns]
        expected_mask = [0] * n
        for turn_id, span in zip(row.turn_ids, row.turn_spans, strict=True):
            sampled = turns[turn_id]
            start, end = len(sampled.prompt_ids_P), len(sampled.prompt_ids_P) + len(sampled.completion_ids_T)
            assert span == (start, end)
            assert row.ids_N[start:end] == sampled.completion_ids_T
            assert row.ids_N[:start] == sampled.prompt_ids_P
            assert row.logprobs_N[start:end] == [min(p, 0.0) for p in sampled.logprobs_T]
            expected_mask[start:end] = [1] * (end - start)
        assert row.mask_N == expected_mask
        for mask, logprob, version in zip(row.mask_N, row.logprobs_N, row.versions_N, strict=True):
            assert math.isfinite(logprob) and logprob <= 0
            assert (mask == 0) <= (logprob == 0.0) and (version == -1) == (mask == 0)
        trained.extend(row.turn_ids)
    sound = [
        t.turn_id
        for t in captured.turns
        if t.role is TurnRole.AGENT and all(p is not None and -9000 < p <= 0 for p in t.logprobs_T)
    ]
    assert sorted(trained) == sorted(sound)


def test_a_trace_that_masks_a_part_of_a_reply_trains_the_rest_only():
    trace = {
        "turns": [
            {
                "node_id": "a",
                "prompt_token_ids": [10, 11],
                "completion_token_ids": [20, 21, 22],
                "per_token_logps": [-1.0, -2.0, -3.0],
                "loss_mask": [0, 0, 1, 0, 1],
                "metadata": {"policy_versions": [{"version": "v4", "start": 0, "end": 3}]},
            }
        ]
    }
    (row,) = rows_from_trace(trace).rows
    assert row.mask_N == [0, 0, 1, 0, 1]
    assert row.logprobs_N == [0.0, 0.0, -1.0, 0.0, -3.0]
    assert row.versions_N == [-1, -1, 4, -1, 4]

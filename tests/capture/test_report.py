"""Findings on a rollout as a whole, and that they reach the trace and the admin's JSON."""

import pytest

from capture_proxy import trace
from capture_proxy.report import Report
from capture_proxy.types import Severity, TurnStatus
from tests.capture.recording import Recording, answer, reply, system, user

TASK = [system(), user("go")]


def report_of(session: Recording) -> Report:
    return trace.rollout_report(session.capture)


def codes(session: Recording) -> dict[str, Severity]:
    return {finding.code: finding.severity for finding in report_of(session).findings}


def test_a_clean_rollout_has_no_findings_and_one_row() -> None:
    session = Recording()
    session.work(TASK, 5)
    assert report_of(session) == Report("tokens", 5, 0, 5, 1, [])
    assert report_of(session).rows_per_turn == 0.2


def test_no_call_and_side_calls_only_are_fatal() -> None:
    assert codes(Recording()) == {"no_turns": Severity.FATAL}
    session = Recording()
    session.ask([user("quota")], reply("q"), requested_sampling={"max_tokens": 1})
    assert codes(session) == {"no_turns": Severity.FATAL, "side_calls": Severity.INFO}
    assert report_of(session).rows_per_turn is None


def test_turns_that_are_all_in_doubt_say_why_nothing_is_trained() -> None:
    session = Recording()
    session.work(TASK, 2)
    session.turns[0].status = TurnStatus.ABORTED
    session.turns[1].logprobs_T[0] = None
    found = {f.code: f for f in report_of(session).findings}
    assert found["nothing_trainable"].severity is Severity.FATAL and "aborted" in found["nothing_trainable"].detail


def test_a_rollout_whose_only_call_was_refused_says_by_what_and_nothing_of_the_engines_ids() -> None:
    session = Recording()
    session.work(TASK, 1, ids=False)
    session.turns[0].status = TurnStatus.FAILED
    session.turns[0].error = "prompt of 700 tokens does not fit a context of 512"
    found = {f.code: f for f in report_of(session).findings}
    assert "does not fit a context of 512" in found["nothing_trainable"].detail
    assert "text_only" not in found


def test_an_engine_without_ids_is_for_evaluation_only() -> None:
    session = Recording()
    session.work(TASK, 3, ids=False)
    assert report_of(session).capture_level == "text"
    assert codes(session) == {"nothing_trainable": Severity.FATAL, "text_only": Severity.WARN}
    assert trace.to_row_trace(session.capture).turns == []


def test_a_first_line_that_changes_with_every_request_raises_the_alarm_with_its_position() -> None:
    session = Recording()
    history = [user("go")]
    for i in range(4):
        first = system(f"billing: cch={i:04d}; You are an agent.")
        got = session.ask([first, *history], reply(f"step {i}", ("bash", {})))
        history += [got, answer()]
    report = report_of(session)
    assert (report.num_rows, report.rows_per_turn) == (4, 1.0)
    alarm = next(f for f in report.findings if f.code == "prefix_sharing_collapsed")
    assert alarm.severity is Severity.WARN and "4 rows for 4 turns" in alarm.detail
    position = next(
        i for i, (a, b) in enumerate(zip(*(t.prompt_ids_P for t in session.turns[:2]), strict=False)) if a != b
    )
    assert f"at token {position}" in alarm.detail
    assert codes(session)["per_turn_capture_only"] is Severity.WARN


def test_sub_agents_are_several_roots_but_no_collapse() -> None:
    session = Recording()
    session.work(TASK, 4)
    session.work([system("sub"), user("other")], 4)
    assert codes(session) == {"multiple_roots": Severity.WARN, "forks": Severity.INFO}
    assert report_of(session).num_rows == 2


def test_side_calls_retries_and_cut_replies_are_counted() -> None:
    session = Recording()
    session.ask(TASK, reply("lost", ("bash", {})))
    history = session.work(TASK, 2)
    session.ask([system("Name it."), user("x")], reply("t"), offered=None)
    session.ask([*history, user("more")], reply("cut"))
    session.turns[-1].finish_reason = "length"
    assert codes(session) == {
        "side_calls": Severity.INFO,
        "discarded_turns": Severity.WARN,
        "truncated_turns": Severity.WARN,
    }
    details = {f.code: f.detail for f in report_of(session).findings}
    assert "offers no tools" in details["side_calls"] and "1 sampled turns (" in details["discarded_turns"]


def test_replies_of_one_token_in_a_row_are_a_full_window() -> None:
    session = Recording()
    history = [*TASK]
    for i in range(4):
        history = [*history, session.ask(history, reply("")), user(f"go on {i}")]
        session.turns[-1].finish_reason = "length"
    assert codes(session)["starved_replies"] is Severity.WARN


@pytest.mark.parametrize("form", ["calls", "rows", "capture"])
def test_the_findings_and_the_level_are_on_every_form(form: str) -> None:
    session = Recording()
    session.work(TASK, 1)
    if form == "capture":
        about = trace.capture_to_json(session.capture)["rollout"]
    else:
        made = trace.to_training_trace if form == "calls" else trace.to_row_trace
        about = made(session.capture).turns[0].metadata["rollout"]
    assert about["capture_level"] == "tokens" and about["rows_per_turn"] == 1.0
    assert [f["code"] for f in about["findings"]] == ["degenerate_rollout"]


def test_what_stands_beside_the_agent_is_no_part_of_its_structure() -> None:
    session = Recording()
    session.ask([system("You are an agent. Name this."), user("go")], reply("a title"), offered=None)
    session.work([system("You are an agent. Work."), user("go")], 3, offered=[])
    session.work([system("You are an agent. Work."), user("other")], 2)
    side = session.turns[0]
    for turn in session.turns[1:]:
        turn.request["tools"] = turn.request["tools"] or [{"type": "function", "function": {"name": "bash"}}]
    meta = {t.node_id: t.metadata for t in trace.to_training_trace(session.capture).turns}
    assert meta[side.turn_id]["role"] == "side" and meta[side.turn_id]["side_reason"]
    assert meta["s-0001"]["fork"] is None, "it shares its beginning with the title only"

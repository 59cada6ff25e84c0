"""Which calls are the agent's work, in the shapes that real agents send."""

from typing import Any

import pytest

from capture_proxy.graph import Facts, count_agent_calls
from capture_proxy.types import TurnStatus
from tests.capture.recording import BASH, Recording, answer, reply, said, system, tools, user

TASK = [system("You are a coding agent. " * 20), user("Write hello world into hello.txt")]


def title(session: Recording, **how: Any) -> None:
    session.ask(
        [system("You name conversations."), user("Write hello world")], reply("Hello file"), offered=None, **how
    )


@pytest.mark.parametrize("first", [True, False])
def test_a_title_asked_beside_the_first_call_is_a_side_call_in_either_order(first: bool) -> None:
    session = Recording()
    if first:
        title(session)
        session.work(TASK)
    else:
        session.work(TASK)
        title(session)
    assert list(session.sides()) == [0 if first else 2]


def test_a_quota_probe_a_topic_and_system_messages_in_between_leave_only_the_loop() -> None:
    session = Recording()
    session.ask([user("quota")], reply("q"), offered=None, model="small", requested_sampling={"max_tokens": 1})
    history = session.work([*TASK, system("Environment: linux")], 2)
    session.ask([system("Is this a new topic?"), user("hm")], reply("no"), offered=None, model="small")
    session.work([*history, user("<system-reminder>go on</system-reminder>"), system("reminder")], 2)
    assert list(session.sides()) == [0, 3]


def test_a_router_with_a_json_schema_and_a_name_of_its_own_is_a_side_call() -> None:
    session = Recording()
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "complexity"}}}
    session.ask([user("Rate it")], reply('{"score": 3}'), offered=None, model="flash-lite", requested_sampling=schema)
    session.work(TASK)
    assert list(session.sides()) == [0]


def test_a_schema_call_without_tools_anywhere_is_a_side_call_unless_all_want_one() -> None:
    schema = {"response_format": {"type": "json_object"}}
    session = Recording()
    session.ask([user("Rate it")], reply("{}"), offered=None, requested_sampling=schema)
    session.work([user("hello there")], offered=None)
    assert list(session.sides()) == [0]
    alone = Recording()
    alone.ask([user("Rate it")], reply("{}"), offered=None, requested_sampling=schema)
    assert alone.sides() == {}


def test_a_commit_message_beside_a_talk_without_tools_is_a_side_call() -> None:
    session = Recording()
    shots = [system("Edit files."), user("example"), reply("an edit"), user("ok"), reply("Ok."), user("Add a line")]
    session.ask(shots, reply("<<<<<<< SEARCH"), offered=None)
    session.ask([system("Write a one-line commit message."), user("diff --git")], reply("Add line"), offered=None)
    assert list(session.sides()) == [1]


def test_two_roles_of_a_system_without_tools_that_each_ask_once_are_both_the_agents() -> None:
    session = Recording()
    session.ask([system("Plan."), user("task")], reply("a plan"), offered=None)
    session.ask([system("Solve."), user("a plan")], reply("a solution"), offered=None)
    assert session.sides() == {}


def test_a_naming_call_between_turns_is_a_side_call_and_the_nudges_after_it_are_work() -> None:
    session = Recording()
    history = session.work([system("a"), system("b"), *TASK], 2)
    session.ask([system("Name this."), user("conversation")], reply("hello-world"), offered=None)
    for _ in range(2):
        history = session.work([*history, user("<system>No tool call detected</system>")], 1)
    assert list(session.sides()) == [2]


@pytest.mark.parametrize("model", ["m", "another-model"])
def test_a_sub_agent_with_its_own_prompt_and_tools_is_work(model: str) -> None:
    session = Recording()
    history = [*TASK, session.ask(TASK, reply(None, ("task", {"prompt": "sub"})), offered=tools("bash", "task"))]
    session.work([system("You are a sub-agent."), user("SUBTASK")], 3, offered=BASH, model=model)
    session.ask([*history, answer("Done: written")], reply("done"), offered=tools("bash", "task"))
    assert session.sides() == {}


def test_a_last_word_that_a_sub_agent_gives_without_tools_is_work() -> None:
    session = Recording()
    both = tools("bash", "task")
    history = [*TASK, session.ask(TASK, reply(None, ("task", {})), offered=both)]
    # A template that does not render tools: leaving them out does not change the prompt.
    sub = [system("sub"), user("SUBTASK")]
    sub = [*sub, session.ask(sub, reply(None, ("bash", {}))), answer()]
    last = session.ask(sub, reply("the final word"), offered=None)
    share_prefix(session, 1, 2)
    session.ask([*history, answer(str(last["content"]))], reply("done"), offered=both)
    assert session.sides() == {}


def share_prefix(session: Recording, parent: int, child: int) -> None:
    """As if the template had not rendered the tools: the child's prompt extends the parent."""
    before, after = session.turns[parent], session.turns[child]
    after.prompt_ids_P = [*before.prompt_ids_P, *before.completion_ids_T, 257, child, 260, 258]


@pytest.mark.parametrize("how", ["no tools", "tools forbidden"])
def test_a_compaction_is_a_side_call_and_both_histories_are_trained(how: str) -> None:
    session = Recording()
    history = session.work(TASK, 3)
    wanted: dict[str, Any] = {"offered": None} if how == "no tools" else {"request": {"tool_choice": "none"}}
    summary = session.ask([*history, user("Summarise the work so far")], reply("Wrote hello.txt, ran ls."), **wanted)
    if how == "no tools":
        share_prefix(session, 2, 3)
    session.work([TASK[0], user(f"Earlier work: <summary>{summary['content']}</summary> Go on.")], 2)
    assert list(session.sides()) == [3]


def test_a_compaction_that_runs_beside_the_agent_is_a_side_call_whichever_arrives_first() -> None:
    for compaction_first in (True, False):
        session = Recording()
        history = [*TASK, session.ask(TASK, reply(None, ("bash", {}))), answer()]
        order = [True, False] if compaction_first else [False, True]
        for compacts in order:
            if compacts:
                request = {"tool_choice": "none"}
                session.ask([*history, user("Summarise")], reply("a summary of it"), request=request)
            else:
                session.ask(history, reply("done"))
        assert list(session.sides()) == [1 if compaction_first else 2]


def test_a_forced_answer_without_tools_that_the_agent_goes_on_from_is_work() -> None:
    session = Recording()
    history = [*TASK, session.ask(TASK, reply("look", ("bash", {}))), answer()]
    history = [*history, session.ask(history, reply("my view"), request={"tool_choice": "none"}), user("go on")]
    session.ask([said("system", "a clock: 12:01"), *history[1:]], reply("done"))  # the prefix breaks here
    assert session.sides() == {}


def test_failed_attempts_count_as_abandoned_once_the_request_went_through() -> None:
    session = Recording()
    for _ in range(5):
        session.ask(TASK, reply(), status=TurnStatus.FAILED, ids=False, error="EngineError: 500")
    session.work(TASK, 2)
    assert set(session.sides()) == {0, 1, 2, 3, 4}
    assert all("asked again as s-0005" in reason for reason in session.sides().values())


def test_attempts_that_never_went_through_are_the_agents_own_failure() -> None:
    session = Recording()
    for _ in range(3):
        session.ask(TASK, reply(), status=TurnStatus.FAILED, ids=False, error="EngineError: 500")
    assert session.sides() == {}


def test_the_budget_counts_no_call_that_may_not_use_its_tools() -> None:
    session = Recording()
    history = session.work(TASK, 2)
    session.ask([*history, user("Summarise")], reply("so far"), request={"tool_choice": "none"})
    assert count_agent_calls(Facts.of(turn) for turn in session.turns) == 2


def test_a_clock_in_the_system_prompt_makes_no_side_call_of_the_first_question() -> None:
    session = Recording()
    history = [user("Fix the bug")]
    for second in range(3):
        got = session.ask([system(f"It is 12:00:0{second}. You fix bugs."), *history], reply("look"), offered=None)
        history += [got, user("output")]
    session.ask([system("Write a one-line commit message."), user("diff --git")], reply("Fix"), offered=None)
    assert list(session.sides()) == [3]

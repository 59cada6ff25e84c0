"""What agents do with a reply that was cut: each way found in real traffic leaves one attempt in training."""

import pytest

from capture_proxy.graph import build
from capture_proxy.trace import to_row_trace
from capture_proxy.types import TurnStatus
from tests.capture.recording import Recording, answer, reply, system, user

TASK = [system(), user("Write hello world")]
WRITE = reply("I will write it.", ("bash", {"command": "echo hello > hello.txt"}))


def trained(session: Recording) -> list[str]:
    """The turns that the rows train."""
    return sorted(t["turn_id"] for row in to_row_trace(session.capture).turns for t in row.metadata["turns"])


@pytest.mark.parametrize("first", [TurnStatus.ABORTED, TurnStatus.OK])
def test_an_aborted_tool_call_in_the_history_beside_the_retry_abandons_the_first_attempt(first: TurnStatus) -> None:
    session = Recording()
    session.ask(TASK, WRITE, status=first)
    session.ask(TASK, WRITE)
    echo = reply("", ("bash", {}))
    session.ask([*TASK, echo, answer("Tool execution aborted"), WRITE, answer()], reply("done"))
    assert list(session.sides()) == [0] and session.sides()[0].startswith("abandoned")
    assert trained(session) == ["s-0001", "s-0002"]


@pytest.mark.parametrize("first", [TurnStatus.ABORTED, TurnStatus.OK])
def test_a_partial_reply_with_a_request_to_resume_is_not_trained_even_if_the_engine_finished_it(
    first: TurnStatus,
) -> None:
    session = Recording()
    session.ask(TASK, WRITE, status=first)
    resumed = [*TASK, reply("I will write"), user("Your response was cut off. Resume directly.")]
    resumed = [*resumed, session.ask(resumed, reply(" it.", ("bash", {"command": "ls"}))), answer()]
    session.ask(resumed, reply("done"))
    assert trained(session) == ["s-0001", "s-0002"]
    if first is TurnStatus.OK:
        assert session.sides() == {0: "abandoned: the agent received a part of this reply only"}


def test_both_attempts_joined_into_one_message_train_the_attempt_that_finished() -> None:
    session = Recording()
    session.ask(TASK, WRITE, status=TurnStatus.ABORTED)
    session.ask(TASK, WRITE)
    joined = reply("I will write it.I will write it.", ("bash", {}), ("bash", {"command": "echo hello > hello.txt"}))
    session.ask([*TASK, joined, answer("", "c0"), answer("", "c1")], reply("done"))
    assert list(session.sides()) == [0]
    assert trained(session) == ["s-0001", "s-0002"]


def test_a_reply_whose_white_space_or_spelling_of_arguments_changed_was_received_whole() -> None:
    session = Recording()
    session.ask(TASK, reply("I will write it.\n\n", ("bash", {"command": "café"})))
    echo = reply("I will write it.", ("bash", {"command": "café"}))
    echo["tool_calls"][0]["function"]["arguments"] = '{"command":"café"}'
    session.ask([*TASK, echo, answer()], reply("done"))
    assert session.sides() == {}
    assert trained(session) == ["s-0000", "s-0001"]


@pytest.mark.parametrize("kept_as", ["reasoning_content", "reasoning", "in the text", "dropped"])
def test_reasoning_that_leaves_the_history_gives_rows_that_train_every_reply_once(kept_as: str) -> None:
    session = Recording()
    history = list(TASK)
    for i in range(3):
        got = session.ask(history, reply(f"step {i}", ("bash", {"n": i}), reasoning="I think so"))
        echo = {k: v for k, v in got.items() if k != "reasoning_content"}
        if kept_as == "in the text":
            echo["content"] = f"<think>I think so</think>{got['content']}"
        elif kept_as != "dropped":
            echo[kept_as] = "I think so"
        history += [echo, answer()]
    assert session.sides() == {}
    rows = to_row_trace(session.capture).turns
    assert len(rows) == (1 if kept_as in ("reasoning_content", "in the text") else 3)
    assert trained(session) == ["s-0000", "s-0001", "s-0002"]
    if len(rows) == 3:
        fork = build(session.turns).nodes["s-0001"].fork
        assert fork is not None and fork.reason == "reply rewritten"
        assert fork.position == len(session.turns[0].prompt_ids_P), "the reasoning is the first that is missing"


def test_a_reply_that_was_lost_on_its_way_is_trained_once_as_the_attempt_that_goes_on() -> None:
    session = Recording()
    session.ask(TASK, WRITE)
    session.ask(TASK, reply("Another way.", ("bash", {"command": "touch hello.txt"})))
    session.ask([*TASK, session.turns[1].message, answer()], reply("done"))
    assert session.sides() == {0: "abandoned: asked again as s-0001"}


def test_siblings_that_ran_at_once_are_no_retries_of_each_other() -> None:
    session = Recording()
    history = [*TASK, session.ask(TASK, reply("both", ("bash", {}))), answer()]
    session.ask([*history, user("look left")], reply("left"), at=10.0)
    session.ask([*history, user("look right")], reply("right"), at=10.1)
    assert session.sides() == {}
    session.turns[2].started_at = 11.0  # once the first had ended it is the same question in other words
    assert list(session.sides()) == [1]


def test_a_retry_with_a_bad_last_message_leaves_the_good_turn_alone() -> None:
    session = Recording()
    history = session.work(TASK, 2)
    session.ask([*history, user("x")], reply(), status=TurnStatus.FAILED, ids=False, error="BadRequest: x")
    session.ask([*history, user("y")], reply("fine"))
    assert session.sides() == {}
    assert trained(session) == ["s-0000", "s-0001", "s-0003"]

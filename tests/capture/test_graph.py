"""The turn graph and the side-call rule, on made-up turns and on any interleaving of them."""

import itertools
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_proxy.graph import Facts, Fork, assign_roles, build, count_agent_calls
from capture_proxy.types import Turn, TurnRole, TurnStatus

TOOLS = [{"type": "function", "function": {"name": "bash"}}]


def turn(
    index: int,
    prompt: list[int],
    completion: list[int],
    *,
    tools: bool = True,
    model: str = "m",
    max_tokens: int | None = None,
    status: TurnStatus = TurnStatus.OK,
    messages: list[dict[str, Any]] | None = None,
) -> Turn:
    return Turn(
        turn_id=f"t{index}",
        session_id="s",
        index=index,
        dialect="openai_chat",
        request={
            "model": model,
            "messages": messages or [{"role": "user", "content": f"{prompt}"}],
            "tools": TOOLS if tools else [],
        },
        requested_sampling={} if max_tokens is None else {"max_tokens": max_tokens},
        sampling={},
        prompt_ids_P=prompt,
        completion_ids_T=completion,
        logprobs_T=[-0.5] * len(completion),
        version_spans=[],
        message={},
        finish_reason="stop",
        status=status,
        role=TurnRole.AGENT,
    )


def sides(turns: list[Turn]) -> dict[str, str]:
    assign_roles(turns)
    return {t.turn_id: t.side_reason for t in turns if t.side_reason is not None}


def test_a_conversation_is_one_lineage() -> None:
    turns = [turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 9], [4]), turn(2, [1, 2, 3, 9, 4, 9], [5])]
    graph = build(turns)
    assert graph.lineages == [["t0", "t1", "t2"]]
    assert graph.roots == ["t0"]
    assert all(node.fork is None for node in graph.nodes.values())


def test_the_longest_prefix_is_the_parent_whatever_the_order() -> None:
    turns = [turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 9], [4]), turn(2, [1, 2, 3, 9, 4, 9], [5])]
    for order in itertools.permutations(turns):
        assert {n.turn_id: n.parent for n in build(order).nodes.values()} == {"t0": None, "t1": "t0", "t2": "t1"}


@pytest.mark.parametrize(
    ("prompt", "fork"),
    [
        ([1, 2, 7, 8], Fork(2, "t0", "history rewritten")),
        ([1, 2, 3, 4, 6, 9], Fork(4, "t0", "reply rewritten")),
        ([1, 2, 3, 4, 5, 8], Fork(5, "t1", "another continuation")),
        ([9, 9], None),
    ],
)
def test_a_fork_says_where_and_why(prompt: list[int], fork: Fork | None) -> None:
    turns = [turn(0, [1, 2, 3], [4, 5]), turn(1, [1, 2, 3, 4, 5, 9], [6]), turn(2, prompt, [7])]
    assert build(turns).nodes["t2"].fork == fork


def test_reasoning_dropped_from_history_gives_two_trained_rows_and_no_side_call() -> None:
    turns = [turn(0, [1, 2], [50, 51, 3]), turn(1, [1, 2, 3, 9], [60, 4]), turn(2, [1, 2, 3, 9, 4, 9], [5])]
    assert sides(turns) == {}
    assert build(turns).lineages == [["t0"], ["t1"], ["t2"]]


@pytest.mark.parametrize("title_at", [0, 1, 2])
def test_a_title_call_is_a_side_call_wherever_it_comes(title_at: int) -> None:
    agent = [([1, 2], [3]), ([1, 2, 3, 9], [4])]
    calls: list[tuple[list[int], list[int], bool]] = [(p, c, True) for p, c in agent]
    calls.insert(title_at, ([7, 7], [8], False))
    turns = [turn(i, p, c, tools=tools) for i, (p, c, tools) in enumerate(calls)]
    assert list(sides(turns)) == [f"t{title_at}"]
    assert "tools" in (turns[title_at].side_reason or "")


def test_probes_titles_and_other_models_are_kept_apart_from_the_main_loop() -> None:
    turns = [
        turn(0, [9], [1], tools=False, model="small", max_tokens=1),
        turn(1, [8, 8], [1], tools=False),
        turn(2, [1, 2], [3]),
        turn(3, [7], [1], tools=False),
        turn(4, [1, 2, 3, 9], [4]),
        turn(5, [6, 6], [4], model="small"),
        turn(6, [1, 2, 3, 9, 4, 9], [5]),
    ]
    found = sides(turns)
    assert list(found) == ["t0", "t1", "t3", "t5"]
    assert found["t0"].startswith("probe") and "'small'" in found["t5"]


def test_without_tools_anywhere_every_call_but_a_probe_is_the_agents() -> None:
    turns = [
        turn(0, [1], [2], tools=False, max_tokens=1),
        turn(1, [3], [4], tools=False),
        turn(2, [5], [6], tools=False),
    ]
    assert list(sides(turns)) == ["t0"]


def test_a_call_without_tools_that_continues_the_agent_is_the_agents() -> None:
    assert sides([turn(0, [1], [2]), turn(1, [1, 2, 9], [3], tools=False)]) == {}
    assert sides([turn(0, [1], [2], tools=False), turn(1, [1, 2, 9], [3])]) == {}


def test_of_a_repeated_request_only_the_continued_attempt_is_the_agents() -> None:
    turns = [turn(0, [1], [2]), turn(1, [1], [3]), turn(2, [1, 2, 9], [4])]
    assert sides(turns) == {"t1": "abandoned: asked again as t0"}


def test_of_a_repeated_request_that_nobody_continued_the_last_finished_is_kept() -> None:
    turns = [turn(0, [1], [2]), turn(1, [1], [3]), turn(2, [1], [4], status=TurnStatus.ABORTED)]
    assert set(sides(turns)) == {"t0", "t2"}


def test_a_retry_with_a_changed_last_message_abandons_the_earlier_one() -> None:
    past = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns = [
        turn(0, [1, 2], [3], messages=[*past, {"role": "user", "content": "x"}]),
        turn(1, [1, 4], [5], messages=[*past, {"role": "user", "content": "y"}]),
        turn(2, [1, 4, 5, 9], [6], messages=[*past, {"role": "user", "content": "y"}, *past]),
    ]
    assert list(sides(turns)) == ["t0"]


def test_the_budget_counts_what_the_rule_will_call_the_agents() -> None:
    tools, plain = Facts(True, "m", None), Facts(False, "m", None)
    assert count_agent_calls([plain, plain]) == 2
    assert count_agent_calls([plain, tools, tools, Facts(True, "m", 1)]) == 2


# Sessions as a random walk: each new prompt extends, cuts or rewrites what was there.
_steps = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(["extend", "repeat", "cut", "new"]), st.booleans()),
    min_size=1,
    max_size=25,
)


def session(steps: list[tuple[int, str, bool]]) -> list[Turn]:
    turns: list[Turn] = []
    for i, (pick, kind, tools) in enumerate(steps):
        old = turns[pick % len(turns)] if turns else None
        if old is None or kind == "new":
            prompt = [pick % 3, 1]
        elif kind == "repeat":
            prompt = list(old.prompt_ids_P)
        elif kind == "cut":
            prompt = [*(old.prompt_ids_P + old.completion_ids_T)[:-1], 7]
        else:
            prompt = [*old.prompt_ids_P, *old.completion_ids_T, 8 + pick % 2]
        turns.append(turn(i, prompt, [2 + pick % 3] * (pick % 4), tools=tools))
    return turns


@settings(max_examples=150, deadline=None)
@given(_steps, st.randoms(use_true_random=False))
def test_any_interleaving_keeps_the_invariants(steps: list[tuple[int, str, bool]], shuffle: random.Random) -> None:
    turns = session(steps)
    expected = {n.turn_id: n.parent for n in build(turns).nodes.values()}
    roles = sides(turns)
    shuffle.shuffle(turns)
    graph = build(turns)
    by_id = {t.turn_id: t for t in turns}
    assert {n.turn_id: n.parent for n in graph.nodes.values()} == expected
    assert sides(turns) == roles
    for node in graph.nodes.values():
        prompt = by_id[node.turn_id].prompt_ids_P
        whole = {t.turn_id: t.prompt_ids_P + t.completion_ids_T for t in turns if t.completion_ids_T}
        prefixes = [len(ids) for tid, ids in whole.items() if prompt[: len(ids)] == ids]
        if node.parent is None:
            assert prefixes == []
        else:
            parent = whole[node.parent]
            assert prompt[: len(parent)] == parent and len(parent) == max(prefixes)
        if node.fork is not None:
            other = by_id[node.fork.turn_id]
            shared = other.prompt_ids_P + other.completion_ids_T
            assert prompt[: node.fork.position] == shared[: node.fork.position]
            assert prompt[node.fork.position : node.fork.position + 1] != shared[node.fork.position :][:1]
    # A turn sits at one depth of every lineage it is on, and each is on at least one: no sampled id is placed twice.
    for lineage in graph.lineages:
        assert len(set(lineage)) == len(lineage)
    assert set(itertools.chain.from_iterable(graph.lineages)) == set(by_id)
    # Of turns with one prompt, at least one attempt is not abandoned.
    for same in by_prompt(turns):
        kept = [t for t in same if t.side_reason is None or not t.side_reason.startswith("abandoned")]
        assert kept


def by_prompt(turns: list[Turn]) -> list[list[Turn]]:
    groups: dict[tuple[int, ...], list[Turn]] = {}
    for t in turns:
        if t.completion_ids_T:
            groups.setdefault(tuple(t.prompt_ids_P), []).append(t)
    return list(groups.values())


def test_a_long_session_is_linked_in_time_linear_in_its_tokens() -> None:
    def seconds(num_turns: int) -> float:
        history = list(range(2000))
        turns = []
        for i in range(num_turns):
            turns.append(turn(i, list(history), list(range(i, i + 100))))
            history += [*turns[-1].completion_ids_T, 5]
        num_tokens = sum(len(t.prompt_ids_P) for t in turns)
        start = time.process_time()
        build(turns)
        return (time.process_time() - start) / num_tokens

    assert seconds(160) < 6 * seconds(20)  # per token; comparing all pairs of turns would be 8 times and grow
    assert seconds(160) * 1e6 < 2  # microseconds per token

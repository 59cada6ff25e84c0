"""Turns are kept as what they add to earlier ones: exact, linear in size, and whole again after anything."""

import asyncio
import random
import sqlite3
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_proxy import trace
from capture_proxy.errors import StoreError
from capture_proxy.ids import TokenIds
from capture_proxy.store import Store, load_capture
from capture_proxy.types import Capture, Session, SessionPolicy, Turn, TurnStatus
from tests.capture.recording import TOOLS_MANY, Recording, answer, reply, system, user
from tests.capture.test_graph import session as random_session

OWNER = Session("s", "token", SessionPolicy(), {})


async def kept(turns: list[Turn], path: Path, *, restarts: bool = False) -> list[Turn]:
    """The turns after they were written in this order and read back."""
    store = Store.open(path)
    for i, turn in enumerate(turns):
        if restarts and i % 3 == 2:
            await store.close()
            store = Store.open(path)
        await store.put_turn(turn, OWNER)
    found = await store.turns("s")
    await store.close()
    return found


def without_raw(turns: list[Turn]) -> list[dict[str, Any]]:
    return [{name: getattr(t, name) for name in Turn.__slots__ if name != "raw"} for t in turns]


_steps = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(["extend", "extend", "repeat", "cut", "new"]), st.booleans()),
    min_size=1,
    max_size=16,
)


@settings(max_examples=15, deadline=None)
@given(_steps, st.randoms(use_true_random=False), st.booleans())
def test_any_session_comes_back_exactly_in_any_order_of_commits(
    tmp_path_factory: Any, steps: list[tuple[int, str, bool]], shuffle: random.Random, restarts: bool
) -> None:
    turns = random_session(steps)
    history: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
    for turn in turns:
        turn.logprobs_T = [None if shuffle.random() < 0.1 else -shuffle.random() for _ in turn.completion_ids_T]
        if shuffle.random() < 0.2:
            history = history[: shuffle.randrange(len(history) + 1)]
        history = [*history, {"role": "user", "content": str(shuffle.randrange(3))}]
        turn.request["messages"] = list(history)
        turn.body_hash = shuffle.randbytes(2)
        turn.raw = orjson.dumps(turn.request) if shuffle.random() < 0.8 else None
        if turn.turn_id != "t0":
            turn.bridged_from = f"t{shuffle.randrange(turn.index)}"  # also where it is not true
    order = list(turns)
    shuffle.shuffle(order)
    path = tmp_path_factory.mktemp("store") / "s.sqlite"
    found = asyncio.run(kept(order, path, restarts=restarts))
    assert without_raw(found) == without_raw(turns)
    again = trace.capture_from_json(orjson.loads(orjson.dumps(trace.capture_to_json(Capture(OWNER, found)))))
    assert without_raw(again.turns) == without_raw(found)

    async def ask() -> None:
        store = Store.open(path)
        for turn in turns:
            assert await store.raw_request(turn.turn_id) == turn.raw
            assert without_raw([await store.turn("s", turn.turn_id) or turns[0]]) == without_raw([turn])
            newest = await store.turn_by_body_hash("s", turn.body_hash)
            same = [t for t in order if t.body_hash == turn.body_hash]
            assert newest is not None and newest.turn_id == same[-1].turn_id
        assert await store.raw_request("nobody") is None and await store.turn("s", "nobody") is None
        assert await store.turn_by_body_hash("other", turns[0].body_hash) is None
        await store.close()

    asyncio.run(ask())


def long_session(num_turns: int, how: str = "steady") -> list[Turn]:
    """A tool loop with a large tool list. "changing": body and system prompt begin with another hash each time; "text":
    the engine gives no ids."""
    changing = how == "changing"
    session = Recording()
    history = [system("x" * 500), user("go")]
    for i in range(num_turns):
        nonce = random.Random(i).randbytes(16).hex()
        asked = [system(f"{nonce} {'x' * 500}"), *history[1:]] if changing else history
        got = session.ask(asked, reply(f"step {i}", ("bash", {"n": i})), offered=TOOLS_MANY, ids=how != "text")
        turn = session.turns[-1]
        turn.raw = orjson.dumps({"nonce": nonce, **turn.request} if changing else turn.request)
        turn.body_hash = bytes([i])
        history = [*history, got, answer(f"output {i} " * 20)]
    return session.turns


@pytest.mark.parametrize("how", ["steady", "changing", "text"])
async def test_the_file_grows_with_what_is_new_and_not_with_the_history(tmp_path: Path, how: str) -> None:
    def stored(path: Path) -> int:
        columns = "LENGTH(body) + LENGTH(raw)" + ("" if how == "changing" else " + LENGTH(prompt_ids)")
        with sqlite3.connect(path) as db:
            return int(db.execute(f"SELECT SUM({columns}) FROM capture_turns").fetchone()[0])

    sizes = []
    for num_turns in (20, 40, 80):
        path = tmp_path / f"{num_turns}.sqlite"
        turns = long_session(num_turns, how)
        assert without_raw(await kept(turns, path)) == without_raw(turns)
        sizes.append(stored(path))
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0])  # whole histories would be four times
    assert (sizes[2] - sizes[1]) / 40 < 4000  # bytes a turn; its request alone is ten times that


async def test_turns_that_are_read_share_their_history_in_memory(tmp_path: Path) -> None:
    turns = await kept(long_session(30), tmp_path / "s.sqlite")
    first, last = turns[0], turns[-1]
    assert isinstance(first.prompt_ids_P, TokenIds) and isinstance(last.prompt_ids_P, TokenIds)
    assert first.prompt_ids_P.buffer is last.prompt_ids_P.buffer
    assert first.request["messages"][0] is last.request["messages"][0]
    assert first.request["tools"] is last.request["tools"]


async def test_a_title_and_a_sub_agent_in_between_cost_the_main_loop_nothing(tmp_path: Path) -> None:
    session = Recording()
    history = [system("main " * 200), user("go")]
    for i in range(12):
        got = session.ask(history, reply(f"step {i}", ("bash", {})))
        history = [*history, got, answer("out")]
        session.ask([system("sub " * 200), user(f"sub task {i}")], reply("done"))
    path = tmp_path / "s.sqlite"
    await kept(session.turns, path)
    with sqlite3.connect(path) as db:
        new = [n // 4 for (n,) in db.execute("SELECT LENGTH(prompt_ids) FROM capture_turns ORDER BY seq")]
    assert max(new[2:]) < 100, "each turn adds its new messages only"


async def test_a_failed_call_without_ids_between_two_turns_breaks_nothing(tmp_path: Path) -> None:
    session = Recording()
    task = [system("x" * 3000), user("go")]
    got = session.ask(task, reply("a", ("bash", {})))
    session.ask([*task, got, answer()], reply(), status=TurnStatus.FAILED, ids=False)
    session.ask([*task, got, answer()], reply("b"))
    for turn in session.turns:
        turn.raw = orjson.dumps(turn.request)
    path = tmp_path / "s.sqlite"
    assert without_raw(await kept(session.turns, path)) == without_raw(session.turns)
    with sqlite3.connect(path) as db:
        assert [base for (base,) in db.execute("SELECT base FROM capture_turns ORDER BY seq")] == [None, 1, 1]


async def test_a_turn_that_cannot_be_kept_fails_alone_and_the_next_one_is_whole(tmp_path: Path) -> None:
    session = Recording()
    session.work([system(), user("go")], 4)
    store = Store.open(tmp_path / "s.sqlite")
    bad_ids, bad_json = session.turns[1], session.turns[2]
    bad_ids.prompt_ids_P = [1, -5]
    bad_json.request["messages"] = [{"role": "user", "content": object()}]
    results = await asyncio.gather(*(store.put_turn(t, OWNER) for t in session.turns), return_exceptions=True)
    assert [isinstance(r, StoreError) for r in results] == [False, True, True, False]
    assert without_raw(await store.turns("s")) == without_raw([session.turns[0], session.turns[3]])
    await store.close()


async def test_events_are_kept_by_session_and_in_order(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s.sqlite")
    await store.put_event("s", "egress_refused", "example.org:443")
    await store.put_event(None, "started", "")
    await store.put_event("s", "egress_refused", "example.com:443")
    found = await store.events("s")
    assert [event[1:] for event in found] == [("egress_refused", f"example.{end}:443") for end in ("org", "com")]
    assert 0 < found[0][0] <= found[1][0]
    assert [event[1:] for event in await store.events(None)] == [("started", "")]
    assert await store.events("other") == []
    await store.close()


async def test_a_capture_is_read_from_the_file_by_a_program_that_is_no_gateway(tmp_path: Path) -> None:
    turns = long_session(3)
    await kept(turns, tmp_path / "s.sqlite")
    capture = load_capture(tmp_path / "s.sqlite", "s")
    assert capture is not None and capture.session == OWNER
    assert without_raw(capture.turns) == without_raw(turns)
    assert load_capture(tmp_path / "s.sqlite", "other") is None
    (tmp_path / "text").write_text("no database " * 200)
    with pytest.raises(StoreError, match="cannot read"):
        load_capture(tmp_path / "text", "s")
